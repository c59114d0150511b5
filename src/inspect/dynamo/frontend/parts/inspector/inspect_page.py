"""The inspector's page: files that any browser may have, because they hold nothing; what they show needs a key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

import msgspec

from dynamo.frontend.base.asgi import Receive, Scope, Send, first_headers, reply
from dynamo.protocol.inspector.columns import columns_of_page

INSPECT_PATH: Final = "/inspect/"

_CONTENT_TYPES: Final = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}

_POLICY: Final = b"; ".join((
    b"default-src 'self'",
    b"connect-src 'self'",
    b"object-src 'none'",
    b"base-uri 'none'",
    b"form-action 'none'",
    b"frame-ancestors 'none'",
    b"require-trusted-types-for 'script'",  # a script that sets HTML fails, whatever it sets
))  # fmt: skip
_HEADERS: Final = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),  # requested again each time, and sent again only after an upgrade
)


def inspect_files() -> Mapping[str, InspectFile]:
    """Return the page's files by their paths on the server; `INSPECT_PATH` itself is the page."""
    root = files("dynamo.frontend.parts.inspector").joinpath("static/inspect")
    found = {INSPECT_PATH + name: InspectFile(file.read_bytes, name) for name, file in _below(root)}
    columns = InspectFile(_columns, "columns.js")
    return {INSPECT_PATH: found.pop(INSPECT_PATH + "index.html"), INSPECT_PATH + "columns.js": columns, **found}


def _columns() -> bytes:
    """Return the module that has the columns of the page's tables."""
    return b"export const COLUMNS = %s;\n" % msgspec.json.encode(columns_of_page())


def _below(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _below(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in _CONTENT_TYPES:
            yield prefix + entry.name, entry


class InspectFile:
    """One file of the page; read on first use, because most frontends never show it."""

    def __init__(self, read: Callable[[], bytes], name: str) -> None:
        self._read = read
        self._content_type = _CONTENT_TYPES[name.rpartition(".")[2]]
        self._body: bytes | None = None
        self._tag = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._body is None:
            self._body = self._read()
            self._tag = b'"%s"' % hashlib.sha256(self._body).hexdigest()[:16].encode()
        headers = (*_HEADERS, (b"etag", self._tag))
        if first_headers(scope).get(b"if-none-match") == self._tag:
            await send({"type": "http.response.start", "status": 304, "headers": list(headers)})
            await send({"type": "http.response.body", "body": b""})
        else:
            await reply(send, 200, self._body, content_type=self._content_type, extra=headers)


class InspectRedirect:
    """`/inspect`: the page is at `/inspect/`, which its files are relative to."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        location = INSPECT_PATH.encode() + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        await reply(send, 308, b"", content_type=None, extra=((b"location", location),))
