"""What a native stream has to send: items while the connection is on its way or full, one write for each turn of the loop."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from dynamo.runtime.calls.request_plane.native.frames import SENTINEL, Codec
from dynamo.runtime.calls.request_plane.native.items import FINAL_ITEM, append_item, error_item

__all__ = ["BUFFER_BYTES", "NativeOutbox"]

BUFFER_BYTES: Final = 64 * 1024
"""What a stream may hold in this process, and again in the transport, before its producer is paused: the wire has no
credits, so a caller that does not read is only noticed by its full socket."""


class NativeOutbox:
    """The frames of one stream that are not in its transport yet."""

    __slots__ = (
        "_codec",
        "_flush_scheduled",
        "_greeting",
        "_loop",
        "_out",
        "_paused",
        "_waiters",
        "is_dropped",
        "transport",
        "written_bytes",
    )

    def __init__(self, codec: Codec, greeting: bytes) -> None:
        """`greeting`: what the connection begins with."""
        self._loop = asyncio.get_running_loop()
        self._codec: Codec = codec
        self._greeting = greeting
        self._out = bytearray()
        self._flush_scheduled = False
        self._paused = False
        self._waiters: list[asyncio.Future[None]] = []
        self.transport: asyncio.Transport | None = None
        self.is_dropped = False  # the caller left or is sent nothing more
        self.written_bytes = 0  # item frames, their prefixes included

    def append(self, annotated: dict[str, Any]) -> None:
        """Queue one item."""
        out = self._out
        before = len(out)
        append_item(out, annotated, self._codec)
        self.written_bytes += len(out) - before
        if not self._flush_scheduled:
            self._schedule_flush()

    def finish(self, error: BaseException | None) -> None:
        """Queue the error item (if any), the final item and the sentinel."""
        if error is not None:
            append_item(self._out, error_item(error), self._codec)
        self._out += FINAL_ITEM[self._codec]
        self._out += SENTINEL
        self._schedule_flush()
        self._wake()

    def has_room(self) -> bool:
        """Return whether both the socket and our own buffer have room."""
        return not self._paused and len(self._out) < BUFFER_BYTES

    async def changed(self) -> None:
        """Wait until there may be room again, or the stream has ended."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)

    @property
    def is_sent(self) -> bool:
        """Whether everything has left this process."""
        return not self._out and (self.transport is None or self.transport.get_write_buffer_size() == 0)

    # -- the transport -------------------------------------------------------------------------------------------

    def connect(self, transport: asyncio.Transport) -> None:
        """Write the greeting, and from here on what is queued."""
        self.transport = transport
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        transport.write(self._greeting)
        if self.is_dropped:  # killed while it was being connected: without the greeting the caller would wait for ever
            transport.close()
            return
        self.flush()

    def pause(self) -> None:
        """Hold back what is queued: the socket is full."""
        self._paused = True

    def resume(self) -> None:
        """Write again."""
        self._paused = False
        self.flush()

    def flush(self) -> None:
        """Write what is queued, in one piece."""
        self._flush_scheduled = False
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._out and not self._paused:
            # The transport may keep a view of what it could not send at once, so the buffer changes hands.
            out, self._out = self._out, bytearray()
            transport.write(out)
        if self._waiters and self.has_room():
            self._wake()

    def drop(self) -> None:
        """Drop what is left and the connection: the caller has gone, or the request was killed here."""
        self.is_dropped = True
        self._out.clear()
        self._wake()
        if self.transport is not None:
            self.transport.abort()

    def _schedule_flush(self) -> None:
        if self.transport is not None and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
