"""The routes of a frontend as ASGI applications: one for clients, one for operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from dynamo.frontend.apis.chat import ChatApi
from dynamo.frontend.apis.classes import ClassifyApi, PoolingApi
from dynamo.frontend.apis.completions import CompletionApi
from dynamo.frontend.apis.embeddings import EmbeddingsApi
from dynamo.frontend.apis.messages import MessagesApi, MessagesCountApi
from dynamo.frontend.apis.responses import ResponsesApi, ResponsesCountApi
from dynamo.frontend.apis.scores import RerankApi, ScoreApi
from dynamo.frontend.base.access import IDENTITY, Access, check_access
from dynamo.frontend.base.asgi import RESPOND_EXTENSION, BodyBudget, Message, Receive, Scope, Send, reply
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.base.request_id import reject_route, with_request_id
from dynamo.frontend.http.adapters import ADAPTERS_PATH, AdaptersRoute
from dynamo.frontend.http.admin import AdminElsewhere, SameSiteOnly, serves_admin_with_api
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.http.not_built import NOT_BUILT_ROUTES, NotBuiltRoute
from dynamo.frontend.http.operations import (
    HealthRoute,
    LiveRoute,
    MetricsRoute,
    ModelsRoute,
    OpenApiRoute,
    Peers,
    ReadyRoute,
)
from dynamo.frontend.http.pages import DOCS_PATH, SCRIPT_PATH, DocsPage, HomePage, ScriptRoute
from dynamo.frontend.http.routes import InferenceFirst
from dynamo.frontend.models.adapters import AdapterKeeper
from dynamo.frontend.models.busy_threshold import BusyThresholdRoute, LoadFollower
from dynamo.frontend.parts.batches.batch_routes import BatchesRoute, BatchRoute, FilesAreOff
from dynamo.frontend.parts.batches.file_routes import FileContentRoute, FileRoute, FilesRoute
from dynamo.frontend.parts.batches.service import BatchService
from dynamo.frontend.parts.inspector.inspect_page import INSPECT_PATH, InspectRedirect, inspect_files
from dynamo.frontend.parts.inspector.inspector import Inspector
from dynamo.frontend.parts.inspector.other_frontends import PEER_PATH
from dynamo.frontend.parts.inspector.peer_route import PeerRoute
from dynamo.frontend.parts.inspector.published import uses_token
from dynamo.frontend.parts.inspector.routes import InspectorRoutes, TokenDoor
from dynamo.frontend.parts.keys.access_log import AccessLog, AuditedRoute, AuditLog
from dynamo.frontend.parts.keys.door import KeyDoor
from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.key_store import KeyStore
from dynamo.frontend.parts.keys.opening import OpenedKeys
from dynamo.frontend.parts.keys.request_logs import RequestLogs
from dynamo.frontend.parts.keys.usage_route import UsageRoute
from dynamo.frontend.parts.media.routes import MediaRoutes
from dynamo.frontend.parts.scaling.autoscale_route import AUTOSCALE_PATH, AutoscaleRoute
from dynamo.frontend.parts.scaling.signals import AutoscaleSignals
from dynamo.frontend.parts.stored_responses.base import ResponseStore
from dynamo.frontend.parts.stored_responses.history import ResponseHistory
from dynamo.frontend.parts.stored_responses.routes import CancelRoute, InputItemsRoute, StoredResponseRoute
from dynamo.frontend.pipeline.generation_call import GenerationCall
from dynamo.frontend.pipeline.inference import Call, Pipeline
from dynamo.frontend.pipeline.result_api import ResultApi
from dynamo.frontend.pipeline.results import ResultCall
from dynamo.frontend.pipeline.token_count import TokenCountCall
from dynamo.protocol.audio.schema import AUDIO_API
from dynamo.protocol.batches.schema import BATCHES_API
from dynamo.protocol.dialect import OPENAI, Dialect
from dynamo.protocol.image_answers import IMAGES_API
from dynamo.protocol.inspector.schema import INSPECTOR_DOCUMENT_PATH, inspector_json
from dynamo.protocol.messages.schema import MESSAGES_API
from dynamo.protocol.openai.errors import RequestRejected, route_not_found
from dynamo.protocol.openai.schema import ApiDescription, openapi_json
from dynamo.protocol.responses.schema import RESPONSES_API
from dynamo.protocol.vectors.schema import VECTORS_API
from dynamo.protocol.video_schema import VIDEOS_API

__all__ = ["FrontendRoutes", "GuardedRoute", "OperatorParts", "PathDialects", "UnmatchedPath"]


RATE_HEADERS: Final = tuple(
    [f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorParts:
    """What the routes of operators work with."""

    opened: OpenedKeys
    loads: LoadFollower
    adapters: AdapterKeeper
    logs: RequestLogs
    peers: Peers | None
    inspector: Inspector | None  # None: it is switched off
    signals: AutoscaleSignals | None  # None: they are switched off


class FrontendRoutes:
    """Makes the routes over the parts of one frontend."""

    def __init__(
        self,
        pipeline: Pipeline,
        offload: Offload,
        responses: ResponseStore | None,
        batches: BatchService | None,
        operators: OperatorParts,
    ) -> None:
        """`responses`: None where none are stored. `batches`: None where files and batches are switched off."""
        self._operators = operators
        self._settings = pipeline.settings
        self._pipeline = pipeline
        self._offload = offload
        self._history = (
            None
            if responses is None
            else ResponseHistory(
                responses,
                offload,
                max_bytes=pipeline.settings.limits.body_limit_bytes,
                max_items=pipeline.settings.messages_limit,
                report=lambda usage: pipeline.metrics.stored(*usage),
            )
        )
        self._budget = BodyBudget(pipeline.settings.pending_bodies_limit_bytes)
        self._media = MediaRoutes(pipeline, self._budget, offload)
        self._batches = batches
        self._calls = {
            "/v1/chat/completions": GenerationCall(ChatApi(), pipeline),
            "/v1/completions": GenerationCall(CompletionApi(), pipeline),
            "/v1/embeddings": ResultCall(EmbeddingsApi(), pipeline),
            "/v1/responses": GenerationCall(ResponsesApi(self._history, offload), pipeline),
        }
        if batches is not None:
            batches.serve(self._calls)

    def for_clients(self) -> ASGIApp:
        """Return the application that serves the API, its pages, and the admin routes where these share its port."""
        paths = self._settings.paths
        inference: dict[str, InferenceRoute] = {
            paths["chat"]: self._inference(self._calls["/v1/chat/completions"]),
            paths["completions"]: self._inference(self._calls["/v1/completions"]),
            **self._vectors(paths["embeddings"]),
            **self._media.inference(),
            **self._responses(paths["responses"]),
            **(self._messages(paths["messages"]) if self._settings.anthropic_api else {}),
        }
        dialects = PathDialects({path: route.dialect for path, route in inference.items()})
        routes = InferenceFirst(inference, self._routes(inference), UnmatchedPath(dialects))
        app: ASGIApp = routes
        if self._operators.opened.keys is not None:
            app = self._door(
                self._operators.opened.keys,
                routes,
                dialects,
                is_open=_client_paths(self._operators.opened.keys, routes.routes),
            )
        app = self._audited(self._with_token(app), routes.routes)
        if self._operators.logs.access is not None:
            app = AccessLog(app, self._operators.logs.access, trusted=self._settings.trusted_proxies)
        return _with_cors(app, self._settings.cors_origins)

    def _audited(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> ASGIApp:
        if self._operators.logs.audit is None:
            return app
        return AuditLog(app, self._operators.logs.audit, _audited(routes), trusted=self._settings.trusted_proxies)

    def for_operators(self) -> ASGIApp:
        """Return the application of a port of its own for the admin routes."""
        dialects = PathDialects({})
        routes = Router(
            routes=[*self._admin_routes(), *self._operators_document()],
            redirect_slashes=False,
            default=UnmatchedPath(dialects),
        )
        app: ASGIApp = routes
        keys = self._operators.opened.keys
        if keys is not None:
            pages = _open_paths(routes.routes)
            app = self._door(keys, routes, dialects, is_open=lambda path: not keys.protects_admin or path in pages)
        return self._audited(self._with_token(app), routes.routes)

    def _operators_document(self) -> Sequence[BaseRoute]:
        if self._settings.disable_admin_api or self._operators.inspector is None:
            return ()
        return (GuardedRoute("/openapi.json", OpenApiRoute(inspector_json), "GET", access=Access.OPEN),)

    def _with_token(self, app: ASGIApp) -> ASGIApp:
        """Return an application that knows the token of the inspector, where no key protects the admin routes."""
        if self._operators.inspector is None or not uses_token(self._settings):
            return app
        return TokenDoor(app, self._operators.inspector)

    def _door(self, keys: KeyStore, app: ASGIApp, dialects: PathDialects, *, is_open: Callable[[str], bool]) -> KeyDoor:
        metrics = self._pipeline.metrics.keys

        def refused(identity: Identity | None, rejected: RequestRejected) -> None:
            metrics.refused(None if identity is None else identity.id, rejected.code or "")

        trusted = self._settings.trusted_proxies
        return KeyDoor(app, keys, is_open=is_open, dialect_of=dialects.of, trusted=trusted, refused=refused)

    def _routes(self, inference: Mapping[str, InferenceRoute]) -> Sequence[BaseRoute]:
        paths, pipeline = self._settings.paths, self._pipeline
        catalogue = ModelsRoute(self._pipeline.models, self._settings)
        autoscale = AutoscaleRoute(self._operators.signals)
        return [
            *[GuardedRoute(path, route, "POST", access=route.access) for path, route in inference.items()],
            *self._stored_responses(paths["responses"]),
            *[
                GuardedRoute(path, NotBuiltRoute(what), "POST", access=Access.MEDIA)
                for path, what in NOT_BUILT_ROUTES.items()
            ],
            *[
                GuardedRoute(path, app, *methods, access=access)
                for path, (app, methods, access) in self._media.kept().items()
            ],
            *self._files_and_batches(),
            GuardedRoute(paths["models"], catalogue, "GET", access=Access.ANY_KEY),
            GuardedRoute(paths["models"] + "/{model:path}", catalogue, "GET", access=Access.ANY_KEY),
            GuardedRoute(paths["health"], _health(pipeline, self._operators, self._batches), "GET", access=Access.OPEN),
            GuardedRoute(paths["live"], LiveRoute(pipeline.admission), "GET", access=Access.OPEN),
            GuardedRoute(paths["ready"], ReadyRoute(pipeline.admission, pipeline.models), "GET", access=Access.OPEN),
            GuardedRoute(
                paths["metrics"],
                MetricsRoute(pipeline.metrics, self._offload, self._operators.peers),
                "GET",
                access=Access.OPEN if self._settings.open_metrics else Access.METRICS,
            ),
            *[
                GuardedRoute(AUTOSCALE_PATH + below, autoscale, "GET", access=Access.METRICS)
                for below in ("", "/{model:path}")
            ],
            GuardedRoute(
                "/openapi.json",
                OpenApiRoute(partial(openapi_json, further=self._described(), open_paths=self._open_paths())),
                "GET",
                access=Access.ANY_KEY,
            ),
            *self._pages(),
            *self._admin_routes(None if serves_admin_with_api(self._settings) else AdminElsewhere(self._settings)),
        ]

    def _stored_responses(self, base: str) -> Sequence[BaseRoute]:
        one = base + "/{response_id}"
        stored, items, cancel = [
            route(self._history, knows_tenants=not self._settings.disable_nvext)  # a POST ignores the header without it
            for route in (StoredResponseRoute, InputItemsRoute, CancelRoute)
        ]
        return (
            GuardedRoute(one, stored, "GET", "DELETE", access=Access.INFERENCE),
            GuardedRoute(one + "/input_items", items, "GET", access=Access.INFERENCE),
            GuardedRoute(one + "/cancel", cancel, "POST", access=Access.INFERENCE),
        )

    def _files_and_batches(self) -> Sequence[BaseRoute]:
        service = self._batches
        if service is None:
            off = FilesAreOff()
            return [
                GuardedRoute(base + below, off, "GET", "POST", "DELETE", access=access)
                for base, access in (("/v1/files", Access.FILES), ("/v1/batches", Access.BATCHES))
                for below in ("", "/{rest:path}")
            ]
        files, one, batch = FilesRoute(service.files), FileRoute(service.files), BatchRoute(service)
        return (
            GuardedRoute("/v1/files", files, "GET", "POST", access=Access.FILES),
            GuardedRoute("/v1/files/{file_id}", one, "GET", "DELETE", access=Access.FILES),
            GuardedRoute("/v1/files/{file_id}/content", FileContentRoute(service.files), "GET", access=Access.FILES),
            GuardedRoute("/v1/batches", BatchesRoute(service, self._budget), "GET", "POST", access=Access.BATCHES),
            GuardedRoute("/v1/batches/{batch_id}", batch, "GET", access=Access.BATCHES),
            GuardedRoute("/v1/batches/{batch_id}/cancel", batch, "POST", access=Access.BATCHES),
        )

    def _pages(self) -> Sequence[BaseRoute]:
        """Return the pages for people."""
        paths = self._settings.paths
        links = (
            (DOCS_PATH, "the API, to read and to try"),
            (paths["models"], "the models as JSON"),
            (paths["health"], "whether requests are taken, and by which workers"),
            (paths["metrics"], "metrics for Prometheus"),
            *self._inspector_link(),
        )
        home = HomePage(lambda: [model.name for model in self._pipeline.models.models()], paths["chat"], links)
        return (
            GuardedRoute("/", home, "GET", access=Access.ANY_KEY),
            GuardedRoute(DOCS_PATH, DocsPage(), "GET", access=Access.ANY_KEY),
            GuardedRoute(SCRIPT_PATH, ScriptRoute(), "GET", access=Access.ANY_KEY),
        )

    def _inspector_link(self) -> Sequence[tuple[str, str]]:
        is_here = serves_admin_with_api(self._settings) and self._operators.inspector is not None
        return ((INSPECT_PATH, "the inspector: what runs now"),) if is_here else ()

    def _open_paths(self) -> Collection[str] | None:
        """Return the paths of the document that need no key; None where none does."""
        keys = self._operators.opened.keys
        if keys is None or not keys.sources.protect_clients:
            return None
        probes = ("/health", "/live", "/ready")
        return (*probes, "/metrics") if self._settings.open_metrics else probes

    def _described(self) -> Sequence[ApiDescription]:
        files = (BATCHES_API,) if self._batches is not None else ()
        return (
            VECTORS_API,
            IMAGES_API,
            AUDIO_API,
            VIDEOS_API,
            RESPONSES_API,
            *((MESSAGES_API,) if self._settings.anthropic_api else ()),
            *files,
        )

    def _vectors(self, embeddings: str) -> dict[str, InferenceRoute]:
        apis: dict[str, ResultApi[Any]] = {embeddings: EmbeddingsApi(), "/v1/rerank": RerankApi(is_list=True)}
        for api, paths in (
            (ClassifyApi(), ("/v1/classify", "/classify")),
            (PoolingApi(), ("/v1/pooling", "/pooling")),
            (ScoreApi(), ("/v1/score", "/score")),
            (RerankApi(is_list=False), ("/v2/rerank", "/rerank")),
        ):
            apis.update(dict.fromkeys(paths, api))
        return {path: self._inference(ResultCall(api, self._pipeline), Access.EMBEDDINGS) for path, api in apis.items()}

    def _responses(self, path: str) -> dict[str, InferenceRoute]:
        counts = TokenCountCall(ResponsesCountApi(self._history, self._offload), self._pipeline)
        return {
            path: self._inference(self._calls["/v1/responses"]),
            f"{path.rstrip('/')}/input_tokens": self._inference(counts),
        }

    def _messages(self, path: str) -> dict[str, InferenceRoute]:
        strips = self._settings.strip_anthropic_preamble
        counts = TokenCountCall(MessagesCountApi(strips_billing_header=strips), self._pipeline)
        return {
            path: self._inference(GenerationCall(MessagesApi(strips_billing_header=strips), self._pipeline)),
            f"{path.rstrip('/')}/count_tokens": self._inference(counts),
        }

    def _inference(self, call: Call, access: Access = Access.INFERENCE) -> InferenceRoute:
        limit = self._settings.limits.body_limit_bytes
        return InferenceRoute(call, access=access, body_limit_bytes=limit, budget=self._budget)

    def _busy_threshold(self) -> SameSiteOnly:
        route = BusyThresholdRoute(self._operators.loads, self._pipeline.models, self._budget)
        return SameSiteOnly(route, self._settings)

    def _admin_routes(self, elsewhere: AdminElsewhere | None = None) -> Sequence[BaseRoute]:
        """Return the admin routes; `elsewhere` answers for all of them where they are not served."""
        if self._settings.disable_admin_api:
            return ()
        adapters: ASGIApp = SameSiteOnly(AdaptersRoute(self._operators.adapters, self._budget), self._settings)
        usage: ASGIApp = SameSiteOnly(UsageRoute(self._operators.opened.meter), self._settings)
        routes: Sequence[tuple[str, ASGIApp, tuple[str, ...], Access]] = (
            ("/busy_threshold", self._busy_threshold(), ("GET", "POST"), Access.ADMIN),
            ("/admin/usage", usage, ("GET",), Access.ADMIN),
            (ADAPTERS_PATH, adapters, ("GET", "POST"), Access.ADMIN),
            (ADAPTERS_PATH + "/{name:path}", adapters, ("DELETE",), Access.ADMIN),
            *self._inspector_routes(),
        )
        page = (
            {}
            if self._operators.inspector is None
            else {
                INSPECT_PATH.rstrip("/"): InspectRedirect(),
                INSPECTOR_DOCUMENT_PATH: OpenApiRoute(inspector_json),
                **inspect_files(),
            }
        )
        frontends = self._other_frontends()
        return [
            *[
                GuardedRoute(path, elsewhere or route, *methods, access=access)
                for path, route, methods, access in routes
            ],
            *[GuardedRoute(path, elsewhere or route, "GET", access=Access.OPEN) for path, route in page.items()],
            *[GuardedRoute(path, elsewhere or route, "POST", access=Access.OPEN) for path, route in frontends.items()],
        ]

    def _other_frontends(self) -> dict[str, ASGIApp]:
        """Return the route by which inspectors of a cluster ask each other. It needs no key, but a code made with theirs."""
        inspector = self._operators.inspector
        return {PEER_PATH: PeerRoute(inspector, self._budget)} if inspector is not None and inspector.others else {}

    def _inspector_routes(self) -> Sequence[tuple[str, ASGIApp, tuple[str, ...], Access]]:
        if self._operators.inspector is None:
            return ()
        found = InspectorRoutes(self._operators.inspector, self._budget).routes()
        return [(path, SameSiteOnly(route, self._settings), methods, access) for path, route, methods, access in found]


def _client_paths(keys: KeyStore, routes: Sequence[BaseRoute]) -> Callable[[str], bool]:
    """Return what tells whether a path of the API needs no key."""
    if keys.sources.protect_clients:
        return _open_paths(routes).__contains__
    # Keys of admins alone: then the admin routes need one, where they share this port, and nothing else does.
    is_admins = _admin_paths(routes)
    return lambda path: not is_admins(path)


def _open_paths(routes: Sequence[BaseRoute]) -> frozenset[str]:
    """Return the paths that need no key."""
    guarded = [route for route in routes if isinstance(route, GuardedRoute)]
    return frozenset(route.path for route in guarded if route.access is Access.OPEN)


def _admin_paths(routes: Sequence[BaseRoute]) -> Callable[[str], bool]:
    """Return what tells whether a path is that of an admin route, whatever clients fill in."""
    found = [route.path_regex for route in _of_admins(routes)]
    return lambda path: any(regex.match(path) for regex in found)


def _of_admins(routes: Sequence[BaseRoute]) -> Sequence[GuardedRoute]:
    kinds = (Access.ADMIN, Access.INSPECT, Access.OPERATE)
    return [route for route in routes if isinstance(route, GuardedRoute) and route.access in kinds]


def _audited(routes: Sequence[BaseRoute]) -> Callable[[str, str], AuditedRoute | None]:
    """Return what the audit log has to know of a method and a path; None: they are no admin route."""
    of_admins = _of_admins(routes)

    def find(method: str, path: str) -> AuditedRoute | None:
        found = [route for route in of_admins if route.path_regex.match(path)]
        if not found:
            return None
        route = next((each for each in found if method in (each.methods or ())), found[0])
        is_look = method in ("GET", "HEAD") or route.access is Access.INSPECT  # a question may need a body
        return AuditedRoute(not is_look, "GET" in (route.methods or ()))

    return find


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
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


class GuardedRoute(Route):
    """A route, and what it needs of a key; a wrong method is a 405 with an empty body, as 1.6 answers it."""

    def __init__(self, path: str, endpoint: Any, *methods: str, access: Access = Access.ADMIN) -> None:
        """Raises ValueError for an open route whose path has parts that clients fill in: the door knows paths as a whole."""
        if access is Access.OPEN and "{" in path:
            raise ValueError(f"a route that needs no key has no parameters in its path, got {path}")
        super().__init__(path, endpoint, methods=methods)
        self.access = access

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


def _health(pipeline: Pipeline, operators: OperatorParts, batches: BatchService | None) -> HealthRoute:
    troubles = tuple if batches is None else batches.troubles
    return HealthRoute(pipeline.admission, pipeline.models, pipeline.metrics, operators.peers, troubles)
