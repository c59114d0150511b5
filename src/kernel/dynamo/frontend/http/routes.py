"""Routes by their paths: inference first, then the others in order, those that are not served here, and pages of other origins."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from dynamo.frontend.base.access import IDENTITY, Access, check_access
from dynamo.frontend.base.asgi import Message, Receive, Scope, Send, reply, reply_rejected
from dynamo.frontend.base.request_id import reject_route, with_request_id
from dynamo.frontend.http.admin import reject_cross_site
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.http.json_route import JsonRoute
from dynamo.protocol.dialect import OPENAI, Dialect
from dynamo.protocol.openai.errors import (
    NOT_BUILT_CODE,
    RequestRejected,
    not_built,
    response_not_found,
    route_not_found,
)
from dynamo.runtime.http.cross_site import SEND_JSON, SameSite, is_form, is_of_tool
from dynamo.runtime.http.cycle import RESPOND_EXTENSION

RATE_HEADERS: Final = tuple(
    [f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")]
)

NOT_BUILT_ROUTES: Final = {
    "/v1/images/variations": "Varying images",
    "/v1/videos/stream": "Streaming videos",
    "/v1/videos/edits": "Editing videos",
    "/v1/videos/extensions": "Extending videos",
    "/v1/videos/characters": "Characters of videos",
    "/v1/videos/{video_id}/remix": "Varying videos",
}


_SLASHES: Final = re.compile("//+")


class InferenceFirst(Router):
    """A router that knows the inference routes by their whole paths.

    A request to one of them has no path parameters and needs no route object: it saves nineteen calls of a pattern's way.
    Anything else about such a path (another method) goes the usual way. Pages of other sites get a 403: see `SameSite`.
    """

    def __init__(
        self,
        inference: Mapping[str, InferenceRoute],
        routes: Sequence[BaseRoute],
        rule: SameSite,
        dialects: PathDialects,
    ) -> None:
        super().__init__(routes=routes, redirect_slashes=False, default=UnmatchedPath(dialects))
        self._inference = dict(inference)
        self._rule, self._permitted, self._dialects = rule, rule.permitted, dialects

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[None, None, None]:
        """Return what serves the request: a coroutine around it would be one more to go through at every turn."""
        if scope["type"] != "http":
            return super().__call__(scope, receive, send)
        headers = dict(scope["headers"])
        is_known = (headers.get(b"host"), headers.get(b"origin")) in self._permitted
        if not is_known and (reason := self._rule.reason(headers.items())) is not None:
            return reject_cross_site(scope, send, reason, self._dialects.of(scope["path"]))
        if scope["method"] == "POST" and (route := self._inference.get(scope["path"])) is not None:
            if IDENTITY in scope:
                try:
                    check_access(scope, route.access)
                except RequestRejected as rejected:
                    return reject_route(scope, send, rejected, route.dialect)
            return route(scope, receive, send)
        return super().__call__(scope, receive, send)


class TidyPaths:
    """An application that is reached with doubled slashes, with slashes at the end, and below a prefix, too.

    It stands in front of every check, so that all of them see the path that is served.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], root_path: str = "") -> None:
        self._app, self._root_path = app, root_path
        paths = [route.path for route in routes if isinstance(route, Route)]
        self._exact = frozenset(path for path in paths if "{" not in path)
        # What clients fill in there may be a path itself, such as the name of a model.
        self._bases = tuple(sorted({path.partition("{")[0] for path in paths if ":path}" in path}, reverse=True))

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        path: str = scope.get("path", "")
        if path not in self._exact and (self._root_path or "//" in path or path.endswith("/")):
            scope["path"] = self._tidy(path)
        return self._app(scope, receive, send)

    def _tidy(self, path: str) -> str:
        whole, root = _SLASHES.sub("/", path), self._root_path
        skipped = 0
        if root and f"{whole}/".startswith(f"{root}/"):
            whole, skipped = whole[len(root) :] or "/", root.count("/")
        if whole in self._exact:  # /inspect/ among them
            return whole
        for base in self._bases:
            if whole.startswith(base):
                filled_in = _behind(path, skipped + base.count("/") - 1)
                return (base + filled_in).rstrip("/")
        return whole.rstrip("/") or "/"


def _behind(path: str, segments: int) -> str:
    """Return what stands behind the first segments of a path, and one slash."""
    found = re.match(f"(?:/+[^/]+){{{segments}}}/", path)
    assert found is not None
    return path[found.end() :]


