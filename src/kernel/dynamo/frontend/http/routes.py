"""Routes by their paths: inference first, then the others in order."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo.frontend.base.access import IDENTITY, Access, check_access
from dynamo.frontend.base.asgi import reply
from dynamo.frontend.base.request_id import reject_route, with_request_id
from dynamo.frontend.http.admin import reject_cross_site
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.protocol.dialect import OPENAI, Dialect
from dynamo.protocol.openai.errors import RequestRejected, route_not_found
from dynamo.runtime.http.cross_site import SEND_JSON, SameSite, is_form


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

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Return what serves the request: a coroutine around it would be one more to go through at every turn."""
        if scope["type"] != "http":
            return super().__call__(scope, receive, send)
        headers = dict(scope["headers"])
        is_known = (headers.get(b"host"), headers.get(b"origin")) in self._permitted
        if not is_known and (reason := self._rule.reason(headers.items())) is not None:
            return reject_cross_site(scope, send, reason, self._dialects.of(scope["path"]))
        if scope["method"] == "POST" and (route := self._inference.get(scope["path"])):
            if IDENTITY in scope:
                try:
                    check_access(scope, route.access)
                except RequestRejected as rejected:
                    return reject_route(scope, send, rejected, route.dialect)
            return route(scope, receive, send)
        return super().__call__(scope, receive, send)


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
                dialect = self.endpoint.dialect if isinstance(self.endpoint, InferenceRoute) else OPENAI
                await reject_route(scope, send, rejected, dialect)
                return
        if self.methods is not None and scope["method"] not in self.methods:
            allowed = ", ".join(sorted(self.methods)).encode()
            await reply(with_request_id(scope, send), 405, b"", content_type=None, extra=((b"allow", allowed),))
        elif isinstance(self.endpoint, InferenceRoute):  # which sends the id itself, without a call per message
            await self.app(scope, receive, send)
        elif scope["method"] == "POST" and not self._takes_forms and is_form(scope["headers"]):
            await reject_route(scope, send, RequestRejected(415, f"{scope['path']} takes no form, as {SEND_JSON}"))
        else:
            await self.app(scope, receive, with_request_id(scope, send))


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
