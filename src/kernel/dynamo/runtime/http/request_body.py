"""The body of one request on an HTTP connection, as it arrives: ASGI's `receive`."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dynamo.runtime.http.gate import Gate

HIGH_WATER_BYTES: Final = 64 * 1024  # of a body that the application has not received yet; then the socket is not read


class RequestBody:
    """What has arrived of a body, until its request is answered or its client has left."""

    __slots__ = (
        "_arrived",
        "_gate",
        "_has_news",
        "_is_closed",
        "_is_complete",
        "_news",
        "_transport",
        "expects_continue",
    )

    def __init__(self, transport: asyncio.Transport, gate: Gate, *, expects_continue: bool) -> None:
        self._transport, self._gate = transport, gate
        self._arrived = b""  # and not received yet
        self._is_complete = self._is_closed = False
        self._has_news = False  # more of the body came, or its end, or it was closed: `receive` need not wait
        self._news: asyncio.Event | None = None  # made by a `receive` that waits; few have to
        self.expects_continue = expects_continue
        """Whether the client waits for a word before it sends the body. Once an answer has begun, it gets none."""

    async def receive(self) -> MutableMapping[str, Any]:
        """Wait for more of the body, or for its end, or the client's: ASGI's `receive`."""
        if self.expects_continue:
            self.expects_continue = False
            if not self._transport.is_closing():
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._is_closed:
            self._gate.resume_reading()
            if not self._has_news:
                if self._news is None:
                    self._news = asyncio.Event()
                await self._news.wait()
            self._has_news = False
        if self._is_closed:
            return {"type": "http.disconnect"}
        body, self._arrived = self._arrived, b""
        return {"type": "http.request", "body": body, "more_body": not self._is_complete}

    def add(self, data: bytes) -> None:
        """Take more of the body."""
        if self._is_closed:
            return
        self._arrived += data
        if len(self._arrived) > HIGH_WATER_BYTES:
            self._gate.pause_reading()
        self._wake()

    def end(self) -> None:
        """Complete the body."""
        if not self._is_closed:
            self._is_complete = True
            self._wake()

    def close(self) -> None:
        """Let `receive` report from now on that the client has gone; so it does after a complete answer, too."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        self._has_news = True
        if self._news is not None:
            self._news.set()
            self._news = None
