"""The routes of the inspector, below `/admin/v1/`: pictures, watches and actions."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs

import msgspec
from starlette.types import ASGIApp

from dynamo.frontend.base.access import Access, KeyRole, identity_of, key_rejection
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
from dynamo.frontend.parts.inspector.inspector import Inspector
from dynamo.frontend.parts.inspector.pictures import MAX_LIMIT, PictureQuery
from dynamo.frontend.parts.inspector.streams import SORTS
from dynamo.frontend.parts.inspector.visitors import Visitor
from dynamo.frontend.parts.inspector.watching import MAX_VIEWERS, TooManyViewers, Viewer
from dynamo.protocol.inspector.actions import (
    AbortRequest,
    BulkAbortRequest,
    ExplainRequest,
    WorkerActionRequest,
    WorkerActionResult,
)
from dynamo.protocol.inspector.filters import FilterError, parse_filter
from dynamo.protocol.inspector.views import VIEWS
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.http.cycle import LEAVE_EXTENSION

INSPECTOR_PATH: Final = "/admin/v1/"

_HAS_TOKEN: Final = "dynamo.inspector_token"
"""The entry of a scope whose request came with the token of the inspector."""

MAX_BODY_BYTES: Final = 64 * 1024
MAX_PROMPT_BYTES: Final = 4 * 1024 * 1024  # of a request that is only placed
_SAFE: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
_EVENTS: Final = ((b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no"))
_PARAMETERS: Final = frozenset({"views", "limit", "filter", "sort"})

T = TypeVar("T")
_Handler = Callable[[Scope, Receive, Visitor], Awaitable[tuple[int, object]]]


class TokenDoor:
    """Recognises the token of the inspector, where no key protects its routes. It lets everything pass."""

    def __init__(self, app: ASGIApp, inspector: Inspector) -> None:
        self._app, self._inspector = app, inspector

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Return what serves the request, whatever its path."""
        if scope["type"] == "http" and scope["path"].startswith(INSPECTOR_PATH):
            presented = first_headers(scope).get(b"authorization", b"")
            token = self._inspector.token.encode()  # a group of processes has one, which its parent made
            if presented[:7].lower() == b"bearer " and hmac.compare_digest(presented[7:].strip(), token):
                scope[_HAS_TOKEN] = True
        return self._app(scope, receive, send)


