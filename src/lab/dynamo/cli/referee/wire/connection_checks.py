"""Checks of a `mux` connection: HELLO, frames, PING, the shared secret, and peers that break it."""

from __future__ import annotations

import asyncio
from typing import Final

from dynamo.cli.referee.checks import CannotJudge, Cause, Level, demand
from dynamo.cli.referee.exchange import Json
from dynamo.cli.referee.wire.mux_caller import (
    AMPLE,
    WINDOW,
    MuxCaller,
    demand_served,
    mux_caller,
    raw_caller,
    worker_nonce,
)
from dynamo.cli.referee.wire.run import FLOOD, FLOOD_PATH, LONG, WireProbe, WireRow, flood
from dynamo.runtime.calls.request_plane.mux.frames import (
    END_FLAG,
    HEADER,
    MAGIC,
    MAX_PAYLOAD,
    STEP_CAPABILITY,
    Kind,
    frame,
    pack,
)
from dynamo.runtime.calls.request_plane.secret import NONCE_BYTES, new_nonce

HANDSHAKE_SECONDS: Final = 10.0  # after which a connection without HELLO is dropped
LATE_SECONDS: Final = 5.0  # how much later a busy worker may do so
LATER_VERSION: Final = 99
LATER_KIND: Final = 200
OF_CALLERS: Final = {Kind.OPEN, Kind.BODY, Kind.CANCEL, Kind.CREDIT, Kind.AUTH}
BROKEN_HELLO: Final = (b"\xc1", b"", pack([1]), pack({"version": "one"}), pack({"agent": "no version"}))


