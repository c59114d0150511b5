"""The judge's end of a `mux` connection."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from dynamo.cli.referee.checks import Broken, demand
from dynamo.cli.referee.exchange import Json
from dynamo.cli.referee.wire.mux_seen import FrameHead, SeenFrames, SeenStream
from dynamo.cli.referee.wire.run import SHORT, WireProbe, connected, encoded, shown, stop_reading, too_short
from dynamo.runtime.calls.request_plane.mux.frames import HEADER, MAGIC, VERSION, Kind, frame, pack
from dynamo.runtime.calls.request_plane.secret import SECRET_CAPABILITY, WrongSecret, new_nonce

READ_BYTES: Final = 65536
QUIET_SECONDS: Final = 0.2  # how long a check waits for what must not come
WINDOW: Final = 8  # credits of a stream that is to stall
ROOM: Final = 1024  # credits of a stream that is not to
AMPLE: Final = 1 << 16  # credits for all that is left of any stream
STOP, KILL = b"\x00", b"\x01"


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
        """Wait until the worker closes the connection, whatever it sends first: the other wire's refusal is no frame."""
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
        """Wait until the worker closes the connection."""
        await self.until(lambda: self.is_closed, "the end of the connection", seconds)

    async def refuses(self, what: str) -> None:
        """Demand ERROR and then the end of the connection."""
        await self.until(lambda: self.seen.error is not None or self.is_closed, f"ERROR for {what}")
        demand(self.seen.error is not None, f"the connection was closed without ERROR for {what}")
        await self.closes()

    async def ended(self, stream: SeenStream, what: str = "END") -> None:
        """Read until a stream ends."""
        await self.until(lambda: stream.end is not None, what)

    async def open_with_room(self, tokens: int = SHORT, **head: Any) -> SeenStream:
        """Open a stream with credit for all of it, also where those of this connection begin with little."""
        stream_id, stream = await self.open(tokens, **head)
        if self._credits < ROOM:
            await self.grant(stream_id, AMPLE)
        return stream

    async def answered(self, tokens: int = SHORT, **head: Any) -> SeenStream:
        """Open a stream and read all of it; it must end without an error."""
        stream = await self.open_with_room(tokens, **head)
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
    """Raise Broken unless a new connection is served."""
    try:
        async with mux_caller(probe) as caller:
            await caller.answered()
    except (Broken, OSError) as error:
        raise Broken(f"another caller is not served {when}: {error}") from error


def _line(head: FrameHead, payload: bytes) -> str:
    name = Kind(head.kind).name if head.kind in set(Kind) else f"kind {head.kind}"
    flags = f" flags {head.flags}" if head.flags else ""
    return f"{name} stream {head.stream_id}{flags}, {head.length} bytes: {shown(payload)}"
