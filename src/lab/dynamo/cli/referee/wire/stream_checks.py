"""Checks of the streams of a `mux` connection: requests, bodies, items and credits."""

from __future__ import annotations

from typing import Final

from dynamo.cli.referee.checks import CannotJudge, Level, demand
from dynamo.cli.referee.wire.mux_caller import AMPLE, KILL, WINDOW, mux_caller
from dynamo.cli.referee.wire.mux_seen import FINISH_REASONS, error_type
from dynamo.cli.referee.wire.run import LONG, SHORT, WireProbe, WireRow, encoded, too_short
from dynamo.runtime.calls.request_plane.base import OBJECT_INDEX
from dynamo.runtime.calls.request_plane.mux.frames import END_FLAG, HEADER, MAX_PAYLOAD, Kind, frame

MANY: Final = 16  # streams at once; engines for one user take fewer, and the others wait
MAX_BODY: Final = 32 << 20
DEADLINE_SECONDS: Final = 0.3
PADDING: Final = 100_000  # bytes of a body that does not fit in a frame
PIECES: Final = (1, 40_000, MAX_PAYLOAD)
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
        await caller.grant(stream_id, AMPLE)
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
    if not probe.shared.is_in_tokens:
        raise CannotJudge("the request of --model-request has no token_ids, so the cost of its answer cannot be chosen")
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
)  # fmt: skip
