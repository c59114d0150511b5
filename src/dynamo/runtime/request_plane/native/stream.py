"""One answer on the native wire, at its caller: a connection of its own, which the worker opens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from dynamo.errors import CannotConnect, Disconnected, DynamoException, ResponseTimeout
from dynamo.runtime.context import Context, on_loop
from dynamo.runtime.request_plane.base import (
    FINISH_SECONDS,
    OBJECT_CREDIT_BYTES,
    OBJECT_INDEX,
    OffsetCounter,
    StreamItem,
)
from dynamo.runtime.request_plane.native.frames import (
    KILL,
    MAX_MESSAGE_BYTES,
    SENTINEL,
    STOP,
    Codec,
    MalformedFrame,
    TwoPart,
    TwoPartDecoder,
    bare_item,
    decode_item,
    decode_prologue,
    failure_of,
    stream_item,
)

logger = logging.getLogger(__name__)

HELD_BYTES: Final = 256 * 1024
"""What a reader may leave untaken before its socket is no longer read: the wire has no credits, so a slow reader is felt
by the worker through its full socket."""

SENTINEL_SECONDS: Final = 1.0  # how long after the last item the sentinel is awaited; a missing one is no error

_SENTINEL_HEADER: Final = SENTINEL[24:]


class NativeStream(asyncio.Protocol):
    """The accepted connection and the `ResponseStream` in one object; the connection comes later than the stream.

    Offsets do not travel on this wire, so they are counted here: a lost or doubled item cannot be noticed, only a stream
    that breaks off.
    """

    __slots__ = (
        "_buffer",
        "_codec",
        "_decoder",
        "_draining",
        "_ended",
        "_error",
        "_expiry",
        "_forget",
        "_held_bytes",
        "_is_reading",
        "_is_started",
        "_listener",
        "_loop",
        "_offsets",
        "_on_closed",
        "_on_home",
        "_sentinel_timer",
        "_stop_wanted",
        "_transport",
        "_waiter",
        "subject",
    )

    def __init__(self, subject: str, codec: Codec, on_closed: Callable[[NativeStream], None]) -> None:
        """`subject` is the name under which the worker calls home; `on_closed` is called once, when the stream is over and
        its connection, if there was one, is gone."""
        self._loop = asyncio.get_running_loop()
        self._codec: Codec = codec
        self._decoder = TwoPartDecoder(max_data_bytes=2 * MAX_MESSAGE_BYTES)
        self._buffer: list[StreamItem] = []
        self._held_bytes = 0
        self._is_reading = True
        self._transport: asyncio.Transport | None = None
        self._is_started = False  # the prologue was read
        self._ended = False
        self._error: DynamoException | None = None
        self._stop_wanted = False
        self._offsets = OffsetCounter()
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self._draining: asyncio.TimerHandle | None = None  # only the end is awaited, and nobody reads it
        self._sentinel_timer: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._forget: Callable[[], None] | None = None
        self._on_home: Callable[[NativeStream], None] | None = None
        self._on_closed: Callable[[NativeStream], None] | None = on_closed
        self.subject = subject

    # -- ResponseStream ------------------------------------------------------------------------------------------

    async def next_batch(self) -> list[StreamItem]:
        while True:
            batch = self.take()
            if batch is None:
                return []
            if batch:
                return batch
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def take(self) -> list[StreamItem] | None:
        batch = self._buffer
        if batch:
            self._buffer = []
            self._held_bytes = 0
            if not self._is_reading:
                self._read_on()
            return batch
        if not self._ended:
            return batch
        if self._error is not None:
            raise self._error
        return None

    def listen(self, arrived: Callable[[], None] | None) -> None:
        self._listener = arrived
        if arrived is not None and (self._buffer or self._ended):
            self._loop.call_soon(self._call_listener)

    def stop(self) -> None:
        if self._ended or self._stop_wanted:
            return
        self._stop_wanted = True
        if self._transport is not None:
            self._transport.write(STOP)

    def kill(self) -> None:
        if self._ended:
            return
        self._buffer.clear()
        if self._transport is not None:
            self._transport.write(KILL)
        self._end(None)
        self._wake_soon()
        self._leave()

    def finish(self) -> None:
        self._unfollow()
        self._buffer.clear()
        if not self._ended and self._draining is None:
            self._draining = self._loop.call_later(FINISH_SECONDS, self.kill)
            self._read_on()

    def close(self) -> None:
        self._unfollow()
        if self._draining is None:
            self.kill()

    # -- for the client ------------------------------------------------------------------------------------------

    def follow(self, context: Context) -> None:
        """Pass a stop or kill of the caller's context on, and keep its deadline: the wire has no field for one."""
        if context.deadline is not None:
            self._expiry = self._loop.call_at(context.deadline, self._expire)
        self._forget = context.on_cancel(on_loop(self._loop, self._cancelled))

    def await_home(self, came: Callable[[NativeStream], None] | None) -> None:
        """Call `came` when the worker has called home, or need not any more; None: whoever asked is gone."""
        self._on_home = came
        if came is not None and (self._ended or self._transport is not None):
            self._called_home()

    def adopt(self, transport: asyncio.Transport, decoder: TwoPartDecoder) -> None:
        """The worker has called home and named this stream; `decoder` may already hold more than the handshake."""
        self._decoder = decoder
        self._called_home()
        transport.set_protocol(self)
        self._transport = transport
        if self._ended:
            self._leave()
            return
        if self._stop_wanted:
            transport.write(STOP)
        self._read(b"")

    def lost(self, error: DynamoException) -> None:
        """No answer will come, or no more of it. What had arrived can still be read."""
        if self._ended:
            return
        # A worker that was told to stop may just close the connection.
        self._end(None if self._stop_wanted else error)
        self._wake_soon()
        self._leave()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raise AssertionError("a stream is given its connection by the listener")

    def data_received(self, data: bytes) -> None:
        self._read(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        reason = str(exc) if exc else "the worker closed the connection"
        self.lost(Disconnected(f"Stream ended before generation completed ({reason})"))
        self._closed()

    # -- inside --------------------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> None:
        decoder = self._decoder
        decoder.feed(data)
        was_ended, arrived = self._ended, len(self._buffer)
        try:
            while frames := decoder.frames():
                for header, body in frames:
                    if not header and self._is_started:
                        if not self._ended:
                            self._on_item(body)
                    else:
                        self._on_control(TwoPart(bytes(header), bytes(body)))
        except MalformedFrame as error:
            logger.warning("a worker broke the response wire: %s", error)
            self._end(Disconnected(f"Stream ended before generation completed (the worker broke the wire: {error})"))
            self._leave()
        transport = self._transport
        if self._ended:
            if was_ended:
                return
            if transport is not None and not transport.is_closing():
                self._sentinel_timer = self._loop.call_later(SENTINEL_SECONDS, self._leave)
        elif len(self._buffer) == arrived:
            return
        else:
            self._held_bytes += len(data)
            if self._held_bytes > HELD_BYTES and self._is_reading and transport is not None:
                self._is_reading = False
                transport.pause_reading()
        if self._listener is not None:
            self._call_listener()
        else:
            self._wake_reader()

    def _on_control(self, frame: TwoPart) -> None:
        if not self._is_started:
            problem = decode_prologue(frame)
            self._is_started = True
            if problem is not None:
                self._end(CannotConnect(f"the worker could not begin to answer: {problem}"))
        elif frame.data or frame.header != _SENTINEL_HEADER:
            raise MalformedFrame("a control frame that is no sentinel")
        elif not self._ended:
            raise MalformedFrame("a sentinel before the last item")
        else:
            self._leave()

    def _on_item(self, data: bytearray) -> None:
        item_frame = decode_item(data, self._codec)
        if item_frame.data is not None:
            error = failure_of(item_frame.data)
            if error is not None:
                self._end(error)
                return
            if self._draining is None:
                item = stream_item(item_frame.data)
                if item.index == OBJECT_INDEX:
                    item.extra = item.extra or bare_item(data, self._codec)
                    item.offset = len(data) // OBJECT_CREDIT_BYTES + 1
                else:
                    item.offset = self._offsets.advance(item.index, len(item.token_ids))
                self._buffer.append(item)
        if item_frame.complete_final:
            self._end(None)

    def _end(self, error: DynamoException | None) -> None:
        """The stream is over; its connection may still have a sentinel to bring."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        self._unfollow()
        for timer in (self._draining, self._expiry):
            if timer is not None:
                timer.cancel()
        self._draining = self._expiry = None
        if self._on_home is not None:
            self._called_home()
        self._read_on()
        if self._transport is None:
            self._closed()

    def _leave(self) -> None:
        """Close the connection. With what it still holds unread this is a reset, which a worker takes for a kill."""
        if self._sentinel_timer is not None:
            self._sentinel_timer.cancel()
            self._sentinel_timer = None
        if self._transport is not None:
            self._transport.abort()

    def _read_on(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def _wake_soon(self) -> None:
        if self._listener is not None:
            self._loop.call_soon(self._call_listener)
        else:
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _call_listener(self) -> None:
        if self._listener is not None:
            self._listener()
            if self._ended and self._listener is not None:  # the end came together with what it took
                self._listener()

    def _called_home(self) -> None:
        came, self._on_home = self._on_home, None
        if came is not None:
            came(self)

    def _closed(self) -> None:
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed(self)

    def _expire(self) -> None:
        self._expiry = None
        if not self._ended:
            if self._transport is not None:
                self._transport.write(KILL)
            self._end(ResponseTimeout("the request's deadline passed"))
            self._wake_soon()
            self._leave()

    def _cancelled(self, killed: bool) -> None:
        if killed:
            self.kill()
        else:
            self.stop()

    def _unfollow(self) -> None:
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()
