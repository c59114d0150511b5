"""`x-request-id`: every answer carries one, the client's own where it may be repeated, else ours."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final

from dynamo.frontend.base.asgi import Message, Scope, Send, first_headers, reply_rejected
from dynamo.protocol.dialect import OPENAI, Dialect
from dynamo.protocol.openai.errors import RequestRejected

HEADER: Final = b"x-request-id"
MAX_CHARACTERS: Final = 128  # of an id that is repeated
LOGGED_CHARACTERS: Final = 64  # of an id that is not


def client_request_id(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the client's id; None where it sent none, or one that is not 1 to 128 characters of printable ASCII.

    A longer or stranger value could forge lines of the log, or grow every line and answer.
    """
    if HEADER not in headers:
        return None
    value = headers[HEADER]
    if not 0 < len(value) <= MAX_CHARACTERS or not value.isascii():
        return None
    text = value.decode("ascii")
    return text if text.isprintable() else None


def request_id_note(headers: Mapping[bytes, bytes]) -> str:
    """Return what the log shows of the client's id after our own; an id that is not repeated is escaped and cut."""
    if HEADER not in headers:
        return ""
    value = headers[HEADER]
    known = client_request_id(headers)
    if known is not None:
        return f" (x-request-id {known})"
    return f" (x-request-id replaced, the client sent {value[:LOGGED_CHARACTERS].decode('latin-1')!a})"


async def reject_route(scope: Scope, send: Send, rejected: RequestRejected, dialect: Dialect = OPENAI) -> None:
    """Send a rejection from a route that is not of an inference API, in the shape of `dialect`."""
    known = client_request_id(first_headers(scope)) or str(uuid.uuid4())
    named = tuple([(name, known.encode()) for name in dialect.id_headers])
    await reply_rejected(send, rejected, named, dialect=dialect, request_id=known)


def with_request_id(scope: Scope, send: Send) -> Send:
    """Return a `send` that adds the header to an answer of a route that does not do so itself."""
    known = client_request_id(first_headers(scope)) or str(uuid.uuid4())

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: list[Any] = list(message.get("headers", ()))
            if not any(name == HEADER for name, _ in headers):
                message = {**message, "headers": [*headers, (HEADER, known.encode())]}
        await send(message)

    return sending
