"""The inspector as a part: its page, its routes, and the token that lets its owner in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import ClassVar, Final

import msgspec
from starlette.types import ASGIApp

from dynamo.frontend.base.access import Access
from dynamo.frontend.base.asgi import (
    BodyBudget,
    ClientGone,
    Receive,
    Scope,
    Send,
    first_headers,
    read_body,
    reply,
    reply_rejected,
)
from dynamo.frontend.base.failures import FailureRing
from dynamo.frontend.http.admin import serves_admin_with_api
from dynamo.frontend.http.inspector_access import uses_token
from dynamo.frontend.http.operations import OpenApiRoute
from dynamo.frontend.http.routes import GuardedRoute, Site
from dynamo.frontend.http.settings import HttpSettings
from dynamo.frontend.parts.inspector.inspector import Inspector
from dynamo.frontend.parts.inspector.operating import Question
from dynamo.frontend.parts.inspector.other_frontends import PEER_HEADER, PEER_PATH, open_other_frontends
from dynamo.frontend.parts.inspector.routes import InspectorRoutes, TokenDoor
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.pipeline.outcome import RequestListener
from dynamo.protocol.inspector.actions import INSPECTOR_DOCUMENT_PATH, inspector_json
from dynamo.protocol.inspector.columns import columns_of_page
from dynamo.protocol.inspector.filters import FilterError
from dynamo.protocol.openai.errors import RequestRejected

# The inspector's page: files that any browser may have, because they hold nothing; what they show needs a key.

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

    def __init__(self, root_path: str = "") -> None:
        self._path = (root_path + INSPECT_PATH).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        location = self._path + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        await reply(send, 308, b"", content_type=None, extra=((b"location", location),))


class InspectorPart(Part):
    """One inspector, and the other frontends of the cluster that it shows."""

    name: ClassVar[str] = "inspector"

    def __init__(self, settings: HttpSettings, kernel: Kernel, failures: FailureRing | None) -> None:
        """`failures`: those of this process; None: they are not kept."""
        self._settings, self._kernel = settings, kernel
        self.inspector = Inspector(kernel.pipeline, settings, kernel.loads, kernel.peers, failures=failures)
        self._others = open_other_frontends(settings.inspector, kernel.runtime.discovery)
        if self._others is not None:
            self.inspector.join(self._others)

    def listeners(self) -> Sequence[RequestListener]:
        return (self.inspector,)

    def routes(self) -> Sequence[GuardedRoute]:
        kernel, found = self._kernel, InspectorRoutes(self.inspector, self._kernel.budget).routes()
        page: dict[str, ASGIApp] = {
            INSPECT_PATH.rstrip("/"): InspectRedirect(self._kernel.settings.root_path),
            INSPECTOR_DOCUMENT_PATH: OpenApiRoute(inspector_json),
            **inspect_files(),
        }
        routes = [GuardedRoute(path, kernel.same_site(route), *methods, access=access)
                  for path, route, methods, access in found]  # fmt: skip
        routes += [GuardedRoute(path, route, "GET", access=Access.OPEN, is_admin=True) for path, route in page.items()]
        if self._others is not None:  # it needs no key, but a code made with theirs
            peers = PeerRoute(self.inspector, kernel.budget)
            routes.append(GuardedRoute(PEER_PATH, peers, "POST", access=Access.OPEN, is_admin=True))
        return routes

    def in_front_of(self, app: ASGIApp, site: Site) -> ASGIApp:
        """Return an application that knows the token, where no key protects the admin routes."""
        return TokenDoor(app, self.inspector) if uses_token(self._settings) else app

    def document_of_operators(self) -> Callable[[], bytes]:
        return inspector_json

    def links(self) -> Sequence[tuple[str, str]]:
        is_here = serves_admin_with_api(self._settings)
        return ((INSPECT_PATH, "the inspector: what runs now"),) if is_here else ()

    async def start(self) -> None:
        self.inspector.start()
        if self._others is not None:
            await self._others.start()

    def stopping(self) -> None:
        self.inspector.stopping()

    async def aclose(self) -> None:
        if self._others is not None:
            await self._others.aclose()
        await self.inspector.aclose()


MAX_QUESTION_BYTES: Final = 16 * 1024


class PeerRoute:
    """Answers a question of another frontend that has the same key."""

    def __init__(self, inspector: Inspector, budget: BodyBudget) -> None:
        self._inspector, self._budget = inspector, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope, receive)
        except ClientGone:
            return
        except RequestRejected as rejected:
            await reply_rejected(send, rejected)
            return
        await reply(send, 200, answer, content_type=b"application/msgpack", extra=((b"cache-control", b"no-store"),))

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        headers = first_headers(scope)
        raw = await read_body(headers, receive, MAX_QUESTION_BYTES, self._budget)
        others = self._inspector.others
        if others is None or not others.is_asked_rightly(headers.get(PEER_HEADER.encode(), b"").decode("latin-1"), raw):
            raise RequestRejected(401, "This question does not come from a frontend with the key of this cluster")
        try:
            question = msgspec.msgpack.decode(raw, type=Question)
            return msgspec.msgpack.encode(await self._inspector.answer_frontend(question))
        except (msgspec.MsgspecError, FilterError, LookupError) as error:
            raise RequestRejected(400, f"this question is not understood: {error}") from None