async def hello(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        found, first = caller.seen.hello, caller.seen.heads[0]
        demand(first.kind == Kind.HELLO, f"the first frame is kind {first.kind}, not HELLO")
        demand(isinstance(found, dict), f"HELLO carries no map: {found!r:.100}")
        demand(type(found.get("version")) is int, f"`version` of HELLO is {found.get('version')!r}, not a number")
        names = found.get("capabilities", [])
        demand(isinstance(names, list) and all(isinstance(name, str) for name in names), f"`capabilities` is {names!r}")


async def _version_for(probe: WireProbe, version: int) -> Json:
    async with mux_caller(probe, version=version) as caller:
        return caller.seen.hello.get("version")


async def lower_version(probe: WireProbe) -> None:
    own = await _version_for(probe, LATER_VERSION)
    demand(own in range(1, LATER_VERSION), f"version {LATER_VERSION} is answered with {own!r}, not the worker's own")
    one = await _version_for(probe, 1)
    demand(one == 1, f"version 1 is answered with {one!r}")


async def version_refused(probe: WireProbe) -> None:
    async with raw_caller(probe) as caller:
        await caller.hello(new_nonce(), version=0)
        await caller.refuses("version 0, which does not exist")


async def unknown_keys(probe: WireProbe) -> None:
    async with mux_caller(probe, colour="blue", nested={"a": [1, None]}) as caller:
        await caller.answered(colour="blue", nested={"a": [1, None]})


async def unknown_kind(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        await caller.send_raw(HEADER.pack(5, LATER_KIND, 0, 0, 0) + b"later", f"kind {LATER_KIND}, 5 bytes")
        await caller.send_raw(
            HEADER.pack(0, LATER_KIND + 1, END_FLAG, 0, 7), f"kind {LATER_KIND + 1} stream 7, 0 bytes"
        )
        await caller.answered()


async def not_awaited(probe: WireProbe) -> None:
    if probe.shared.secret is not None:
        raise CannotJudge("with a shared secret the first request waits for the worker's HELLO", Cause.NOT_OFFERED)
    async with raw_caller(probe) as caller:
        stream = caller.opened(caller.new_id())
        everything = MAGIC + frame(Kind.HELLO, pack({"version": 1})) + caller.opening(1) + frame(Kind.PING, b"12345678")
        await caller.send_raw(everything, "magic, HELLO, OPEN and PING in one piece")
        await caller.ended(stream)
        stream.demand_whole()
        await caller.until(lambda: caller.seen.pongs == [b"12345678"], "PONG")


async def split(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        stream_id = caller.new_id()
        stream, whole = caller.opened(stream_id), caller.opening(stream_id)
        for at in range(0, len(whole), 5):
            await caller.send_raw(whole[at : at + 5], "5 bytes of OPEN")
            await asyncio.sleep(0.001)  # so that the system sends them apart
        await caller.ended(stream)
        stream.demand_whole()


async def form(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        await caller.answered()
        await caller.pinged()
        heads = caller.seen.heads
        demand(sum(head.kind == Kind.HELLO for head in heads) == 1, "HELLO came more than once")
        for head in heads:
            name = f"a frame of kind {head.kind}"
            demand(head.reserved == 0, f"{name} has {head.reserved} where 0 is reserved")
            demand(head.flags in (0, END_FLAG), f"{name} has the flags {head.flags}")
            demand(head.length <= MAX_PAYLOAD, f"{name} has {head.length} bytes, more than {MAX_PAYLOAD}")
            demand(head.kind not in OF_CALLERS, f"{name} came, which only callers send")
            demand(head.kind == Kind.ITEM_PART or head.stream_id == 0, f"{name} is on stream {head.stream_id}, not 0")


async def ping(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        for mark in (bytes(8), b"\xff" * 8, b"\x00\x01\x02\x03\xc1\x80\x7f\xfe"):
            await caller.send(frame(Kind.PING, mark))
            await caller.until(lambda: caller.seen.pongs, "PONG")
            demand(caller.seen.pongs == [mark], f"PING {mark.hex()} is answered with {caller.seen.pongs[0].hex()}")
            caller.seen.pongs.clear()


async def ping_while_stalled(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        await caller.stalled(LONG)
        await caller.pinged()


async def goaway(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        stream_id, stream = await caller.stalled(4 * WINDOW)
        await caller.send(frame(Kind.GOAWAY, pack({"reason": "the judge leaves"})))
        await caller.grant(stream_id, AMPLE)
        await caller.ended(stream, "END of the stream in flight after GOAWAY")
        stream.demand_whole()


async def two_connections(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as one, mux_caller(probe) as other:
        stream_id, stream = await one.stalled(4 * WINDOW)
        (await other.answered()).demand_whole()  # with the same stream id
        await one.grant(stream_id, AMPLE)
        await one.ended(stream)
        stream.demand_whole()


# -- peers that break the wire -------------------------------------------------------------------------------------------


async def hello_missing(probe: WireProbe) -> None:
    async with raw_caller(probe) as caller:
        await caller.send_raw(MAGIC, "magic, and nothing after it")
        await caller.closes(HANDSHAKE_SECONDS + LATE_SECONDS)


async def hello_first(probe: WireProbe) -> None:
    async with raw_caller(probe) as caller:
        caller.opened(1)
        await caller.send_raw(MAGIC, "magic")
        await caller.send(caller.opening(1))
        await caller.refuses("a first frame that is not HELLO")


async def hello_malformed(probe: WireProbe) -> None:
    for payload in BROKEN_HELLO:
        async with raw_caller(probe) as caller:
            await caller.send_raw(MAGIC, "magic")
            await caller.send(frame(Kind.HELLO, payload))
            await caller.refuses(f"HELLO with {payload.hex(' ') or 'nothing'}")


async def too_long(probe: WireProbe) -> None:
    for length in (MAX_PAYLOAD + 1, 2**32 - 1):
        async with mux_caller(probe) as caller:
            await caller.send_raw(HEADER.pack(length, Kind.BODY, 0, 0, 1), f"the header of a frame of {length} bytes")
            await caller.refuses(f"a frame of {length} bytes")


async def garbage(probe: WireProbe) -> None:
    for data in (b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n", bytes(64), b"\xff" * 64, MAGIC[:-1] + b"\x00" * 64):
        async with raw_caller(probe) as caller:
            await caller.send_raw(data, f"{data[:16]!r} ... in place of the magic")
            caller.close_half()
            await caller.drained()
    await demand_served(probe, "after garbage")


async def half_closed(probe: WireProbe) -> None:
    async with mux_caller(probe, WINDOW) as caller:
        await caller.stalled(LONG)
        caller.close_half()
        await caller.closes()


async def silent(probe: WireProbe) -> None:
    async with raw_caller(probe) as nothing, raw_caller(probe) as half, mux_caller(probe) as part:
        await half.send_raw(MAGIC[:4], "half of the magic")
        await part.send_raw(part.opening(1)[:20], "half of OPEN")
        await demand_served(probe, f"beside three that are silent ({nothing.probe.timeout:g} s)")


async def not_read(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        caller.stop_reading()

        async def send() -> None:
            await caller.send(caller.opening(caller.new_id(), path=FLOOD_PATH, body=b"\x80"), note="OPEN, unknown path")

        await flood(send, FLOOD)
        await demand_served(probe, "beside a caller that does not read")


async def callers_error(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        await caller.send(frame(Kind.ERROR, pack({"message": "the judge sends ERROR, to see its end"})))
        await caller.closes()
    await demand_served(probe, "after ERROR of a caller")


# -- the shared secret ---------------------------------------------------------------------------------------------------


def _demand_secret(probe: WireProbe) -> None:
    if probe.shared.secret is None:
        raise CannotJudge("no shared secret is given (--secret-file)", Cause.NOT_OFFERED)


async def secret_proof(probe: WireProbe) -> None:
    _demand_secret(probe)
    seen = set()
    for _ in range(2):
        async with raw_caller(probe) as caller:
            seen.add(await _nonce(caller, new_nonce()))
    demand(len(seen) == 2, "the worker's nonce is the same on two connections")
    demand(all(len(nonce) == 2 * NONCE_BYTES for nonce in seen), f"a nonce has not {2 * NONCE_BYTES} characters")


async def _nonce(caller: MuxCaller, own: str) -> str:
    await caller.hello(own)
    await caller.until(lambda: caller.seen.hello is not None, "HELLO")
    return worker_nonce(caller, own)


async def secret_right(probe: WireProbe) -> None:
    _demand_secret(probe)
    async with mux_caller(probe) as caller:
        await caller.answered()


async def secret_wrong(probe: WireProbe) -> None:
    _demand_secret(probe)
    async with raw_caller(probe) as caller:
        await _nonce(caller, new_nonce())
        await caller.send(frame(Kind.AUTH, b"0" * 64))
        await caller.refuses("a wrong proof")


async def secret_absent(probe: WireProbe) -> None:
    _demand_secret(probe)
    async with raw_caller(probe) as caller:
        await caller.send_raw(MAGIC, "magic")
        await caller.send(frame(Kind.HELLO, pack({"version": 1})))
        await caller.refuses("HELLO without `auth`")


async def secret_first(probe: WireProbe) -> None:
    _demand_secret(probe)
    async with raw_caller(probe) as caller:
        await _nonce(caller, new_nonce())
        _, stream = await caller.open()
        await caller.refuses("a request before AUTH")
        demand(not stream.items and stream.end is None, "a request before AUTH was answered")


async def steps_unasked(probe: WireProbe) -> None:
    async with mux_caller(probe) as caller:
        streams = [(await caller.open(8))[1] for _ in range(4)]
        await caller.until(lambda: all(stream.end for stream in streams), "END of four streams")
        demand(not caller.seen.steps, f"{caller.seen.steps} STEP frames came to a caller without the capability")


async def steps(probe: WireProbe) -> None:
    async with mux_caller(probe, capabilities=[STEP_CAPABILITY]) as caller:
        streams = [(await caller.open(8))[1] for _ in range(8)]
        await caller.until(lambda: all(stream.end for stream in streams), "END of eight streams")
        for stream in streams:
            stream.demand_whole()
        if not caller.seen.steps:
            raise CannotJudge("the worker sends no STEP, which it need not", Cause.NOT_OFFERED)


CORE, OPERATOR = Level.CORE, Level.OPERATOR
ROWS: Final[tuple[WireRow, ...]] = (
    ("hello", hello, CORE, "major", "Connection: the worker's first frame is HELLO, a map with its version",
        "Answer HELLO with HELLO before anything else."),
    ("hello.lower-version", lower_version, CORE, "major", "Connection: HELLO is answered with the lower of both versions",
        "Answer with min(caller's version, your highest)."),
    ("hello.unknown-keys", unknown_keys, CORE, "major", "The `mux` wire, version 1: unknown keys of HELLO and of a request's head are ignored",
        "Read the keys that you know, and let the others pass."),
    ("hello.not-awaited", not_awaited, CORE, "major", "Connection: a caller need not await HELLO before it opens streams",
        "Take every frame that has arrived in one piece, in order."),
    ("hello.first", hello_first, OPERATOR, "major", "Connection: the first frame of each side is HELLO",
        "Send ERROR and close where another frame comes first."),
    ("hello.malformed", hello_malformed, OPERATOR, "major", "Connection: HELLO is a map with the number `version`",
        "Check its types, and send ERROR and close."),
    ("hello.version-refused", version_refused, OPERATOR, "minor",
        "Connection: a version that cannot be spoken is answered with ERROR", "Send ERROR and close for a version below 1."),
    ("hello.missing", hello_missing, OPERATOR, "minor", "Connection: a connection without HELLO is dropped after 10 s",
        "Start a timer with each connection, and end it with HELLO."),
    ("frames.form", form, CORE, "major", "Frames: headers have only what the table names",
        "Write reserved as 0, no flag but END, and no kind of the caller."),
    ("frames.split", split, CORE, "major", "Frames: a frame may arrive in any pieces",
        "Keep what has arrived until the length of its header is there."),
    ("frames.unknown-kind", unknown_kind, CORE, "major", "The `mux` wire, version 1: unknown frame kinds are skipped",
        "Skip the payload of a kind that you do not know."),
    ("frames.too-long", too_long, OPERATOR, "major", "Frames: a payload has at most 65,536 bytes",
        "Send ERROR and close once the header is there; do not await the payload."),
    ("ping", ping, CORE, "major", "Frames: PING is answered by PONG with the same bytes",
        "Copy the 8 bytes of PING."),
    ("ping.stalled", ping_while_stalled, CORE, "major", "Connection: control frames go before data that waits",
        "Read and answer while streams wait for credit."),
    ("goaway", goaway, CORE, "minor", "Frames: after GOAWAY the streams in flight go on",
        "Do not close at a caller's GOAWAY."),
    ("connections.two", two_connections, CORE, "major", "Streams: ids belong to a connection",
        "Keep the streams by connection, not by id alone."),
    ("hostile.garbage", garbage, OPERATOR, "major", "Connection: what does not begin with the magic is not `mux`",
        "Close such a connection, at its end at the latest, and go on listening."),
    ("hostile.half-closed", half_closed, OPERATOR, "major", "Cancelling: a lost connection is a kill of all its streams",
        "Take the end of what a caller sends for its leaving, and close."),
    ("hostile.silent", silent, OPERATOR, "major", "Connection: callers do not wait for each other",
        "Read each connection by itself."),
    ("hostile.not-read", not_read, OPERATOR, "major", "Connection: callers do not wait for each other",
        "Wait for a full socket in its own connection's task only."),
    ("hostile.error", callers_error, OPERATOR, "minor", "Frames: the connection is closed after ERROR",
        "Close where a caller sends ERROR."),
    ("secret.proof", secret_proof, CORE, "major", "The shared secret: HELLO has a new nonce and the worker's proof",
        "Compute HMAC-SHA256 over the role and both nonces, with a random nonce for each connection."),
    ("secret.right", secret_right, CORE, "major", "The shared secret: a caller with the right proof is served",
        "Take AUTH, and then the frames behind it."),
    ("secret.wrong", secret_wrong, CORE, "major", "The shared secret: a wrong proof is answered with ERROR",
        "Compare the proof in constant time, and close."),
    ("secret.absent", secret_absent, CORE, "major", "The shared secret: HELLO without `auth` is answered with ERROR",
        "Send ERROR and close."),
    ("secret.first", secret_first, CORE, "major", "The shared secret: before AUTH no other frame is taken",
        "Send ERROR and close for a request without proof."),
    ("steps.unasked", steps_unasked, CORE, "major", "Steps: STEP goes only to a caller with the capability `steps`",
        "Send ITEMS to the others."),
    ("steps.columns", steps, CORE, "major", "Steps: three columns of one length, each stream once, in order",
        "Flush what a stream has before a step, and give it one row."),
)  # fmt: skip
