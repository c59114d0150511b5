"""One response stream on the native wire: a connection of its own, opened by the worker to the caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, cast

from dynamo.runtime.base.limits import Refused, uncounted
from dynamo.runtime.calls.context import Context, on_loop
from dynamo.runtime.calls.request_plane.native.frames import (
    PROLOGUE_OK,
    Codec,
    MalformedFrame,
    TwoPartDecoder,
    control_word,
    handshake,
)
from dynamo.runtime.calls.request_plane.native.outbox import NativeOutbox
from dynamo.runtime.observe.log_rate import LogRate

__all__ = ["FINISHED_GRACE_SECONDS", "LINGER_SECONDS", "STALLED_SECONDS", "NativeSink"]

logger = logging.getLogger(__name__)

LINGER_SECONDS: Final = 10.0  # after the sentinel the caller has this long to close, as in 1.6
STALLED_SECONDS: Final = 60.0  # this long to read what was sent, before the sentinel or after it

FINISHED_GRACE_SECONDS: Final = 1.0
"""A native frontend closes as soon as it has read a finish reason: that is success, not a cancellation. The handler then
has this long to return by itself before its context is killed after all."""


class _ControlReader:
    """The frames of a caller: stop, kill, and nothing else."""

    __slots__ = ("_context", "_decoder", "_log")

    def __init__(self, context: Context, log: LogRate) -> None:
        self._context, self._log = context, log
        self._decoder = TwoPartDecoder(max_data_bytes=0)

    def feed(self, data: bytes) -> bool:
        """Apply a control frame; return True if the request must be killed or the wire was broken."""
        self._decoder.feed(data)
        try:
            while (frame := self._decoder.next_frame()) is not None:
                if control_word(frame) == "kill":
                    return True
                self._context.stop_generating()
        except MalformedFrame as error:
            text = "request %s: killed, its caller broke the response wire: %s"
            self._log.warn("callers that broke the response wire", text, self._context.id(), error)
            return True
        return False


class _WriteStall:
    """Drops the stream of a caller that reads nothing for so long."""

    __slots__ = ("_drop", "_log", "_refused", "_request_id", "_timer", "seconds")

    def __init__(
        self, seconds: float, request_id: str, *, refused: Refused, log: LogRate, drop: Callable[[], None]
    ) -> None:
        self.seconds = seconds
        self._request_id = request_id
        self._refused, self._log, self._drop = refused, log, drop
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Count from here: the socket is full."""
        self._timer = asyncio.get_running_loop().call_later(self.seconds, self._stalled)

    def end(self) -> None:
        """Count no more; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stalled(self) -> None:
        text = "request %s: its caller reads nothing; its stream is dropped"
        self._log.warn("callers that read nothing", text, self._request_id)
        self._refused("write_stall")
        self._drop()


class NativeSink(asyncio.Protocol):
    """The worker's end of one stream: the connection and the `ResponseSink` in one object.

    It takes items before the connection is there, within `BUFFER_BYTES`. Losing the caller in any way (EOF, reset, a
    frame that is neither stop nor kill, no connection at all) kills the request's context.
    """

    __slots__ = (
        "_context",
        "_control",
        "_finished_choices",
        "_forget",
        "_has_ended",
        "_last_choice",
        "_on_closed",
        "_outbox",
        "_stall",
        "_timer",
        "failure",
        "request_bytes",
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
        log = log or LogRate(logger)
        self._context = context
        self._control = _ControlReader(context, log)
        self._outbox = NativeOutbox(codec, handshake(subject) + PROLOGUE_OK)
        self._stall = _WriteStall(write_stall_seconds, context.id(), refused=refused, log=log, drop=self.abort)
        self._has_ended = False
        self._last_choice = 0
        self._finished_choices = 0
        self._timer: asyncio.TimerHandle | None = None
        self._on_closed = on_closed
        self.failure: BaseException | None = None  # what `end` was given
        self.request_bytes = request_bytes  # the body's length, encoded
        loop = asyncio.get_running_loop()
        self._forget: Callable[[], None] | None = context.on_cancel(on_loop(loop, self._cancelled))

    # -- ResponseSink --------------------------------------------------------------------------------------------

    @property
    def response_bytes(self) -> int:
        """Item frames, their prefixes included."""
        return self._outbox.written_bytes

    def send_tokens(
        self,
        token_ids: list[int],
        index: int = 0,
        finish_reason: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Queue one chunk as the native `data` map; offsets do not travel on this wire."""
        if self._has_ended or self._outbox.is_dropped:
            return
        data: dict[str, Any] = {"token_ids": token_ids, "index": index}
        if finish_reason is not None:
            data["finish_reason"] = finish_reason
            self._finished_choices += 1
        if index > self._last_choice:
            self._last_choice = index
        if extra:
            data = {**extra, **data}
        self._outbox.append({"data": data})

    def send_token(self, token_id: int) -> bool:
        """Queue one token of choice 0; return whether there is room for more."""
        self.send_tokens([token_id])
        return not (self._has_ended or self._outbox.is_dropped) and self._outbox.has_room()

    def send_object(self, envelope: dict[str, Any]) -> None:
        """Queue one annotated envelope as it is."""
        if not (self._has_ended or self._outbox.is_dropped):
            self._outbox.append(envelope)

    def has_credit(self) -> bool:
        """Return whether both the socket and our own buffer have room."""
        return self._outbox.has_room()

    async def wait_credit(self) -> None:
        """Return when there is room again, or at once when the stream has ended."""
        while not (self.ended or self._outbox.has_room()):
            await self._outbox.changed()

    def end(self, error: BaseException | None = None) -> None:
        """Queue the error item (if any), the final item and the sentinel; idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        self.failure = error
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()
        self._stop_timer()
        if self._outbox.is_dropped:
            return
        self._outbox.finish(error)
        if self._outbox.transport is not None:
            self._start_linger()

    @property
    def ended(self) -> bool:
        """Whether `end` was called or the caller is gone."""
        return self._has_ended or self._outbox.is_dropped

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        self._outbox.connect(cast(asyncio.Transport, transport))
        if self._has_ended and not self._outbox.is_dropped:
            self._start_linger()

    def data_received(self, data: bytes) -> None:
        if self._control.feed(data):
            self._caller_left()

    def eof_received(self) -> bool:
        self._caller_left()
        return False  # the transport closes once what is queued has left

    def connection_lost(self, exc: Exception | None) -> None:
        self._outbox.transport = None
        self._stall.end()
        self._caller_left()
        self._closed()

    def pause_writing(self) -> None:
        self._outbox.pause()
        self._stall.begin()

    def resume_writing(self) -> None:
        self._stall.end()
        self._outbox.resume()

    # -- for the server ------------------------------------------------------------------------------------------

    def not_connected(self) -> None:
        """End the answer: the call-home connection could not be made, so the answer reaches no caller."""
        self._caller_left()
        self._closed()

    def close(self) -> None:
        """Write what is queued, without waiting for the caller to close first."""
        self._outbox.flush()
        if self._outbox.transport is not None:
            self._outbox.transport.close()

    def abort(self) -> None:
        """Drop the connection now; it comes back as a lost one."""
        if self._outbox.transport is not None:
            self._outbox.transport.abort()

    # -- the end -------------------------------------------------------------------------------------------------

    def _start_linger(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LINGER_SECONDS, self._linger, loop.time() + self._stall.seconds)

    def _linger(self, give_up_at: float) -> None:
        """Close a stream that ended a while ago and that the caller has not closed, unless the caller is still
        reading.
        """
        if self._outbox.transport is None:
            return
        loop = asyncio.get_running_loop()
        if self._outbox.is_sent or loop.time() >= give_up_at:
            self.abort()
        else:
            self._timer = loop.call_later(LINGER_SECONDS, self._linger, give_up_at)

    def _caller_left(self) -> None:
        if self._has_ended:
            if self._outbox.transport is not None:
                self._outbox.transport.close()
            return
        if self._outbox.is_dropped:
            return
        if self._finished_choices > self._last_choice:
            self._outbox.drop()
            self._timer = asyncio.get_running_loop().call_later(FINISHED_GRACE_SECONDS, self._context.kill)
        else:
            self._context.kill()  # comes back as `_cancelled`

    def _cancelled(self, killed: bool) -> None:
        if killed and not self.ended:
            self._outbox.drop()

    def _closed(self) -> None:
        if self._has_ended:
            self._stop_timer()
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
