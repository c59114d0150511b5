"""One `mux` connection of a caller to a worker process: all streams of all requests on it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final, cast

import msgspec

from dynamo.errors import CannotConnect, Disconnected, InvalidArgument, ResponseTimeout
from dynamo.runtime.base.tls import handshake_text
from dynamo.runtime.base.write_batch import WriteBatch
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import INITIAL_CREDITS, StreamItem
from dynamo.runtime.calls.request_plane.dial import Dialled
from dynamo.runtime.calls.request_plane.mux.frames import (
    END_FLAG,
    MAGIC,
    MAX_PAYLOAD,
    MAX_STREAM_ID,
    STEP_CAPABILITY,
    VERSION,
    Frame,
    FrameDecoder,
    Hello,
    Kind,
    Open,
    ProtocolError,
    decode_hello,
    decode_items,
    decode_message,
    decode_step,
    frame,
    pack,
)
from dynamo.runtime.calls.request_plane.mux.outflow import Outflow
from dynamo.runtime.calls.request_plane.mux.stream import InboundStreams, MuxStream
from dynamo.runtime.calls.request_plane.secret import (
    SECRET_CAPABILITY,
    SECRET_SETTING,
    WrongSecret,
    check_nonce,
    new_nonce,
)
from dynamo.runtime.calls.request_plane.security import PlaneSecurity

logger = logging.getLogger(__name__)

PING_SECONDS: Final = 20.0  # also what keeps a stateful firewall's entry alive
SILENCE_SECONDS: Final = 60.0  # an engine may block its worker's loop for longer than one would think
IDLE_SECONDS: Final = 300.0  # a connection without streams is closed after this long


class Heartbeat:
    """Pings the worker, drops the connection to a silent worker, and closes one that has not been used for long."""

    __slots__ = ("_connection", "_loop", "_tick_at", "_timer", "heard_at")

    def __init__(self, connection: MuxConnection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.heard_at = self._tick_at = self._loop.time()

    def start(self) -> None:
        """Check again in `PING_SECONDS`."""
        self._tick_at = self._loop.time() + PING_SECONDS
        self._timer = self._loop.call_at(self._tick_at, self._tick)

    def stop(self) -> None:
        """Stop: the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        # Late by so much: this process stood still, and what the worker sent meanwhile may be yet to be read.
        stood_still = now - self._tick_at >= PING_SECONDS / 2
        if now - self.heard_at >= SILENCE_SECONDS and not stood_still:
            self._connection.abandon(f"silent for {SILENCE_SECONDS:.0f} s")
            return
        inbound = self._connection.inbound
        if not inbound.streams and now - inbound.idle_since >= IDLE_SECONDS:
            self._connection.close()
            return
        # Also where the worker sends all the time: it drops a silent caller, and a slow stream needs no credits for minutes.
        self._connection.ping()
        self.start()


# How a caller of `mux` greets a worker, and learns whether the worker is the one it should be.


WITHOUT_TLS: Final = "if it has a certificate, calls to it need DYN_TCP_TLS_CA_CERT_PATH"
WITH_TLS: Final = "if it asks for a certificate, it must accept that of DYN_TCP_TLS_CLIENT_CERT_PATH"


