"""Checks of the streams of a `mux` connection: requests, items, credits, cancelling and errors."""

from __future__ import annotations

import asyncio
from typing import Final

from dynamo.cli.referee.checks import Broken, CannotJudge, Level, demand
from dynamo.cli.referee.exchange import Json
from dynamo.cli.referee.wire.mux_caller import (
    ERROR_TYPES,
    FINISH_REASONS,
    KILL,
    STOP,
    WINDOW,
    MuxCaller,
    SeenStream,
    demand_served,
    error_type,
    mux_caller,
)
from dynamo.cli.referee.wire.run import LONG, SHORT, WireProbe, WireRow, encoded, too_short
from dynamo.runtime.calls.request_plane.base import OBJECT_INDEX
from dynamo.runtime.calls.request_plane.mux.frames import END_FLAG, HEADER, MAX_PAYLOAD, Kind, frame, pack

MANY: Final = 16  # streams at once; engines for one user take fewer, and the others wait
HELD: Final = 24  # requests that are given up: more than a worker for tests takes at once
MAX_BODY: Final = 32 << 20
DEADLINE_SECONDS: Final = 0.3
PADDING: Final = 100_000  # bytes of a body that does not fit in a frame
PIECES: Final = (1, 40_000, MAX_PAYLOAD)
RETRY_SECONDS: Final = 0.1
EMPTY: Final = b"\x80"  # a body


