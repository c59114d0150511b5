"""The door of a route that answers some requests with text and not with JSON."""

from __future__ import annotations

from typing import Any, Final

from dynamo.frontend.base.asgi import Receive, Scope, Send
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.parts.token_routes.rejections import UNPARSED

TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")
_UNPARSED: Final = UNPARSED.encode()


class TokenRoute(InferenceRoute):
    """One route of tokens as an ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, _TextAware(send))


class _TextAware:
    """Sends the answer to a body that is not JSON as what it is."""

    __slots__ = ("_held", "_send")

    def __init__(self, send: Send) -> None:
        self._send: Send = send
        self._held: dict[str, Any] | None = None  # the head of a 400, until its body shows what it is

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start" and message["status"] == 400:
            self._held = message
            return
        held, self._held = self._held, None
        if held is not None:
            if message.get("body", b"").startswith(_UNPARSED):
                kept = [pair for pair in held["headers"] if pair[0] != b"content-type"]
                held = {**held, "headers": [*kept, TEXT]}
            await self._send(held)
        await self._send(message)