class _Answering:
    """One route: the viewer, its handler, and the answer or the rejection as JSON."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            status, answer = await self._handler(scope, receive, visitor_of(scope))
        except ClientGone:
            return
        except RequestRejected as rejected:
            await reply_rejected(send, rejected, _SAFE)
            return
        await reply(send, status, msgspec.json.encode(answer), extra=_SAFE)


class InspectorRoutes:
    """Makes the routes over one inspector."""

    def __init__(self, inspector: Inspector, budget: BodyBudget) -> None:
        self._inspector, self._budget = inspector, budget

    def routes(self) -> Sequence[tuple[str, ASGIApp, tuple[str, ...], Access]]:
        """Return path, application, methods and what is needed of a key."""
        looking: dict[str, _Handler] = {
            "snapshot": self._snapshot,
            "requests/{id:path}": self._detail,
            "recent": self._view("recent"),
            "errors": self._view("errors"),
            "errors/{id:path}": self._bundle,
            "routing/recent": self._view("routing"),
            "events": self._view("events"),
            "config": self._config,
        }
        acting: dict[str, _Handler] = {
            "requests/{id:path}/abort": self._abort,
            "requests/abort": self._abort_matching,
            **{
                f"workers/{{id}}/{action}": self._worker_action(action) for action in ("drain", "undrain", "quarantine")
            },
        }
        return [
            (INSPECTOR_PATH + "watch", WatchRoute(self._inspector), ("GET",), Access.INSPECT),
            *[(INSPECTOR_PATH + path, _Answering(handler), ("GET",), Access.INSPECT) for path, handler in looking.items()],
            *[(INSPECTOR_PATH + path, _Answering(self._acting(handler)), ("POST",), Access.OPERATE)
              for path, handler in acting.items()],
            (INSPECTOR_PATH + "routing/explain", _Answering(self._explain), ("POST",), Access.INSPECT),
        ]  # fmt: skip

    # -- looking -----------------------------------------------------------------------------------------------------

    async def _snapshot(self, scope: Scope, receive: Receive, visitor: Visitor) -> tuple[int, object]:
        return 200, await self._inspector.watching.take(query_of(scope), visitor)

    def _view(self, view: str) -> _Handler:
        """Return a handler that shows the rows of one view, and how many there are."""

        async def show(scope: Scope, receive: Receive, visitor: Visitor) -> tuple[int, Any]:
            query = msgspec.structs.replace(query_of(scope), views=(view,))
            picture = await self._inspector.watching.take(query, visitor)
            rows = getattr(picture, view)
            return 200, {"data": rows, "total": picture.totals.get(view, len(rows)), "partial": picture.partial}

        return show

    async def _detail(self, scope: Scope, receive: Receive, visitor: Visitor) -> tuple[int, object]:
        id = scope["path_params"]["id"]
        found = await self._inspector.detail(id, visitor)
        if found is None:
            raise RequestRejected(404, f"No request {id[:128]!r} is known", code="request_not_found", param="id")
        return 200, found

    async def _bundle(self, scope: Scope, receive: Receive, visitor: Visitor) -> tuple[int, object]:
        id = scope["path_params"]["id"]
        found = await self._inspector.bundle(id, visitor)
        if found is None:
            raise RequestRejected(404, f"No failure {id[:128]!r} is kept", code="request_not_found", param="id")
        return 200, found

    async def _config(self, scope: Scope, receive: Receive, visitor: Visitor) -> tuple[int, object]:
        return 200, self._inspector.setting_rows()

    async def _explain(self, scope: Scope, receive: Receive, visitor: Visitor) -> tuple[int, object]:
        asked = await self._body(scope, receive, ExplainRequest, MAX_PROMPT_BYTES)
        return 200, {"routing": await self._inspector.explain(asked)}

    # -- acting ------------------------------------------------------------------------------------------------------

    def _acting(self, handler: _Handler) -> _Handler:
        """Return a handler that acts only where that is allowed, and notes what was refused."""
        inspector = self._inspector

        async def act(scope: Scope, receive: Receive, visitor: Visitor) -> tuple[int, object]:
            what = f"{scope['method']} {scope['path'][:256]}"
            try:
                if inspector.settings.is_read_only:
                    raise RequestRejected(
                        403, "This inspector only shows: it was started with DYN_INSPECT_READ_ONLY=1", code="read_only"
                    )
                if not inspector.actions.rate.take():
                    raise RequestRejected(
                        429,
                        "Too many actions; there may be 2 a second",
                        retry_after_seconds=1,
                        code="rate_limit_exceeded",
                    )
                return await handler(scope, receive, visitor)
            except RequestRejected as rejected:
                inspector.actions.note(
                    what, visitor.shown_name, f"refused with {rejected.status}: {rejected.message[:200]}"
                )
                raise

        return act

    async def _abort(self, scope: Scope, receive: Receive, visitor: Visitor) -> tuple[int, object]:
        id = scope["path_params"]["id"]
        asked = await self._body(scope, receive, AbortRequest)
        result, silent = await self._inspector.abort(id, asked.reason)
        if result is None:
            missing = f"; these gave no answer, and may have it: {', '.join(silent)}" if silent else ""
            text = f"No request {id[:128]!r} is in flight{missing}"
            raise RequestRejected(404, text, code="request_not_found", param="id")
        self._inspector.actions.note(
            f"abort of {result.id}",
            visitor.shown_name,
            f"{result.status}, reason {asked.reason!r}",
            request_id=result.id,
        )
        return 202, result

    async def _abort_matching(self, scope: Scope, receive: Receive, visitor: Visitor) -> tuple[int, object]:
        asked = await self._body(scope, receive, BulkAbortRequest)
        try:
            result = await self._inspector.abort_matching(asked)
        except FilterError as error:
            raise _bad_filter(error) from None
        counted = f"{result.matched} match" if asked.dry_run else f"{result.aborted} aborted, reason {asked.reason!r}"
        self._inspector.actions.note(f"abort of {asked.filter!r}", visitor.shown_name, counted)
        return (200 if asked.dry_run else 202), result

    def _worker_action(self, action: str) -> _Handler:
        async def act(scope: Scope, receive: Receive, visitor: Visitor) -> tuple[int, object]:
            id = scope["path_params"]["id"].lower()
            asked = await self._body(scope, receive, WorkerActionRequest)
            operator = self._inspector.operator
            if not operator.knows(id):
                raise RequestRejected(404, f"No worker {id[:64]!r} is there", code="worker_not_found", param="id")
            try:
                partial_ = await operator.act(action, id, asked, visitor)
            except TimeoutError:
                raise RequestRejected(
                    503, "It holds here; the other frontend processes did not answer in time"
                ) from None
            row = next(row for row in self._inspector.workers() if row.id == id)
            self._inspector.actions.note(
                f"{action} of worker {id}", visitor.shown_name, f"{row.state}, reason {asked.reason!r}", worker=id
            )
            message = row.note if not partial_ else f"{row.note}; not at {', '.join(partial_)}".removeprefix("; ")
            return 200, WorkerActionResult(
                id=id,
                state=row.state,
                until_ms=row.state_until_ms,
                running=row.running,
                message=message,
                partial=partial_,
            )

        return act

    async def _body(self, scope: Scope, receive: Receive, kind: type[T], limit: int = MAX_BODY_BYTES) -> T:
        raw = await read_body(first_headers(scope), receive, limit, self._budget)
        try:
            return msgspec.json.decode(raw.strip() or b"{}", type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RequestRejected(400, f"the body is not understood: {error}") from None


class WatchRoute:
    """`/admin/v1/watch`: server-sent events."""

    def __init__(self, inspector: Inspector) -> None:
        self._inspector = inspector

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            visitor = visitor_of(scope)
            query = query_of(scope)
            last = first_headers(scope).get(b"last-event-id", b"")
            watch = self._inspector.watching.open(
                query, visitor, int(last) if last.isdigit() and len(last) < 17 else None
            )
        except TooManyViewers:
            text = f"{MAX_VIEWERS} viewers watch this frontend, and more may not"
            await reply_rejected(
                send, RequestRejected(429, text, code="too_many_viewers", retry_after_seconds=5), _SAFE
            )
            return
        except RequestRejected as rejected:
            await reply_rejected(send, rejected, _SAFE)
            return
        try:
            async with Background() as beside:
                on_leave = (scope.get("extensions") or {}).get(LEAVE_EXTENSION)
                if on_leave is not None:
                    on_leave(watch.leave)
                else:
                    beside.start(_leaves(receive, watch), "inspector: viewer")
                await self._send(watch, send)
        finally:
            watch.close()

    async def _send(self, watch: Viewer, send: Send) -> None:
        now = self._inspector.clock.now
        await send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *_SAFE]})
        while (message := await watch.next()) is not None:
            began = now()
            await send({"type": "http.response.body", "body": message, "more_body": True})
            watch.sent(now() - began)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _leaves(receive: Receive, watch: Viewer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    watch.leave()


def visitor_of(scope: Scope) -> Visitor:
    """Return the visitor behind a request. Raises the 401 of a request with neither a key nor the token."""
    identity = identity_of(scope)
    if identity is not None:
        role = identity.inspector_role
        if role is None:
            raise RequestRejected(403, "This API key may not use the inspector", code="insufficient_permissions")
        return Visitor(role, identity.shown_name)
    if scope.get(_HAS_TOKEN):
        return Visitor(KeyRole.ADMIN, None)
    raise key_rejection(
        "missing_api_key",
        "The inspector needs a key of an operator, or, where the frontend has no keys, the token that it was started with: "
        "`Authorization: Bearer TOKEN`. `dynamo serve` prints it, and `dynamo top` finds it",
    )


def query_of(scope: Scope) -> PictureQuery:
    """Read what a picture is to show. Raises the 400 that names the parameter."""
    try:
        pairs = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=16)
    except ValueError:
        raise RequestRejected(400, "The query has too many parameters") from None
    given = {name: values[-1] for name, values in pairs.items()}
    for name in given:
        if name not in _PARAMETERS:
            text = f"{name[:64]} is not a parameter; there are {', '.join(sorted(_PARAMETERS))}"
            raise RequestRejected(400, text, param=name[:64])
    default = PictureQuery()
    views = tuple(dict.fromkeys(filter(None, given.get("views", ",".join(default.views)).split(","))))
    for view in views:
        if view not in VIEWS:
            raise RequestRejected(400, f"{view[:64]!r} is not a view; there are {', '.join(VIEWS)}", param="views")
    limit = given.get("limit", str(default.limit))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 6 and 0 < int(limit) <= MAX_LIMIT):
        raise RequestRejected(400, f"limit is a number from 1 to {MAX_LIMIT}, got {limit[:64]!r}", param="limit")
    sort = given.get("sort", default.sort)
    if sort.removeprefix("-") not in SORTS:
        raise RequestRejected(400, f"{sort[:64]!r} is not an order; there are {', '.join(SORTS)}", param="sort")
    text = given.get("filter", "")
    try:
        parse_filter(text)
    except FilterError as error:
        raise _bad_filter(error) from None
    return PictureQuery(views, int(limit), text, sort)


def _bad_filter(error: FilterError) -> RequestRejected:
    return RequestRejected(400, str(error), {"part": error.part}, "filter", code="invalid_filter")
