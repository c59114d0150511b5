"""Checks of how streams of a `mux` connection end early: cancelling and errors."""

from __future__ import annotations

import asyncio
from typing import Final

from dynamo.cli.referee.checks import Broken, Level, demand
from dynamo.cli.referee.exchange import Json
from dynamo.cli.referee.wire.mux_caller import AMPLE, KILL, STOP, WINDOW, MuxCaller, demand_served, mux_caller
from dynamo.cli.referee.wire.mux_seen import ERROR_TYPES, SeenStream, error_type
from dynamo.cli.referee.wire.run import LONG, WireProbe, WireRow, encoded
from dynamo.runtime.calls.request_plane.mux.frames import Kind, frame, pack

HELD: Final = 24  # requests that are given up: more than a worker for tests takes at once
RETRY_SECONDS: Final = 0.1


async def cancel_stop(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        stream_id, stream = await caller.stalled(LONG)
        await caller.cancel(stream_id, STOP)
        await caller.grant(stream_id, LONG // 2)
        await caller.ended(stream, "END after CANCEL 0")
        demand(
            stream.failure is None or error_type(stream.failure) == "Cancelled",
            f"it ended with {stream.failure!r:.200}",
        )
        demand(stream.tokens < LONG, f"all {LONG} tokens came in spite of CANCEL 0")
        if stream.failure is None:
            stream.demand_whole()


async def cancel_kill(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        stream_id, stream = await caller.stalled(LONG)
        await caller.quiet()
        before = len(stream.items)
        await caller.cancel(stream_id, KILL)
        await caller.grant(stream_id, AMPLE)
        await caller.answered()
        await caller.pinged()
        await caller.quiet()
        demand(len(stream.items) == before, f"{len(stream.items) - before} items came after CANCEL 1")
        demand(stream.end is None, "END came after CANCEL 1")


async def cancel_ended(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        await caller.answered()
        for stream_id in (1, 999):
            for how in (STOP, KILL):
                await caller.cancel(stream_id, how)
        await caller.answered()


async def kill_frees(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        held = await _held(caller)
        for stream_id in held:
            await caller.cancel(stream_id, KILL)
        await _served_again(probe, caller, f"{HELD} requests were killed")


async def loss_frees(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        await _held(caller)
        caller.leave()
    async with mux_caller(probe) as caller:
        await _served_again(probe, caller, f"a connection with {HELD} requests was lost")


async def _held(caller: MuxCaller) -> list[int]:
    """Open more requests than a small worker has room for, and return their ids once one of them is answered."""
    held = [await caller.open(LONG) for _ in range(HELD)]
    await caller.until(lambda: any(stream.items or stream.end for _, stream in held), "the first item")
    return [stream_id for stream_id, _ in held]


async def _served_again(probe: WireProbe, caller: MuxCaller, after: str) -> None:
    """Wait until a request is served, within the time of an answer; a worker may need some of it to have room again."""
    stream = SeenStream(0)
    try:
        async with asyncio.timeout(probe.timeout):
            while True:
                stream = await caller.open_with_room()
                await caller.ended(stream)
                if error_type(stream.failure) != "WorkerOverloaded":
                    break
                await asyncio.sleep(RETRY_SECONDS)
    except (TimeoutError, Broken) as error:
        raise Broken(f"no request is served after {after}: {error or stream.failure!r}") from None
    stream.demand_whole()


# -- errors --------------------------------------------------------------------------------------------------------------


async def _declined(caller: MuxCaller, what: str, *, body: bytes | None = None, path: str | None = None) -> Json:
    """Open a request that cannot be served, and return its error record."""
    _, stream = await caller.open(body=body, path=path or caller.probe.shared.path)
    await caller.ended(stream, f"END for {what}")
    record = stream.failure
    demand(record is not None, f"{what} ended without an error")
    demand(isinstance(record, dict), f"the error record of {what} is no map: {record!r:.100}")
    demand(not stream.items, f"items came before the END of {what}")
    return record


def _demand_invalid(record: Json, what: str) -> None:
    demand(error_type(record) == "InvalidArgument", f"{what} is {record!r:.200}, not an InvalidArgument")


async def error_path(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        record = await _declined(caller, "an unknown path", path=f"{probe.shared.path}-unknown")
        demand(
            error_type(record) == "WorkerUnavailable", f"an unknown path is {record!r:.200}, not a WorkerUnavailable"
        )


async def error_body(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        for body in (b"\xc1", b"", encoded(probe.shared.request)[:-1]):
            what = f"the body {body[:8].hex(' ') or '(empty)'}, which is no msgpack"
            _demand_invalid(await _declined(caller, what, body=body), what)


async def error_types(probe: WireProbe) -> None:
    wrong = probe.shared.wrong_types()
    async with mux_caller(probe) as caller:
        what = "token_ids that are a text"
        _demand_invalid(await _declined(caller, what, body=encoded(wrong)), what)


async def error_record(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        for what, record in (
            ("a malformed body", await _declined(caller, "a malformed body", body=b"\xc1")),
            ("an unknown path", await _declined(caller, "an unknown path", path="unknown")),
        ):
            demand(isinstance(record.get("message"), str), f"the error of {what} has no `message`: {record!r:.200}")
            demand(error_type(record) in ERROR_TYPES, f"`error_type` of {what} is {record.get('error_type')!r:.200}")
            public = record.get("public")
            is_right = public is None or (isinstance(public, dict) and isinstance(public.get("message"), str))
            demand(is_right, f"`public` of {what} is no map with a message: {public!r:.200}")


async def error_alone(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        stream_id, stream = await caller.stalled(4 * WINDOW)
        await _declined(caller, "a malformed body", body=b"\xc1")
        await _declined(caller, "an unknown path", path="unknown")
        await caller.grant(stream_id, AMPLE)
        await caller.ended(stream, "END of a stream beside refused ones")
        stream.demand_whole()


async def error_head(probe: WireProbe) -> None:
    path = probe.shared.path
    for payload in (
        b"\xc1",
        b"",
        pack({"path": path}),
        pack([{"path": 7, "id": 8}, b"\x80"]),
        pack([{"id": "r"}, b"\x80"]),
    ):
        async with mux_caller(probe) as caller:
            stream = caller.opened(1)
            await caller.send(frame(Kind.OPEN, payload, stream_id=1))
            what = f"the refusal of OPEN with {payload[:16].hex(' ') or 'nothing'}"
            await caller.until(lambda: caller.seen.error is not None or stream.failure, what)  # noqa: B023
    await demand_served(probe, "after malformed OPENs")


CORE, OPERATOR = Level.CORE, Level.OPERATOR
ROWS: Final[tuple[WireRow, ...]] = (
    ("cancel.stop", cancel_stop, CORE, "major", "Cancelling: CANCEL 0 ends the stream early, with END",
        "Let the engine stop, and send its last chunk and END."),
    ("cancel.kill", cancel_kill, CORE, "major", "Cancelling: after CANCEL 1 nothing more is sent, not even END",
        "Forget the stream at once."),
    ("cancel.ended", cancel_ended, CORE, "major", "Cancelling: CANCEL for a stream that has just ended is ignored",
        "Skip ids that you do not know."),
    ("cancel.frees", kill_frees, OPERATOR, "major", "Cancelling: a killed request frees what it held",
        "End the engine's work where its stream is killed, also while it waits for credit."),
    ("cancel.lost-frees", loss_frees, OPERATOR, "major", "Cancelling: a lost connection is a kill of all its streams",
        "Kill every stream of a connection that is lost."),
    ("error.unknown-path", error_path, CORE, "major", "Error records: an unknown path is END with WorkerUnavailable",
        "Decline on the stream; the connection goes on."),
    ("error.malformed-body", error_body, CORE, "major", "Error records: a body that is no msgpack is InvalidArgument",
        "Decline on the stream; the connection goes on."),
    ("error.wrong-type", error_types, CORE, "major", "Error records: a member of a wrong type is InvalidArgument",
        "Check the request before the engine starts."),
    ("error.record", error_record, CORE, "major", "Error records: error_type is one of the named ones, message is a text",
        "Write both members, and `public` as a map."),
    ("error.alone", error_alone, CORE, "major", "Streams: an error of a request ends no other one",
        "Keep the errors of a stream on its stream."),
    ("error.malformed-open", error_head, OPERATOR, "major", "Streams: `path` and `id` of a head are texts",
        "Send ERROR and close, or END with an error."),
)  # fmt: skip
