"""One response stream on the native wire: a connection of its own, opened by the worker to the caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, cast

from dynamo.runtime.context import Context, on_loop
from dynamo.runtime.limits import Refused, uncounted
from dynamo.runtime.log_rate import LogRate
from dynamo.runtime.request_plane.native.frames import (
    PROLOGUE_OK,
    SENTINEL,
    Codec,
    MalformedFrame,
    TwoPartDecoder,
    control_word,
    handshake,
)
from dynamo.runtime.request_plane.native.items import FINAL_ITEM, append_item, error_item

logger = logging.getLogger(__name__)

BUFFER_BYTES: Final = 64 * 1024
"""What a stream may hold in this process, and again in the transport, before its producer is paused: the wire has no
credits, so a caller that does not read is only noticed by its full socket."""

LINGER_SECONDS: Final = 10.0  # after the sentinel the caller has this long to close, as in 1.6
STALLED_SECONDS: Final = 60.0  # this long to read what was sent, before the sentinel or after it

FINISHED_GRACE_SECONDS: Final = 1.0
"""A native frontend closes as soon as it has read a finish reason: that is success, not a cancellation. The handler then
has this long to return by itself before its context is killed after all."""


class NativeSink(asyncio.Protocol):
    """The worker's end of one stream: the connection and the `ResponseSink` in one object.

    It takes items before the connection is there, within `BUFFER_BYTES`. Losing the caller in any way (EOF, reset, a
    frame that is neither stop nor kill, no connection at all) kills the request's context.
    """

    __slots__ = (
        "_codec",
        "_context",
        "_decoder",
        "_finished_choices",
        "_flush_scheduled",
        "_forget",
        "_gone",
        "_greeting",
        "_has_ended",
        "_last_choice",
        "_log",
        "_loop",
        "_on_closed",
        "_out",
        "_paused",
        "_refused",
        "_stall_seconds",
        "_stall_timer",
        "_timer",
        "_transport",
        "_waiters",
        "failure",
        "request_bytes",
        "response_bytes",
    )

    def __init__(
        self,
        subject: str,
        codec: Codec,
        context: Context,
        *,
        request_bytes: int = 0,
        on_closed: Callable[[NativeSink], None] | None = None,
        write_stall_seconds: float = STALLED_SECONDS,
        refused: Refused = uncounted,
        log: LogRate | None = None,
    ) -> None:
        """`on_closed` is called once, when the connection is gone for good or never came up. A caller that reads nothing
        for `write_stall_seconds` while its stream is full has left, and `refused` counts it."""
        self._loop = asyncio.get_running_loop()
        self._codec: Codec = codec
        self._context = context
        self._decoder = TwoPartDecoder(max_data_bytes=0)
        self._greeting = handshake(subject) + PROLOGUE_OK
        self._out = bytearray()
        self._transport: asyncio.Transport | None = None
        self._flush_scheduled = False
        self._paused = False
        self._has_ended = False
        self._gone = False  # the caller left or was told nothing more: writes are dropped
        self._last_choice = 0
        self._finished_choices = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._stall_seconds, self._refused = write_stall_seconds, refused
        self._log = log or LogRate(logger)
        self._on_closed = on_closed
        self.failure: BaseException | None = None  # what `end` was given
        self.request_bytes = request_bytes  # the body's length, encoded
        self.response_bytes = 0  # item frames, their prefixes included
        self._forget: Callable[[], None] | None = context.on_cancel(on_loop(self._loop, self._cancelled))

    # -- ResponseSink --------------------------------------------------------------------------------------------

    def send_tokens(
        self,
        token_ids: list[int],
        index: int = 0,
        finish_reason: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Queue one chunk as the native `data` map; offsets do not travel on this wire."""
        if self._has_ended or self._gone:
            return
        data: dict[str, Any] = {"token_ids": token_ids, "index": index}
        if finish_reason is not None:
            data["finish_reason"] = finish_reason
            self._finished_choices += 1
        if index > self._last_choice:
            self._last_choice = index
        if extra:
            data = {**extra, **data}
        self._append({"data": data})

    def send_token(self, token_id: int) -> bool:
        """Queue one token of choice 0; return whether there is room for more."""
        self.send_tokens([token_id])
        return not self.ended and self.has_credit()

    def send_object(self, envelope: dict[str, Any]) -> None:
        """Queue one annotated envelope as it is."""
        if not (self._has_ended or self._gone):
            self._append(envelope)

    def has_credit(self) -> bool:
        """Return whether both the socket and our own buffer have room."""
        return not self._paused and len(self._out) < BUFFER_BYTES

    async def wait_credit(self) -> None:
        """Return when there is room again, or at once when the stream has ended."""
        while not (self.ended or self.has_credit()):
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)

    def end(self, error: BaseException | None = None) -> None:
        """Queue the error item (if any), the final item and the sentinel; idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        self.failure = error
        self._forget_context()
        self._stop_timer()
        if self._gone:
            return
        if error is not None:
            append_item(self._out, error_item(error), self._codec)
        self._out += FINAL_ITEM[self._codec]
        self._out += SENTINEL
        self._schedule_flush()
        self._wake()

    @property
    def ended(self) -> bool:
        """Whether `end` was called or the caller is gone."""
        return self._has_ended or self._gone

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        transport = self._transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        transport.write(self._greeting)
        if self._gone:  # killed while it was being connected: without the greeting the caller would wait for ever
            transport.close()
            return
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._decoder.feed(data)
        try:
            while (frame := self._decoder.next_frame()) is not None:
                if control_word(frame) == "kill":
                    self._caller_left()
                    return
                self._context.stop_generating()
        except MalformedFrame as error:
            text = "request %s: killed, its caller broke the response wire: %s"
            self._log.warn("callers that broke the response wire", text, self._context.id(), error)
            self._caller_left()

    def eof_received(self) -> bool:
        self._caller_left()
        return False  # the transport closes once what is queued has left

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._stop_stall_timer()
        self._caller_left()
        self._closed()

    def pause_writing(self) -> None:
        self._paused = True
        self._stall_timer = self._loop.call_later(self._stall_seconds, self._stalled)

    def resume_writing(self) -> None:
        self._paused = False
        self._stop_stall_timer()
        self._flush()

    # -- for the server ------------------------------------------------------------------------------------------

    def not_connected(self) -> None:
        """End the answer: the call-home connection could not be made, so the answer reaches no caller."""
        self._caller_left()
        self._closed()

    def close(self) -> None:
        """Write what is queued, without waiting for the caller to close first."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        """Drop the connection now."""
        if self._transport is not None:
            self._transport.abort()

    # -- inside --------------------------------------------------------------------------------------------------

    def _append(self, annotated: dict[str, Any]) -> None:
        out = self._out
        before = len(out)
        append_item(out, annotated, self._codec)
        self.response_bytes += len(out) - before
        if not self._flush_scheduled:
            self._schedule_flush()

    def _schedule_flush(self) -> None:
        if self._transport is not None and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._has_ended and self._timer is None:
            self._timer = self._loop.call_later(LINGER_SECONDS, self._linger, self._loop.time() + self._stall_seconds)
        if self._out and not self._paused:
            # The transport may keep a view of what it could not send at once, so the buffer changes hands.
            out, self._out = self._out, bytearray()
            transport.write(out)
        if self._waiters and self.has_credit():
            self._wake()

    def _linger(self, give_up_at: float) -> None:
        """Close a stream that ended a while ago and that the caller has not closed, unless the caller is still
        reading.
        """
        if self._transport is None:
            return
        is_sent = not self._out and self._transport.get_write_buffer_size() == 0
        if is_sent or self._loop.time() >= give_up_at:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(LINGER_SECONDS, self._linger, give_up_at)

    def _stalled(self) -> None:
        text = "request %s: its caller reads nothing; its stream is dropped"
        self._log.warn("callers that read nothing", text, self._context.id())
        self._refused("write_stall")
        if self._transport is not None:
            self._transport.abort()  # comes back as a lost connection

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _caller_left(self) -> None:
        if self._has_ended:
            if self._transport is not None:
                self._transport.close()
            return
        if self._gone:
            return
        if self._finished_choices > self._last_choice:
            self._drop()
            self._timer = self._loop.call_later(FINISHED_GRACE_SECONDS, self._context.kill)
        else:
            self._context.kill()  # comes back as `_cancelled`

    def _cancelled(self, killed: bool) -> None:
        if killed and not self.ended:
            self._drop()

    def _drop(self) -> None:
        """Drop what is left: the caller has gone, or the request was killed here."""
        self._gone = True
        self._out.clear()
        self._wake()
        if self._transport is not None:
            self._transport.abort()

    def _closed(self) -> None:
        if self._has_ended:
            self._stop_timer()
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed(self)

    def _forget_context(self) -> None:
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
