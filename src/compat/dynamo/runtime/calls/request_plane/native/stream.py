"""One answer on the native wire, at its caller: a connection of its own, which the worker opens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from dynamo.errors import CannotConnect, Disconnected, DynamoException, ResponseTimeout
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import OBJECT_CREDIT_BYTES, OBJECT_INDEX, OffsetCounter
from dynamo.runtime.calls.request_plane.native.frames import (
    KILL,
    MAX_MESSAGE_BYTES,
    SENTINEL,
    STOP,
    Codec,
    MalformedFrame,
    TwoPart,
    TwoPartDecoder,
    decode_prologue,
)
from dynamo.runtime.calls.request_plane.native.items import ChunkReader, bare_item, decode_item, failure_of, stream_item
from dynamo.runtime.calls.request_plane.stream import StreamBuffer, StreamState

logger = logging.getLogger(__name__)

HELD_BYTES: Final = 256 * 1024
"""What a reader may leave untaken before its socket is no longer read: the wire has no credits, so a slow reader is felt
by the worker through its full socket."""

SENTINEL_SECONDS: Final = 1.0  # how long after the last item the sentinel is awaited; a missing one is no error

_SENTINEL_HEADER: Final = SENTINEL[24:]
_OVER: Final = (StreamState.ENDED, StreamState.CLOSED)


class NativeStream(StreamBuffer, asyncio.Protocol):
    """The accepted connection and the stream in one object; the connection comes later than the stream.

    Offsets do not travel on this wire, so they are counted here: a lost or doubled item cannot be noticed, only a stream
    that breaks off.
    """

    GRANT_AT = 0  # whatever the reader takes makes room in the socket

    __slots__ = (
        "_chunks",
        "_decoder",
        "_held_bytes",
        "_is_reading",
        "_is_started",
        "_offsets",
        "_on_closed",
        "_on_home",
        "_stop_wanted",
        "_timer",
        "_transport",
        "subject",
    )

    def __init__(self, subject: str, codec: Codec, on_closed: Callable[[NativeStream], None]) -> None:
        """`subject` is the name under which the worker calls home; `on_closed` is called once, when the stream is over and
        its connection, if there was one, is gone."""
        super().__init__()
        self._chunks = ChunkReader(codec)
        self._decoder = TwoPartDecoder(max_data_bytes=2 * MAX_MESSAGE_BYTES)
        self._held_bytes = 0
        self._is_reading = True
        self._transport: asyncio.Transport | None = None
        self._is_started = False  # the prologue was read
        self._stop_wanted = False
        self._offsets = OffsetCounter()
        self._timer: asyncio.TimerHandle | None = None  # of the deadline; after the last item, of the sentinel
        self._on_home: Callable[[NativeStream], None] | None = None
        self._on_closed: Callable[[NativeStream], None] | None = on_closed
        self.subject = subject

    @property
    def is_over(self) -> bool:
        """Whether nothing more is awaited."""
        return self.state in _OVER

    # -- for the client ------------------------------------------------------------------------------------------

    def follow(self, context: Context) -> None:
        """Pass a stop or kill of the caller's context on, and keep its deadline: the wire has no field for one."""
        if context.deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(context.deadline, self._expire)
        super().follow(context)

    def await_home(self, came: Callable[[NativeStream], None] | None) -> None:
        """Call `came` when the worker has called home, or need not any more; None: the caller is gone."""
        self._on_home = came
        if came is not None and (self.is_over or self._transport is not None):
            self._called_home()

    def adopt(self, transport: asyncio.Transport, decoder: TwoPartDecoder) -> None:
        """Adopt the connection of a worker that named this stream; `decoder` may already hold more than the
        handshake.
        """
        self._decoder = decoder
        self._called_home()
        transport.set_protocol(self)
        self._transport = transport
        if self.is_over:
            self._leave()
            return
        if self._stop_wanted:
            transport.write(STOP)
        self.data_received(b"")

    def end(self, error: DynamoException | None) -> bool:
        """End the stream; its connection may still have a sentinel to bring."""
        ended = super().end(error)
        if ended:
            self._settle()
        return ended

    def lost(self, error: DynamoException) -> None:
        # A worker that received a stop may just close the connection.
        if self.end(None if self._stop_wanted else error):
            self._wake()
            self._leave()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raise AssertionError("a stream is given its connection by the listener")

    def data_received(self, data: bytes) -> None:
        was_over, arrived = self.state in _OVER, len(self.items)
        self._read(data)
        transport = self._transport
        if self.state in _OVER:
            if was_over:
                return
            if transport is not None and not transport.is_closing():
                self._timer = asyncio.get_running_loop().call_later(SENTINEL_SECONDS, self._leave)
        elif len(self.items) == arrived:
            return
        else:
            self._held_bytes += len(data)
            if self._held_bytes > HELD_BYTES and self._is_reading and transport is not None:
                self._is_reading = False
                transport.pause_reading()
        if self.listener is not None:
            self.call_listener()  # at once: nothing else arrives on this connection
        else:
            self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        reason = str(exc) if exc else "the worker closed the connection"
        self.lost(Disconnected(f"Stream ended before generation completed ({reason})"))
        self._closed()

    # -- inside --------------------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> None:
        """Take over every frame that is complete."""
        decoder = self._decoder
        try:
            while frames := decoder.take(data):
                data = b""
                for header, body in frames:
                    if not header and self._is_started:
                        if self.state not in _OVER:
                            self._on_item(body)
                    else:
                        self._on_control(TwoPart(bytes(header), bytes(body)))
        except MalformedFrame as error:
            logger.warning("a worker broke the response wire: %s", error)
            self.end(Disconnected(f"Stream ended before generation completed (the worker broke the wire: {error})"))
            self._leave()

    def _on_control(self, frame: TwoPart) -> None:
        if not self._is_started:
            problem = decode_prologue(frame)
            self._is_started = True
            if problem is not None:
                self.end(CannotConnect(f"the worker could not begin to answer: {problem}"))
        elif frame.data or frame.header != _SENTINEL_HEADER:
            raise MalformedFrame("a control frame that is no sentinel")
        elif not self.is_over:
            raise MalformedFrame("a sentinel before the last item")
        else:
            self._leave()

    def _on_item(self, data: bytes | bytearray) -> None:
        if (chunk := self._chunks.read(data)) is not None:
            if self.state is StreamState.OPEN:
                chunk.offset = self._offsets.advance(chunk.index, len(chunk.token_ids))
                self.items.append(chunk)
            return
        item_frame = decode_item(data, self._chunks.codec)
        if item_frame.data is not None:
            error = failure_of(item_frame.data)
            if error is not None:
                self.end(error)
                return
            if self.state is StreamState.OPEN:
                item = stream_item(item_frame.data)
                if item.index == OBJECT_INDEX:
                    item.extra = item.extra or bare_item(data, self._chunks.codec)
                    item.offset = len(data) // OBJECT_CREDIT_BYTES + 1
                else:
                    item.offset = self._offsets.advance(item.index, len(item.token_ids))
                self.items.append(item)
        if item_frame.complete_final:
            self.end(None)

    def _settle(self) -> None:
        """End the stream: it awaits no worker any more, and data that the worker still sends is read and dropped."""
        self._stop_timer()
        if self._on_home is not None:
            self._called_home()
        self._read_on()
        if self._transport is None:
            self._closed()

    def _leave(self) -> None:
        """Close the connection. With what it still holds unread this is a reset, which a worker takes for a kill."""
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read_on(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def _called_home(self) -> None:
        came, self._on_home = self._on_home, None
        if came is not None:
            came(self)

    def _closed(self) -> None:
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed(self)

    def _expire(self) -> None:
        self._timer = None
        if not self.is_over:
            if self._transport is not None:
                self._transport.write(KILL)
            self.end(ResponseTimeout("the request's deadline passed"))
            self._wake()
            self._leave()

    # -- of the buffer -------------------------------------------------------------------------------------------

    def _send_stop(self) -> None:
        if not self._stop_wanted:
            self._stop_wanted = True
            if self._transport is not None:
                self._transport.write(STOP)

    def _send_kill(self) -> None:
        if self._transport is not None:
            self._transport.write(KILL)
        self._settle()
        self._leave()

    def _grant(self, credits: int) -> None:
        self._held_bytes = 0
        if not self._is_reading:
            self._read_on()

    def _drain(self) -> None:
        self._read_on()