class Greeting:
    """The caller's HELLO, and the proof of the shared secret."""

    __slots__ = ("_nonce", "_secret", "hint", "is_over", "proven")

    def __init__(self, security: PlaneSecurity | None) -> None:
        """With a `security` that requires a proof, `proven` is done when the worker has proven its identity."""
        self._secret = None if security is None else security.secret
        self._nonce = "" if self._secret is None else new_nonce()
        self.is_over = False
        self.hint = WITHOUT_TLS if security is None or security.client is None else WITH_TLS
        is_guarded = security is not None and (security.client is not None or security.secret is not None)
        self.proven: asyncio.Future[None] | None = asyncio.get_running_loop().create_future() if is_guarded else None

    def first_bytes(self) -> bytes:
        """Return the first bytes of a connection."""
        hello = Hello(
            version=VERSION,
            capabilities=[STEP_CAPABILITY],
            credits=INITIAL_CREDITS,
            agent=f"dynamo-unified pid {os.getpid()}",
        )
        if self._secret is not None:
            hello.capabilities.append(SECRET_CAPABILITY)
            hello.auth = self._nonce
        return MAGIC + frame(Kind.HELLO, pack(hello))

    def answered(self, hello: Hello) -> bytes | None:
        """Check the worker's HELLO; the frame to send next, if any. Raises ProtocolError."""
        if not 1 <= hello.version <= VERSION:
            raise ProtocolError(f"it answered with mux version {hello.version}, which we did not offer")
        reply: bytes | None = None
        if self._secret is not None:
            nonce, _, proof = (hello.auth or "").partition(":")
            try:
                check_nonce(nonce)
                self._secret.check(proof, "worker", self._nonce, nonce)
            except WrongSecret as error:
                text = f"the worker has none ({SECRET_SETTING})" if hello.auth is None else str(error)
                raise ProtocolError(f"the shared secret is asked for: {text}") from None
            reply = frame(Kind.AUTH, self._secret.prove("caller", self._nonce, nonce).encode())
        self.is_over = True
        if self.proven is not None and not self.proven.done():
            self.proven.set_result(None)
        return reply

    def failed(self, address: str, reason: str) -> None:
        """Fail the greeting: the connection is lost."""
        if self.proven is not None and not self.proven.done():
            self.proven.set_exception(CannotConnect(f"{address} is not who it should be: {reason}"))


INLINE_BODY_BYTES: Final = MAX_PAYLOAD - 8 * 1024  # leaves room for the head in the same frame


