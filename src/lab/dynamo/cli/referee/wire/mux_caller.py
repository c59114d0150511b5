"""The judge's end of a `mux` connection. It reads what a worker sends as it came, and takes nothing for granted.

The decoder is written from docs/wire.md and not from the one that callers of this package use: that one closes at the first
mistake, and this one has to name it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from dynamo.cli.referee.checks import Broken, CannotJudge, Cause, demand
from dynamo.cli.referee.exchange import Json
from dynamo.cli.referee.wire.run import SHORT, WireProbe, connected, encoded, shown, stop_reading, too_short
from dynamo.runtime.calls.request_plane.base import END_INDEX, OBJECT_INDEX
from dynamo.runtime.calls.request_plane.mux.frames import END_FLAG, HEADER, MAGIC, VERSION, Kind, frame, pack
from dynamo.runtime.calls.request_plane.secret import SECRET_CAPABILITY, WrongSecret, new_nonce

READ_BYTES: Final = 65536
MAX_ACCEPTED: Final = (
    4 << 20
)  # bytes of a frame that is read in spite of the limit, so that the check of it can name it
QUIET_SECONDS: Final = 0.2  # how long a check waits for what must not come
WINDOW: Final = 8  # credits of a stream that is to stall
ROOM: Final = 1024  # credits of a stream that is not to
STOP, KILL = b"\x00", b"\x01"
FINISH_REASONS: Final = frozenset({"stop", "eos", "length", "cancelled", "content_filter"})
ERROR_TYPES: Final = frozenset(
    {
        *("Unknown", "InvalidArgument", "CannotConnect", "Disconnected", "ConnectionTimeout", "ResponseTimeout"),
        *("Cancelled", "EngineShutdown", "StreamIncomplete", "WorkerOverloaded", "WorkerUnavailable"),
    }
)


class FrameHead(NamedTuple):
    """The header of a frame as it came."""

    length: int
    kind: int
    flags: int
    reserved: int
    stream_id: int


class SeenItem(NamedTuple):
    """One item of a stream."""

    choice: int
    offset: int
    token_ids: list[Json]
    finish_reason: Json = None
    extra: Json = None

    @property
    def cost(self) -> int:
        """Its credits."""
        return self.offset if self.choice == OBJECT_INDEX else max(1, len(self.token_ids))


@dataclass(slots=True)
class SeenStream:
    """What came of one stream."""

    granted: int
    items: list[SeenItem] = field(default_factory=list)
    end: SeenItem | None = None
    after_end: int = 0  # items that came behind the END
    spent: int = 0
    overrun: int = 0  # items that came without credit
    parts: int = 0  # frames of items that did not fit in one

    def take(self, item: SeenItem) -> None:
        """Take an item in its turn."""
        if self.end is not None:
            self.after_end += 1
        elif item.choice == END_INDEX:
            self.end = item
        else:
            self.overrun += self.spent >= self.granted
            self.spent += item.cost
            self.items.append(item)

    @property
    def tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(item.token_ids) for item in self.items if item.choice >= 0)

    @property
    def failure(self) -> Json:
        """The error record of the END; None where there is none."""
        return None if self.end is None else self.end.extra

    def demand_clean(self) -> None:
        """Demand an END without an error. A worker without room cannot be judged."""
        if error_type(self.failure) == "WorkerOverloaded":
            raise CannotJudge(f"the worker has no room: {self.failure!r:.200}", Cause.SERVER)
        demand(self.failure is None, f"the request ended with the error {self.failure!r:.300}")

    def demand_whole(self) -> None:
        """Demand that every token came, once and in order."""
        self.demand_clean()
        self.demand_offsets()
        total = None if self.end is None else self.end.offset
        demand(total == self.tokens, f"END counts {total} tokens, and {self.tokens} came")

    def demand_offsets(self) -> None:
        """Demand that the offsets of each choice have no gap and no overlap."""
        expected: dict[int, int] = defaultdict(int)
        for item in self.items:
            if item.choice >= 0:
                right = expected[item.choice]
                demand(item.offset == right, f"a chunk of choice {item.choice} has offset {item.offset}, not {right}")
                expected[item.choice] += len(item.token_ids)


class SeenFrames:
    """Everything that came on one connection. No I/O."""

    def __init__(self) -> None:
        self.heads: list[FrameHead] = []
        self.streams: dict[int, SeenStream] = {}
        self.hello: Json = None
        self.pongs: list[bytes] = []
        self.error: str | None = None
        self.steps = 0
        self._parts: dict[int, bytearray] = {}
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[FrameHead, bytes]]:
        """Take bytes, and return the frames that they complete. Raises Broken where they are none."""
        self._buffer += data
        found = []
        while len(self._buffer) >= HEADER.size:
            head = FrameHead(*HEADER.unpack_from(self._buffer))
            demand(
                head.length <= MAX_ACCEPTED, f"a frame of {head.length} bytes came: {bytes(self._buffer[:24]).hex(' ')}"
            )
            end = HEADER.size + head.length
            if len(self._buffer) < end:
                break
            payload = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            self.heads.append(head)
            found.append((head, payload))
            self._take(head, payload)
        return found

    def _take(self, head: FrameHead, payload: bytes) -> None:
        match head.kind:
            case Kind.HELLO:
                self.hello = decoded(payload, "HELLO")
            case Kind.PONG:
                self.pongs.append(payload)
            case Kind.ERROR:
                record = decoded(payload, "ERROR")
                self.error = str(record.get("message")) if isinstance(record, dict) else repr(record)
            case Kind.ITEMS:
                items = decoded(payload, "ITEMS")
                demand(isinstance(items, list), f"ITEMS carries no array: {items!r:.100}")
                for item in items:
                    self._item(item)
            case Kind.ITEM_PART:
                self._part(head, payload)
            case Kind.STEP:
                self._step(decoded(payload, "STEP"))

    def _item(self, raw: Json) -> int:
        is_right = isinstance(raw, list) and 3 <= len(raw) <= 6 and all(type(member) is int for member in raw[:3])
        demand(is_right, f"an item is not [stream id, index, offset, token_ids, ...]: {raw!r:.200}")
        demand(len(raw) < 4 or isinstance(raw[3], list), f"the token_ids of an item are no array: {raw!r:.200}")
        self.stream(raw[0]).take(SeenItem(raw[1], raw[2], *(raw[3:] or [[]])))
        return int(raw[0])

    def _part(self, head: FrameHead, payload: bytes) -> None:
        part = self._parts.setdefault(head.stream_id, bytearray())
        part += payload
        self.stream(head.stream_id).parts += 1
        if head.flags & END_FLAG:
            stream_id = self._item(decoded(bytes(self._parts.pop(head.stream_id)), "an item in parts"))
            demand(stream_id == head.stream_id, f"the parts of stream {head.stream_id} are an item of {stream_id}")

    def _step(self, columns: Json) -> None:
        is_right = isinstance(columns, list) and len(columns) == 3 and all(isinstance(one, list) for one in columns)
        demand(is_right, f"STEP is not three columns: {columns!r:.200}")
        ids, offsets, tokens = columns
        demand(len(ids) == len(offsets) == len(tokens), f"the columns of a STEP differ in length: {columns!r:.200}")
        demand(len(set(ids)) == len(ids), f"a stream is twice in one STEP: {ids!r:.200}")
        self.steps += 1
        for stream_id, offset, token in zip(ids, offsets, tokens, strict=True):
            self._item([stream_id, 0, offset, [token]])

    def stream(self, stream_id: int) -> SeenStream:
        """Return a stream that was opened. Raises Broken for another one."""
        found = self.streams.get(stream_id)
        if found is None:
            raise Broken(f"an item of stream {stream_id} came, which was not opened on this connection")
        return found


class MuxCaller:
    """One connection of the judge."""

    def __init__(
        self, probe: WireProbe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, credits: int = ROOM
    ) -> None:
        self.probe, self._reader, self._writer, self._credits = probe, reader, writer, credits
        self.seen = SeenFrames()
        self.is_closed = False
        self._next_id = 1

    # -- out -----------------------------------------------------------------------------------------------------

    async def send(self, *frames: bytes, note: str = "") -> None:
        """Write frames in one piece."""
        for one in frames:
            self.probe.note_sent(note or _line(FrameHead(*HEADER.unpack_from(one)), one[HEADER.size :]))
        with suppress(ConnectionError):  # what the worker made of it is seen by reading
            self._writer.write(b"".join(frames))
            await self._writer.drain()

    async def send_raw(self, data: bytes, note: str) -> None:
        """Write bytes that are no frame, or not a right one."""
        self.probe.note_sent(note)
        with suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    def close_half(self) -> None:
        """Send nothing more, and go on reading."""
        self.probe.note_sent("(end of what is sent)")
        with suppress(OSError):
            self._writer.write_eof()

    def leave(self) -> None:
        """Lose the connection."""
        self._writer.transport.abort()

    def stop_reading(self) -> None:
        """Read nothing more, so that what the worker writes fills the sockets."""
        stop_reading(self._writer)

    def new_id(self) -> int:
        """Return the next stream id."""
        self._next_id += 2
        return self._next_id - 2

    def opened(self, stream_id: int) -> SeenStream:
        """Expect items of a stream."""
        return self.seen.streams.setdefault(stream_id, SeenStream(self._credits))

    def opening(self, stream_id: int, tokens: int = SHORT, *, body: bytes | None = None, **head: Any) -> bytes:
        """Return the OPEN of a request."""
        shared = self.probe.shared
        full = {"path": shared.path, "id": f"conformance-{secrets.token_hex(6)}", **head}
        given = encoded(shared.sized(tokens)) if body is None else body
        return frame(Kind.OPEN, pack([full, None if "size" in head else given]), stream_id=stream_id)

    async def open(self, tokens: int = SHORT, *, body: bytes | None = None, **head: Any) -> tuple[int, SeenStream]:
        """Open a stream; its id, and where its items are seen."""
        stream_id = self.new_id()
        stream = self.opened(stream_id)
        await self.send(self.opening(stream_id, tokens, body=body, **head))
        return stream_id, stream

    async def grant(self, stream_id: int, credits: int) -> None:
        """Give credit to a stream."""
        stream = self.seen.streams.get(stream_id)
        if stream is not None:
            stream.granted += credits
        await self.send(frame(Kind.CREDIT, pack([[stream_id, credits]])))

    async def cancel(self, stream_id: int, how: bytes) -> None:
        """Stop or kill a stream."""
        await self.send(frame(Kind.CANCEL, how, stream_id=stream_id))

    # -- in ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            data = await self._reader.read(READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self.is_closed = True
            self.probe.note_seen("(the connection is closed)")
            return
        for head, payload in self.seen.feed(data):
            self.probe.note_seen(_line(head, payload))

    async def drained(self) -> None:
        """Demand that the worker closes the connection, whatever it sends first: the other wire's refusal is no frame."""
        try:
            async with asyncio.timeout(self.probe.timeout):
                with suppress(ConnectionError):
                    while data := await self._reader.read(READ_BYTES):
                        self.probe.note_seen(repr(data[:100]))
        except TimeoutError:
            raise Broken(f"the connection was not closed within {self.probe.timeout:g} s") from None

    async def until(self, holds: Callable[[], object], what: str, seconds: float = 0) -> None:
        """Read until something holds. Raises Broken where it does not come, or the connection is lost first."""
        seconds = seconds or self.probe.timeout
        try:
            async with asyncio.timeout(seconds):
                while not holds():
                    if self.is_closed:
                        why = "" if self.seen.error is None else f"; its ERROR: {self.seen.error}"
                        raise Broken(f"the worker closed the connection before {what} came{why}")
                    await self._read()
        except TimeoutError:
            raise Broken(f"{what} did not come within {seconds:g} s") from None

    async def quiet(self, seconds: float = 0) -> None:
        """Read what comes although nothing should."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds or QUIET_SECONDS):
                while not self.is_closed:
                    await self._read()

    async def closes(self, seconds: float = 0) -> None:
        """Demand that the worker closes the connection."""
        await self.until(lambda: self.is_closed, "the end of the connection", seconds)

    async def refuses(self, what: str) -> None:
        """Demand ERROR and then the end of the connection."""
        await self.until(lambda: self.seen.error is not None or self.is_closed, f"ERROR for {what}")
        demand(self.seen.error is not None, f"the connection was closed without ERROR for {what}")
        await self.closes()

    async def ended(self, stream: SeenStream, what: str = "END") -> None:
        """Read until a stream ends."""
        await self.until(lambda: stream.end is not None, what)

    async def answered(self, tokens: int = SHORT, **head: Any) -> SeenStream:
        """Open a stream and read all of it; it must end without an error."""
        _, stream = await self.open(tokens, **head)
        await self.ended(stream)
        stream.demand_clean()
        return stream

    async def stalled(self, tokens: int, **head: Any) -> tuple[int, SeenStream]:
        """Open a stream and read until its window is used up. Raises CannotJudge where its answer ends before."""
        stream_id, stream = await self.open(tokens, **head)
        await self.until(
            lambda: stream.end or stream.spent >= stream.granted, f"{stream.granted} credits' worth of items"
        )
        if stream.end is not None:
            stream.demand_clean()
            raise too_short(f"{tokens} tokens")
        return stream_id, stream

    async def pinged(self) -> None:
        """Send PING and read until its PONG: what was sent before has been handled then."""
        mark = secrets.token_bytes(8)
        await self.send(frame(Kind.PING, mark))
        await self.until(lambda: mark in self.seen.pongs, "PONG with the bytes of its PING")

    async def greet(self, capabilities: Sequence[str] = (), **more: Json) -> None:
        """Send the magic and HELLO, await the worker's HELLO, and prove the secret where there is one."""
        secret = self.probe.shared.secret
        nonce = new_nonce()
        await self.hello(nonce, capabilities, **more)
        await self.until(lambda: self.seen.hello is not None, "HELLO")
        if secret is not None:
            theirs = worker_nonce(self, nonce)
            await self.send(frame(Kind.AUTH, secret.prove("caller", nonce, theirs).encode()), note="AUTH (the proof)")

    async def hello(self, nonce: str, capabilities: Sequence[str] = (), **more: Json) -> None:
        """Send the magic and HELLO."""
        hello: dict[str, Json] = {"version": VERSION, "credits": self._credits, "agent": "dynamo conformance"}
        hello["capabilities"] = list(capabilities)
        if self.probe.shared.secret is not None:
            hello["auth"] = nonce
            hello["capabilities"].append(SECRET_CAPABILITY)
        await self.send_raw(MAGIC, "magic")
        await self.send(frame(Kind.HELLO, pack({**hello, **more})))


