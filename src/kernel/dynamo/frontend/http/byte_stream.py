"""One answer whose bytes go out as they are made, such as sound: no events, so its failure can only be a cut connection."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.frontend.base.asgi import Send
from dynamo.frontend.pipeline.sink import HeaderPairs, SplicedEvents
from dynamo.runtime.http.cycle import CUT_MESSAGE


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