class GuardedRoute(Route):
    """A route, and what it needs of a key; a wrong method is a 405 with an empty body, as 1.6 answers it."""

    def __init__(
        self,
        path: str,
        endpoint: Any,
        *methods: str,
        access: Access = Access.ADMIN,
        is_admin: bool | None = None,
        takes_forms: bool = False,
    ) -> None:
        """`is_admin`: whether it is one of the admin routes, None: as `access` has it. `takes_forms`: whether it is for uploads.

        Raises ValueError for an open route whose path has parts that clients fill in: the door knows paths as a whole."""
        if access is Access.OPEN and "{" in path:
            raise ValueError(f"a route that needs no key has no parameters in its path, got {path}")
        super().__init__(path, endpoint, methods=methods)
        self.access = access
        self.dialect: Dialect = endpoint.dialect if isinstance(endpoint, InferenceRoute | JsonRoute) else OPENAI
        self._takes_forms = takes_forms
        self.is_admin = access.is_for_operators if is_admin is None else is_admin

    def elsewhere(self, answer: ASGIApp) -> GuardedRoute:
        """Return the same route with another answer, for a port that does not serve it."""
        return GuardedRoute(self.path, answer, *sorted(self.methods or ()), access=self.access, is_admin=self.is_admin)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if IDENTITY in scope:
            try:
                check_access(scope, self.access)
            except RequestRejected as rejected:
                await reject_route(scope, send, rejected, self.dialect)
                return
        if self.methods is not None and scope["method"] not in self.methods:
            allowed = ", ".join(sorted(self.methods)).encode()
            await reply(with_request_id(scope, send), 405, b"", content_type=None, extra=((b"allow", allowed),))
        elif isinstance(self.endpoint, InferenceRoute):  # which sends the id itself, without a call per message
            await self.app(scope, receive, send)
        elif scope["method"] == "POST" and self._is_form(scope):
            await reject_route(
                scope, send, RequestRejected(415, f"{scope['path']} takes no form, as {SEND_JSON}"), self.dialect
            )
        else:
            await self.app(scope, receive, with_request_id(scope, send))

    def _is_form(self, scope: Scope) -> bool:
        """Return whether a request may be the form of any page, where forms are not taken."""
        if self._takes_forms:
            return False
        headers = dict(scope["headers"])
        if is_form(scope["headers"]):
            return self.is_admin or not is_of_tool(headers)
        # Scripts can leave out the type, in browsers that are older than the Origin of such requests.
        return not headers.get(b"content-type") and b"origin" not in headers and not is_of_tool(headers)


class PathDialects:
    """The shape of errors by path: that of an API on its routes and below them, else OpenAI's."""

    def __init__(self, dialects: Mapping[str, Dialect]) -> None:
        self._exact = dict(dialects)
        self._below = {path.rstrip("/") + "/": dialect for path, dialect in dialects.items()}

    def of(self, path: str) -> Dialect:
        """Return the shape of errors at a path."""
        found = self._exact.get(path)
        if found is not None:
            return found
        return next((dialect for base, dialect in self._below.items() if path.startswith(base)), OPENAI)


class UnmatchedPath:
    """A path without a route: 404, below the path of an API in the shape of that API."""

    def __init__(self, dialects: PathDialects) -> None:
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        path: str = scope["path"]
        await reject_route(scope, send, route_not_found(scope["method"], path), self._dialects.of(path))


class Site(NamedTuple):
    """All routes behind one listener, for what stands in front of them."""

    routes: Sequence[BaseRoute]
    dialects: PathDialects
    is_for_operators: bool = False  # a port of its own for the admin routes

    def paths(self, access: Access) -> frozenset[str]:
        """Return the paths that need just this of a key."""
        return frozenset(route.path for route in self._guarded() if route.access is access)

    def of_admins(self) -> Sequence[GuardedRoute]:
        """Return the routes that need a key of an admin, or one for the inspector."""
        return [route for route in self._guarded() if route.access.is_for_operators]

    def is_admins(self) -> Callable[[str], bool]:
        """Return a function that reports whether a path is that of an admin route, whatever clients fill in."""
        found = [route.path_regex for route in self.of_admins()]
        return lambda path: any(regex.match(path) for regex in found)

    def _guarded(self) -> Sequence[GuardedRoute]:
        return [route for route in self.routes if isinstance(route, GuardedRoute)]


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


class NotBuiltRoute:
    """Answers every request with the 422 of what is not built; nothing of its body is read."""

    def __init__(self, what: str) -> None:
        self._what = what

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply_rejected(send, not_built(f"{self._what} is not in this version"))


def switched_off(parts: Collection[str], responses_path: str) -> Iterator[GuardedRoute]:
    """Give the routes of all parts that are not among `parts`."""
    if "batches" not in parts:
        for base, access in (("/v1/files", Access.FILES), ("/v1/batches", Access.BATCHES)):
            for below in ("", "/{rest:path}"):
                yield GuardedRoute(base + below, _files_are_off, "GET", "POST", "DELETE", access=access)
    if "scaling" not in parts:
        for below in ("", "/{model:path}"):
            yield GuardedRoute("/autoscale/v1" + below, _autoscale_is_off, "GET", access=Access.METRICS)
    if "keys" not in parts:
        yield GuardedRoute("/admin/usage", _no_keys, "GET", access=Access.ADMIN)
    if "stored_responses" not in parts:
        one, nothing = responses_path + "/{response_id}", _NothingIsStored()
        yield GuardedRoute(one, nothing, "GET", "DELETE", access=Access.INFERENCE)
        yield GuardedRoute(one + "/input_items", nothing, "GET", access=Access.INFERENCE)
        yield GuardedRoute(one + "/cancel", nothing, "POST", access=Access.INFERENCE)


class _Refusing:
    """Answers every request with one rejection."""

    def __init__(self, rejected: RequestRejected, *headers: tuple[bytes, bytes]) -> None:
        self._rejected, self._headers = rejected, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply_rejected(send, self._rejected, self._headers)


class _NothingIsStored:
    """Answers as for a response that is not kept."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply_rejected(send, response_not_found(scope["path_params"]["response_id"]))


_files_are_off = _Refusing(
    RequestRejected(
        501,
        "Files and batches are switched off: start the frontend with --files-dir DIR (or DYN_FILES_DIR)",
        stream_type="not_implemented",
        code=NOT_BUILT_CODE,
    ),
    (b"x-should-retry", b"false"),
    (b"connection", b"close"),
)
_autoscale_is_off = _Refusing(
    RequestRejected(501, "autoscale signals are switched off: start the frontend with --autoscale (DYN_AUTOSCALE=1)")
)
_no_keys = _Refusing(RequestRejected(404, "no keys are in use: start the frontend with --keys FILE"))