async def open_one(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        stream = await caller.answered()
        demand(stream.items, "the stream ended without an item")


async def items_form(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        stream = await caller.answered()
        for item in stream.items:
            demand(item.choice >= OBJECT_INDEX, f"the index of an item is {item.choice}")
            ids = item.token_ids
            demand(all(type(one) is int and one >= 0 for one in ids), f"token_ids are not numbers: {ids!r:.100}")
            demand(item.extra is None or isinstance(item.extra, dict), f"`extra` is no map: {item.extra!r:.100}")
            demand(item.choice != OBJECT_INDEX or not ids, "an object has token_ids")
            demand(item.choice != OBJECT_INDEX or item.offset >= 1, f"the cost of an object is {item.offset}")


async def items_offsets(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        (await caller.answered(16)).demand_offsets()


async def items_finish(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        stream = await caller.answered()
        chunks = [item for item in stream.items if item.choice >= 0]
        if not chunks:
            raise CannotJudge("the engine answers with objects, which have no finish reason")
        for choice in sorted({item.choice for item in chunks}):
            *others, last = [item.finish_reason for item in chunks if item.choice == choice]
            demand(last in FINISH_REASONS, f"the last chunk of choice {choice} has finish_reason {last!r}")
            demand(set(others) <= {None}, f"a finish_reason comes before the last chunk: {others!r:.100}")


async def items_parts(probe: WireProbe) -> None:
    # Nothing makes an engine write a large item; but an unknown path comes back in the text of the refusal.
    async with mux_caller(probe) as caller:
        stream_id = caller.new_id()
        bare = len(caller.opening(stream_id, path="", body=EMPTY)) - HEADER.size
        path = "x" * (MAX_PAYLOAD - bare - 4)
        stream = caller.opened(stream_id)
        await caller.send(caller.opening(stream_id, path=path, body=EMPTY))
        await caller.ended(stream)
        longest = max(head.length for head in caller.seen.heads)
        demand(longest <= MAX_PAYLOAD, f"an item travelled in one frame of {longest} bytes, more than {MAX_PAYLOAD}")
        if not stream.parts:
            raise CannotJudge("no answer of this worker was longer than a frame: it does not repeat an unknown path")
        (await caller.answered()).demand_whole()


async def end_total(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        (await caller.answered()).demand_whole()


async def end_once(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        stream = await caller.answered()
        await caller.answered()
        await caller.pinged()
        await caller.quiet()
        demand(not stream.after_end, f"{stream.after_end} items came after the END of their stream")


async def many(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        streams = [(await caller.open(8))[1] for _ in range(MANY)]
        await caller.until(lambda: all(stream.end for stream in streams), f"END of {MANY} streams")
        for stream in streams:
            stream.demand_whole()
        if probe.shared.is_in_tokens:
            counts = {stream.tokens for stream in streams}
            demand(len(counts) == 1, f"the same request got {sorted(counts)} tokens")


async def interleaved(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        stream_id, stalled = await caller.stalled(4 * WINDOW)
        (await caller.answered()).demand_whole()
        demand(stalled.end is None, "a stream without credit ended")
        await caller.grant(stream_id, 1 << 16)
        await caller.ended(stalled, "END of the first stream")
        stalled.demand_whole()


async def ids_with_gaps(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        for stream_id in (5, 4_097, 2**31 + 1, 2**32 - 1):
            stream = caller.opened(stream_id)
            await caller.send(caller.opening(stream_id))
            await caller.ended(stream, f"END of stream {stream_id}")
            stream.demand_whole()


async def id_in_use(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        stream_id, _ = await caller.stalled(LONG)
        await caller.send(caller.opening(stream_id))
        await caller.refuses(f"a second OPEN of stream {stream_id}")


async def id_zero(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        caller.opened(0)
        await caller.send(caller.opening(0))
        await caller.refuses("OPEN on stream 0, which is the connection")


async def deadline(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        milliseconds = int(DEADLINE_SECONDS * 1000)
        stream = (await caller.open(LONG, deadline_ms=milliseconds))[1]
        await caller.ended(stream, f"END after a deadline of {milliseconds} ms")
        if stream.failure is None:
            raise too_short(f"{LONG} tokens")
        found = error_type(stream.failure)
        demand(found == "ResponseTimeout", f"the deadline ended the stream with {stream.failure!r:.200}")


# -- bodies in pieces ----------------------------------------------------------------------------------------------------


async def body_pieces(probe: WireProbe) -> None:
    more = {"conformance_padding": "x" * PADDING} if isinstance(probe.shared.request, dict) else {}
    body = encoded(probe.shared.sized(SHORT, **more))
    cuts: list[bytes] = []
    at = 0
    while at < len(body):
        size = PIECES[min(len(cuts), len(PIECES) - 1)]
        cuts.append(body[at : at + size])
        at += size
    async with mux_caller(probe) as caller:
        both = [await caller.open(size=len(body)) for _ in range(2)]
        for number, piece in enumerate(cuts):
            flags = END_FLAG if number == len(cuts) - 1 else 0
            await caller.send(*(frame(Kind.BODY, piece, stream_id=stream_id, flags=flags) for stream_id, _ in both))
            if number == 0:
                (await caller.answered()).demand_whole()  # a short request between the pieces
        await caller.until(lambda: all(stream.end for _, stream in both), "END of two requests in pieces")
        for _, stream in both:
            stream.demand_whole()


async def body_cancelled(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        stream_id, stream = await caller.open(size=200)
        await caller.send(frame(Kind.BODY, bytes(100), stream_id=stream_id))
        await caller.cancel(stream_id, KILL)
        await caller.send(frame(Kind.BODY, bytes(100), stream_id=stream_id, flags=END_FLAG))
        await caller.answered()
        demand(not stream.items and stream.end is None, "a request that was killed before its body came is answered")


async def body_size(probe: WireProbe) -> None:
    body = encoded(probe.shared.sized(SHORT))
    for size in (len(body) - 1, len(body) + 1):
        async with mux_caller(probe) as caller:
            stream_id, stream = await caller.open(size=size)
            await caller.send(frame(Kind.BODY, body, stream_id=stream_id, flags=END_FLAG))
            what = f"the refusal of {len(body)} bytes in place of {size}"
            await caller.until(lambda: stream.end or caller.seen.error is not None, what)  # noqa: B023
            demand(caller.seen.error is not None or stream.failure, f"{len(body)} bytes were taken for {size}")


async def body_too_large(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        _, stream = await caller.open(size=MAX_BODY + 1)
        await caller.ended(stream, f"the refusal of a body of {MAX_BODY + 1} bytes")
        demand(stream.failure, "a body over the limit ended without an error")
        (await caller.answered()).demand_clean()


# -- credits -------------------------------------------------------------------------------------------------------------


async def credits_window(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        _, stream = await caller.stalled(LONG)
        await caller.quiet()
        demand(
            not stream.overrun, f"{stream.overrun} items came without credit: {stream.spent} spent of {stream.granted}"
        )


async def credits_continue(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        stream_id, stream = await caller.stalled(8 * WINDOW)
        while stream.end is None:
            await caller.grant(stream_id, max(1, WINDOW // 2))
            await caller.until(lambda: stream.end or stream.spent >= stream.granted, "the items that CREDIT allows")
        stream.demand_whole()


async def credits_end_free(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        _, stream = await caller.open(WINDOW)
        await caller.ended(stream, f"END of {WINDOW} tokens with {WINDOW} credits")
        stream.demand_clean()
        if stream.spent < WINDOW:
            raise too_short(f"{WINDOW} tokens")


async def credits_unknown(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        await caller.answered()
        for stream_id in (1, 999):
            await caller.grant(stream_id, 5)
        await caller.answered()


# -- cancelling ----------------------------------------------------------------------------------------------------------


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
        await caller.grant(stream_id, 1 << 16)
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
    """Demand that a request is served, within the time of an answer; a worker may need some of it to have room again."""
    stream = SeenStream(0)
    try:
        async with asyncio.timeout(probe.timeout):
            while True:
                _, stream = await caller.open()
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
        await caller.grant(stream_id, 1 << 16)
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
    ("open", open_one, CORE, "major", "Streams: a request is answered with items and an END without error",
        "Start the request of OPEN. Where it needs other members, give one with --model-request."),
    ("items.form", items_form, CORE, "major", "Items: [stream id, index, offset, token_ids, finish_reason, extra]",
        "Write the members in this order, with these types."),
    ("items.offsets", items_offsets, CORE, "major", "Items: offset is the number of tokens of this choice sent before",
        "Count the tokens of each choice."),
    ("items.finish", items_finish, CORE, "major", "Items: finish_reason is one of five words, on the last chunk",
        "Give the last chunk of each choice a reason, and the others nil."),
    ("items.parts", items_parts, CORE, "major", "Frames: an item that does not fit in a frame travels in ITEM_PART",
        "Cut the msgpack of the item into pieces of at most 65,536 bytes, with END on the last."),
    ("end.total", end_total, CORE, "major", "Items: END has the number of tokens sent over all choices",
        "Send the sum of what you counted."),
    ("end.once", end_once, CORE, "major", "Items: END is always the last item of its stream, and there is one",
        "Forget a stream at its END."),
    ("streams.many", many, CORE, "major", "Streams: a connection has many streams at once",
        "Keep the items of each stream apart."),
    ("streams.interleaved", interleaved, CORE, "major", "Streams: no stream waits for another's credit",
        "Let each stream wait by itself."),
    ("streams.ids", ids_with_gaps, CORE, "major", "Streams: ids are odd and increasing, with any gaps",
        "Take ids as unsigned numbers of 32 bits."),
    ("streams.id-in-use", id_in_use, OPERATOR, "minor", "Streams: an id is never reused on a connection",
        "Send ERROR and close where OPEN names a stream that is open."),
    ("streams.id-zero", id_zero, OPERATOR, "minor", "Frames: stream 0 means the connection",
        "Send ERROR and close."),
    ("deadline", deadline, CORE, "major", "Streams: after deadline_ms the stream ends with ResponseTimeout",
        "Start a timer with the request, and kill it then."),
    ("body.pieces", body_pieces, CORE, "major", "Streams: a body follows in BODY frames, END on the last",
        "Join the pieces of each stream, in whatever order streams take turns."),
    ("body.cancelled", body_cancelled, OPERATOR, "minor", "Cancelling: what is left of a killed request's body is skipped",
        "Skip BODY of a stream that you do not know."),
    ("body.size", body_size, OPERATOR, "minor", "Streams: the pieces are `size` bytes in all",
        "Compare the sum at END, and refuse what differs."),
    ("body.too-large", body_too_large, OPERATOR, "minor", "Streams: a body has at most 32 MiB",
        "Refuse the size of OPEN; do not await the body."),
    ("credits.window", credits_window, CORE, "major", "Credits: a worker sends only while the stream's credit is positive",
        "Start with the `credits` of HELLO, and subtract the cost of each item."),
    ("credits.continue", credits_continue, CORE, "major", "Credits: CREDIT lets a stream go on",
        "Add what CREDIT grants, and wake the stream."),
    ("credits.end-free", credits_end_free, CORE, "major", "Credits: END is free",
        "Send END without credit."),
    ("credits.unknown", credits_unknown, CORE, "major", "Credits: CREDIT for a stream that has ended is ignored",
        "Skip ids that you do not know."),
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
