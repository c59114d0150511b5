"""Web pages of other origins: what their browsers may send here, and read of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp

from dynamo.frontend.base.asgi import Message, Receive, Scope, Send
from dynamo.frontend.base.request_id import with_request_id
from dynamo.runtime.http.cycle import RESPOND_EXTENSION

RATE_HEADERS: Final = tuple(
    [f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")]
)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return the app as browsers' pages of these origins may call it; unchanged where there are none."""
    if not origins:
        return app
    from starlette.middleware.cors import CORSMiddleware

    async def visible(scope: Scope, receive: Receive, send: Send) -> None:
        # A whole answer that is written past `send` would miss the headers that the middleware adds there.
        extensions = {name: it for name, it in (scope.get("extensions") or {}).items() if name != RESPOND_EXTENSION}
        await app({**scope, "extensions": extensions}, receive, send)

    any_origin = "*" in origins
    cors = CORSMiddleware(
        visible,
        allow_origins=["*"] if any_origin else list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],  # client libraries add headers of their own
        allow_credentials=not any_origin,
        expose_headers=["x-request-id", "request-id", "retry-after", "retry-after-ms", "server-timing", *RATE_HEADERS],
    )

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        # The middleware answers a preflight itself.
        is_preflight = scope["type"] == "http" and scope["method"] == "OPTIONS"
        await cors(scope, receive, _without_body(with_request_id(scope, send)) if is_preflight else send)

    return named


def _without_body(send: Send) -> Send:
    """Return a `send` that makes a 204 of the middleware's 200 to a preflight."""
    is_accepted = False

    async def sending(message: Message) -> None:
        nonlocal is_accepted
        if message["type"] == "http.response.start":
            is_accepted = message["status"] == 200
            if is_accepted:
                kept = [pair for pair in message["headers"] if pair[0] not in (b"content-length", b"content-type")]
                message = {**message, "status": 204, "headers": kept}
        elif is_accepted:
            message = {**message, "body": b""}
        await send(message)

    return sending