class MuxConnection(Dialled):
    """Opens streams, decodes what the worker sends and lets `inbound` hand it out, and sends the streams' frames."""

    def __init__(
        self,
        address: str,
        *,
        on_lost: Callable[[MuxConnection], None],
        security: PlaneSecurity | None = None,
    ) -> None:
        self.address = address
        self.usable = True  # False: no new streams (GOAWAY, closing, lost)
        self.greeting = Greeting(security)
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._batch = WriteBatch.of_this_loop()
        self._decoder = FrameDecoder()
        self.inbound = InboundStreams()
        self._next_stream_id = 1
        self._outflow = Outflow(self.inbound.streams.__contains__)
        self._failure: str | None = None
        self._heartbeat = Heartbeat(self)

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        self._outflow.begin(cast(asyncio.Transport, transport), self.greeting.first_bytes())
        self._heartbeat.start()

    def data_received(self, data: bytes) -> None:
        now = self._heartbeat.heard_at = self._loop.time()
        batch, inbound = self._batch, self.inbound
        batch.is_open = True
        try:
            try:
                self._on_frames(self._decoder.feed(data), now)
            except (ProtocolError, msgspec.MsgspecError, ValueError, RecursionError) as error:
                self._fail(f"{self.address} broke the wire: {error}")
            if inbound.lanes or inbound.touched:
                inbound.hand_out()
        finally:
            batch.flush()

    def _on_frames(self, frames: list[Frame], now: float) -> None:
        # Several steps in one read: this process is behind. The tokens of a stream then become one event, which costs less.
        is_behind = len(frames) > 1 and [frame[0] for frame in frames].count(Kind.STEP) > 1
        for kind, flags, stream_id, payload in frames:
            if kind == Kind.STEP:
                columns = decode_step(payload)
                if len({len(column) for column in columns}) != 1:
                    raise ProtocolError("the columns of a step differ in length")
                if is_behind:
                    self.inbound.on_items(
                        [StreamItem(id, 0, offset, [token]) for id, offset, token in zip(*columns, strict=True)]
                    )
                else:
                    self.inbound.on_step(*columns, now)
            elif kind == Kind.ITEMS:
                self.inbound.on_items(decode_items(payload))
            else:
                self._on_frame(kind, flags, stream_id, payload)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._heartbeat.stop()
        streams = list(self.inbound.streams.values())
        self.inbound.streams.clear()
        self._outflow.clear()
        reason = self._failure or (str(exc) if exc else "the connection was closed")
        if not self.greeting.is_over and self._failure is None:
            tls = "" if exc is None else f" ({handshake_text(exc)})"
            reason = f"it closed the connection before its HELLO{tls}; {self.greeting.hint}"
        self._failure = reason  # a later request for this connection fails for the same reason
        self.greeting.failed(self.address, reason)
        for stream in streams:
            stream.lost(Disconnected(f"Stream ended before generation completed ({self.address}: {reason})"))
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._outflow.paused = True

    def resume_writing(self) -> None:
        self._outflow.paused = False
        self._outflow.schedule()

    # -- streams -------------------------------------------------------------------------------------------------

    def open(self, path: str, body: bytes, context: Context) -> MuxStream:
        """Begin one stream; the first request of a turn of the loop leaves at once, others at its end."""
        if not self.usable:  # lost between its first byte and this turn of the loop: nothing else would end the stream
            raise CannotConnect(f"{self.address} closed the connection at once: {self._failure or 'no reason given'}")
        if self._next_stream_id > MAX_STREAM_ID - 2:
            self.usable = False
            raise CannotConnect(f"the connection to {self.address} ran out of stream ids; try again")
        head = self._head(path, context)
        opening = pack((head, body)) if len(body) < INLINE_BODY_BYTES else b""  # nearly always all there is to send
        inline = 0 < len(opening) <= INLINE_BODY_BYTES
        if not inline:
            if len(pack(head)) > INLINE_BODY_BYTES:
                raise InvalidArgument("the request's metadata does not fit in one frame of 64 KiB")
            self._outflow.check_room(body, self.address)
            head.size = len(body)
            opening = pack((head, None))
        stream_id = self._next_stream_id
        self._next_stream_id += 2
        stream = MuxStream(self, stream_id)
        self.inbound.streams[stream_id] = stream
        self._outflow.send(frame(Kind.OPEN, opening, stream_id=stream_id))
        if not inline:
            self._outflow.send_body(stream_id, body)
        return stream

    def _head(self, path: str, context: Context) -> Open:
        deadline_ms = None
        if context.deadline is not None:
            deadline_ms = round((context.deadline - self._loop.time()) * 1000)
            if deadline_ms <= 0:
                raise ResponseTimeout("the request's deadline passed before it was sent")
        return Open(
            path=path,
            id=context.id(),
            deadline_ms=deadline_ms,
            prompt_tokens=context.prompt_tokens,
            metadata=context.metadata.copy() if context.has_metadata else {},
            trace=context.trace_headers() or {},
        )

    def grant(self, stream_id: int, credits: int) -> None:
        """Give a stream's producer room."""
        self._outflow.grant(stream_id, credits)

    def cancel(self, stream_id: int, *, kill: bool) -> None:
        """Pass a stop or kill on."""
        if stream_id in self.inbound.streams:
            self._outflow.send(frame(Kind.CANCEL, b"\x01" if kill else b"\x00", stream_id=stream_id))

    def drop(self, stream_id: int) -> None:
        """Kill a stream and forget it: what still arrives for it is ignored."""
        self.cancel(stream_id, kill=True)
        self.inbound.forget(stream_id)

    # -- frames --------------------------------------------------------------------------------------------------

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        match kind:
            case Kind.ITEM_PART:
                self.inbound.on_piece(stream_id, payload, is_last=bool(flags & END_FLAG))
            case Kind.PING:
                self._outflow.send(frame(Kind.PONG, payload))
            case Kind.GOAWAY:
                self.usable = False
                if not self.inbound.streams:
                    self.close()
            case Kind.HELLO:
                reply = self.greeting.answered(decode_hello(payload))
                if reply is not None:
                    self._outflow.send(reply)
            case Kind.ERROR:
                message = decode_message(payload).get("message")
                self._fail(f"{self.address} closed the connection: {message}", tell=False)
            case _:
                pass  # PONG, or a later version's frame

    def _fail(self, message: str, *, tell: bool = True) -> None:
        logger.warning("%s", message)
        self._failure = message
        self.usable = False
        transport = self._outflow.transport
        if transport is not None:
            if tell:
                transport.write(frame(Kind.ERROR, pack({"message": message})))
            transport.close()

    # -- leaving -------------------------------------------------------------------------------------------------

    def ping(self) -> None:
        """Let the worker know that this caller is there."""
        self._outflow.send(frame(Kind.PING, b"\0" * 8))

    def abandon(self, reason: str) -> None:
        """Drop the connection now."""
        self._failure = reason
        if self._outflow.transport is not None:
            self._outflow.transport.abort()

    def close(self) -> None:
        """Leave; streams still open end with `Disconnected`."""
        self.usable = False
        transport = self._outflow.transport
        if transport is not None and not transport.is_closing():
            transport.close()