def worker_nonce(caller: MuxCaller, nonce: str) -> str:
    """Return the nonce of the worker's HELLO. Raises Broken where its proof is wrong."""
    hello, secret = caller.seen.hello, caller.probe.shared.secret
    auth = hello.get("auth") if isinstance(hello, dict) else None
    demand(isinstance(auth, str), f"the worker's HELLO has no `auth`: {hello!r:.200}")
    theirs, colon, proof = str(auth).partition(":")
    demand(colon, "the worker's `auth` is not NONCE:PROOF")
    try:
        if secret is not None:
            secret.check(proof, "worker", nonce, theirs)
    except WrongSecret as error:
        raise Broken("the worker's proof is not that of the secret of --secret-file") from error
    return theirs


@asynccontextmanager
async def raw_caller(probe: WireProbe, credits: int = ROOM) -> AsyncIterator[MuxCaller]:
    """Connect; nothing is sent."""
    reader, writer = await connected(probe)
    try:
        yield MuxCaller(probe, reader, writer, credits)
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)  # the transport reports its loss on the next turn


@asynccontextmanager
async def mux_caller(
    probe: WireProbe, credits: int = ROOM, capabilities: Sequence[str] = (), **more: Json
) -> AsyncIterator[MuxCaller]:
    """Connect and greet; `more` are further keys of HELLO."""
    async with raw_caller(probe, credits) as caller:
        await caller.greet(capabilities, **more)
        yield caller


async def demand_served(probe: WireProbe, when: str) -> None:
    """Demand that a new connection is served."""
    try:
        async with mux_caller(probe) as caller:
            await caller.answered()
    except (Broken, OSError) as error:
        raise Broken(f"another caller is not served {when}: {error}") from error


def error_type(record: Json) -> str:
    """Return the name of an error record's type, "" where it has none."""
    kind = record.get("error_type") if isinstance(record, dict) else None
    if isinstance(kind, dict) and set(kind) == {"Backend"}:
        kind = kind["Backend"]
    return kind if isinstance(kind, str) else ""


def decoded(payload: bytes, what: str) -> Json:
    """Return what a frame carries. Raises Broken where it is not msgpack."""
    try:
        return msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Broken(f"{what} is not msgpack ({error}): {payload[:40].hex(' ')}") from error


def _line(head: FrameHead, payload: bytes) -> str:
    name = Kind(head.kind).name if head.kind in set(Kind) else f"kind {head.kind}"
    flags = f" flags {head.flags}" if head.flags else ""
    return f"{name} stream {head.stream_id}{flags}, {head.length} bytes: {shown(payload)}"
