"""One server-sent event stream: when HTTP 200 is committed, and what keeps a silent stream alive.

Nothing is sent until the first `write` or until the peek time is over, so that an early error can still be a real HTTP
status. A timer does both jobs; it creates a task only in the rare case that it has something to send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from dynamo.frontend.base.asgi import Message, Send
from dynamo.frontend.pipeline.sink import HeaderPairs, SplicedEvents
from dynamo.protocol.openai.sse import KEEP_ALIVE
from dynamo.runtime.http.cycle import CUT_MESSAGE, FIRST_BODY, PUSH_EXTENSION, SPLICE_EXTENSION

__all__ = ["PUSH_EXTENSION", "SPLICE_EXTENSION", "ByteStream", "EventStream", "Push", "Splice"]

Push = Callable[[bytes], bool]
"""The ASGI extension `dynamo.push` of our listener: write one body chunk now, or return False without writing anything.
"""
Splice = Callable[[bytes, bytes], SplicedEvents]
"""The ASGI extension `dynamo.splice` of our listener: (opening, closing) to what pushes chunks with these ends."""
_HEADERS: Final = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect tokens into 4 KiB
)


class EventStream:
    """Used by one task; its own timer is the only other sender and the two never interleave."""

    __slots__ = (
        "_headers", "_keep_alive", "_keep_alive_seconds", "_last_write", "_loop", "_push", "_send", "_sending",
        "_splice", "_spliced", "_timer", "is_committed",
    )  # fmt: skip

    def __init__(
        self,
        send: Send,
        *,
        push: Push | None = None,
        splice: Splice | None = None,
        extra: tuple[tuple[bytes, bytes], ...] = (),
        late_headers: Callable[[], Sequence[tuple[bytes, bytes]]] = tuple,
        peek_seconds: float,
        keep_alive_seconds: float | None,
        keep_alive: bytes = KEEP_ALIVE,
        content_type: bytes = b"text/event-stream",
    ) -> None:
        """`late_headers` is called when the headers are sent. `keep_alive`: what is sent after that many silent seconds."""
        self._keep_alive = keep_alive
        self._push = push
        self._splice = splice
        self._spliced: SplicedEvents | None = None
        self._headers = ((b"content-type", content_type), *_HEADERS, *extra), late_headers
        self._send, self._keep_alive_seconds = send, keep_alive_seconds
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None
        self._last_write = 0.0
        self.is_committed = False
        """Whether the status is on its way; from then on an error can only be an event."""
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(peek_seconds, self._tick)

    async def write(self, data: bytes) -> None:
        """Send `data`, the headers first if need be. Returns when the transport has room for more."""
        if self._sending is not None:
            await self._sending  # the timer was a moment earlier
            self._sending = None
        self._last_write = self._loop.time()
        if not self.is_committed:
            self._rearm()
        await self._send_data(data)

    @property
    def can_push(self) -> bool:
        """Whether `push` may return True."""
        return self._push is not None and self.is_committed

    def push(self, data: bytes, now: float) -> bool:
        """Send `data` without waiting; False when that is not possible now (use `write`): the client reads too slowly,
        or the server under us has no such way. `now` is the loop's time."""
        if self._push is None or self._sending is not None or not self.is_committed:
            return False
        self._last_write = now
        return self._push(data)

    def splicer(self, opening: bytes, closing: bytes) -> SplicedEvents | None:
        """Return what pushes events that differ only in their middle; None where `push` is all there is."""
        if self._splice is None or not self.can_push:
            return None
        spliced = self._spliced = self._splice(opening, closing)
        return spliced

    async def end(self, data: bytes) -> None:
        """Send the last bytes and end the response."""
        self.close()
        if self._sending is not None:
            await self._sending
        await self._send_data(data, more=False)

    def close(self) -> None:
        """Stop the timer; idempotent, for every path."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def settle(self) -> None:
        """Stop the timer and let what it began to send get out; before anything else is sent in place of a stream."""
        self.close()
        if self._sending is not None:
            await self._sending
            self._sending = None

    async def _send_data(self, data: bytes, *, more: bool = True) -> None:
        """Send `data`, the first time behind the head: as one write where our own listener is below."""
        if not self.is_committed:
            self.is_committed = True
            fixed, late_headers = self._headers
            start: Message = {"type": "http.response.start", "status": 200, "headers": [*fixed, *late_headers()]}
            if self._splice is not None:
                start[FIRST_BODY] = data, more
            await self._send(start)
            if self._splice is not None:
                return
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        seconds = self._keep_alive_seconds
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        first = not self.is_committed
        if not first and self._keep_alive_seconds is not None:
            last = self._last_write if self._spliced is None else max(self._last_write, self._spliced.pushed_at)
            silent = self._loop.time() - last
            if silent < self._keep_alive_seconds:  # data went out meanwhile: check again when it could be due
                self._timer = self._loop.call_later(self._keep_alive_seconds - silent, self._tick)
                return
        if self._sending is None or self._sending.done():  # else the client does not read: nothing to keep alive
            # Awaited in write.
            self._last_write = self._loop.time()
            self._sending = self._loop.create_task(self._send_data(self._keep_alive), name="frontend: keep-alive")
        self._rearm()


class ByteStream:
    """An `AnswerStream`. Used by one task."""

    __slots__ = ("_can_cut", "_head", "_is_cut", "_send", "can_push", "is_committed")

    def __init__(self, send: Send, content_type: bytes, headers: HeaderPairs, *, can_cut: bool) -> None:
        """`can_cut`: our own listener is below. Any other cuts an answer that is left without its end."""
        self._send, self._can_cut = send, can_cut
        self._head: Sequence[tuple[bytes, bytes]] = [(b"content-type", content_type), *headers]
        self._is_cut = False
        self.can_push = False
        self.is_committed = False

    async def write(self, data: bytes) -> None:
        """Send `data`, the headers first if need be. Returns when the transport has room for more."""
        if not data:
            return
        await self._begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def push(self, data: bytes, now: float) -> bool:
        return False

    def splicer(self, opening: bytes, closing: bytes) -> SplicedEvents | None:
        return None

    async def settle(self) -> None:
        """Wait for nothing: nothing is sent but by `write` and `end`."""

    async def end(self, data: bytes) -> None:
        """Send the last bytes and end the answer; nothing once it was cut."""
        if self._is_cut:
            return
        await self._begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def cut(self) -> None:
        """End the connection in place of the answer, so that a client cannot take what was sent for all of it."""
        self._is_cut = True
        if self.is_committed and self._can_cut:
            await self._send({"type": CUT_MESSAGE})

    def close(self) -> None:
        """Stop nothing: there are no timers."""

    async def _begin(self) -> None:
        if not self.is_committed:
            self.is_committed = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._head})
