"""The little of ASGI that the routes need: read a bounded body, send one answer, read headers once."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final, cast

from dynamo.frontend.base.shares import SharedBound
from dynamo.protocol.dialect import OPENAI, Dialect
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.http.cross_site import is_of_tool

__all__ = [
    "JSON",
    "BodyBudget",
    "ClientGone",
    "HeaderPairs",
    "Headers",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "check_content_type",
    "first_headers",
    "read_body",
    "reply",
    "reply_rejected",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = dict[bytes, bytes]
HeaderPairs = Sequence[tuple[bytes, bytes]]

JSON: Final = b"application/json"


class ClientGone(Exception):
    """The client left before its request was complete: the answer has no reader."""


def first_headers(scope: Scope) -> Headers:
    """Header values by lower-case name; of a repeated header the first value counts."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    found = dict(headers)
    if len(found) != len(headers):
        found = dict(reversed(headers))
    return found


def check_content_type(headers: Headers) -> None:
    """Raise the 415 unless the Content-Type is JSON, or one that tools write by themselves and no browser sent it."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    is_json = kind == JSON or (kind.startswith(b"application/") and kind.endswith(b"+json"))
    if not is_json and not is_of_tool(headers):
        raise RequestRejected(415, "Expected request with Content-Type application/json")


class BodyBudget:
    """How much all bodies that are still arriving may take together, and those of one owner."""

    __slots__ = ("_bound", "_owner")

    def __init__(self, bound: SharedBound, owner: str = "") -> None:
        self._bound, self._owner = bound, owner

    def of(self, owner: str) -> BodyBudget:
        """Return the same budget for the bodies of an owner."""
        return BodyBudget(self._bound, owner) if owner else self

    @property
    def used_bytes(self) -> int:
        """What all bodies take now."""
        return self._bound.used

    def take(self, count: int) -> None:
        """Raises the 503 when there is no room, and the 429 when the owner's share has none; nothing is taken then."""
        if not count or self._bound.take(self._owner, count):
            return
        megabytes = self._bound.limit // (1024 * 1024)
        limit = f"{megabytes} MB set by DYN_HTTP_PENDING_BODIES_LIMIT_MB"
        if self._bound.used + count > self._bound.limit:
            text = f"Requests under way exceed the limit of {limit}"
            raise RequestRejected(503, text, retry_after_seconds=1, limit="pending_bodies")
        text = f"Requests of this project that are under way exceed its share of the {limit}"
        raise RequestRejected(429, text, code="share_exceeded", retry_after_seconds=1, limit="pending_bodies")

    def give_back(self, count: int) -> None:
        if count:
            self._bound.give_back(self._owner, count)


COPIED_BYTES: Final = 64 * 1024
INFLATED_BYTES: Final = 256 * 1024  # in one go: half a millisecond of the loop


async def read_body(headers: Headers, receive: Receive, limit_bytes: int, budget: BodyBudget) -> bytes:
    """Read the whole body, without its content coding.

    Raises the 413 as soon as the body is known to be too long, the 415 for a coding that is not read, and ClientGone when
    the client left.
    """
    is_coded = b"content-encoding" in headers and _is_coded(headers[b"content-encoding"])
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced[:20]) > limit_bytes:
        raise _too_large(limit_bytes)
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    body: bytes = message.get("body", b"")
    if message.get("more_body", False):
        body = await _receive_rest(body, receive, limit_bytes, budget)
    elif len(body) > limit_bytes:
        raise _too_large(limit_bytes)
    return await _inflate(body, limit_bytes, budget) if is_coded else body


def _is_coded(name: bytes) -> bool:
    """Return whether a body has to be decompressed. Raises the 415 for a coding that is not read here."""
    coding = name.decode("latin-1").strip().lower()
    if coding in ("", "identity"):
        return False
    if coding in ("gzip", "x-gzip", "deflate"):
        return True
    text = f"Content-Encoding '{coding[:64]}' is not read here: send gzip, deflate, or the body as it is"
    raise RequestRejected(415, text)


async def _inflate(body: bytes, limit_bytes: int, budget: BodyBudget) -> bytes:
    """Decompress a body in slices, with turns of the loop between them: a few kilobytes may become all that is allowed."""
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header, of gzip or of zlib
    whole, held = bytearray(), body
    try:
        while held and not decoder.eof:
            piece = decoder.decompress(held, INFLATED_BYTES)
            if len(whole) + len(piece) > limit_bytes:
                raise _too_large(limit_bytes)
            budget.take(len(piece))
            whole += piece
            held = decoder.unconsumed_tail
            await asyncio.sleep(0)
    except zlib.error as error:
        raise RequestRejected(400, f"The body is not what its Content-Encoding says: {error}") from error
    finally:
        budget.give_back(len(whole))
    if not decoder.eof or decoder.unused_data:
        raise RequestRejected(
            400, "The body is not what its Content-Encoding says: it is cut, or has more behind its end"
        )
    return bytes(whole)


async def _receive_rest(body: bytes, receive: Receive, limit_bytes: int, budget: BodyBudget) -> bytes:
    """Receive what follows `body`, the first part of several; return the whole. Raises the 413 and ClientGone."""
    whole, has_more = bytearray(), True  # and no list of parts: a hostile client makes them two bytes long
    try:
        while True:
            if len(whole) + len(body) > limit_bytes:
                raise _too_large(limit_bytes)
            budget.take(len(body))
            whole += body
            if not has_more:
                # Copying megabytes takes tens of milliseconds of the loop, and the reader of a body reads either.
                return bytes(whole) if len(whole) <= COPIED_BYTES else cast(bytes, whole)
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body, has_more = message.get("body", b""), message.get("more_body", False)
    finally:
        budget.give_back(len(whole))


def _too_large(limit_bytes: int) -> RequestRejected:
    megabytes = limit_bytes // (1024 * 1024)
    text = f"Request body exceeds the limit of {megabytes} MB set by DYN_HTTP_BODY_LIMIT_MB"
    return RequestRejected(413, text, limit="body_size")


async def reply(
    send: Send,
    status: int,
    body: bytes,
    *,
    content_type: bytes | None = JSON,
    extra: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """Send a complete answer."""
    headers = [(b"content-length", b"%d" % len(body)), *extra]
    if content_type is not None:
        headers.append((b"content-type", content_type))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def reply_rejected(
    send: Send,
    rejected: RequestRejected,
    extra: tuple[tuple[bytes, bytes], ...] = (),
    *,
    dialect: Dialect = OPENAI,
    request_id: str = "",
) -> None:
    """Send the answer a rejection stands for, in the shape of the API that rejects."""
    headers = tuple((name.encode(), value.encode()) for name, value in rejected.headers().items())
    if rejected.limit in ("body_size", "pending_bodies"):  # the rest of the body is not read
        headers += ((b"connection", b"close"),)
    await reply(send, rejected.status, dialect.error_body(rejected, request_id), extra=(*headers, *extra))
