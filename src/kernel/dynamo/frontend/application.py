"""The routes of a frontend as ASGI applications: one for clients, one for operators."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp

from dynamo.frontend.apis.chat import ChatApi
from dynamo.frontend.apis.completions import CompletionApi
from dynamo.frontend.apis.history import AnswerHistory
from dynamo.frontend.apis.messages import MessagesApi, MessagesCountApi
from dynamo.frontend.apis.responses import ResponsesApi, ResponsesCountApi
from dynamo.frontend.apis.vectors import ClassifyApi, EmbeddingsApi, PoolingApi, RerankApi, ScoreApi
from dynamo.frontend.base.access import Access
from dynamo.frontend.base.asgi import BodyBudget
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.base.peers import Peers
from dynamo.frontend.base.shares import Shares
from dynamo.frontend.http.admin import (
    AdminElsewhere,
    SameSiteOnly,
    rule_of_admins,
    rule_of_clients,
    serves_admin_with_api,
)
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.http.operations import (
    HealthRoute,
    LiveRoute,
    MetricsRoute,
    ModelsRoute,
    OpenApiRoute,
    ReadyRoute,
    SharesRoute,
)
from dynamo.frontend.http.pages import DOCS_PATH, SCRIPT_PATH, DocsPage, HomePage, ScriptRoute
from dynamo.frontend.http.routes import (
    NOT_BUILT_ROUTES,
    GuardedRoute,
    InferenceFirst,
    NotBuiltRoute,
    PathDialects,
    Site,
    TidyPaths,
    UnmatchedPath,
    switched_off,
    with_cors,
)
from dynamo.frontend.http.settings import HttpSettings
from dynamo.frontend.models.adapters import ADAPTERS_PATH, AdapterKeeper, AdaptersRoute
from dynamo.frontend.models.busy_threshold import BusyThresholdRoute, LoadFollower
from dynamo.frontend.parts.part import Part
from dynamo.frontend.pipeline.generation_call import GenerationCall
from dynamo.frontend.pipeline.inference import Call, Pipeline
from dynamo.frontend.pipeline.result_api import ResultApi
from dynamo.frontend.pipeline.results import ResultCall, TokenCountCall
from dynamo.protocol.dialect import OPENAI
from dynamo.protocol.messages.schema import MESSAGES_API
from dynamo.protocol.openai.schema import ApiDescription, openapi_json
from dynamo.protocol.responses.schema import RESPONSES_API
from dynamo.protocol.vectors.answers import VECTORS_API
from dynamo.runtime.base.forever import FAILURES


class RoutedParts(NamedTuple):
    """What the routes are made over, beside the pipeline."""

    settings: HttpSettings
    parts: Sequence[Part]
    loads: LoadFollower
    adapters: AdapterKeeper
    budget: BodyBudget
    offload: Offload
    peers: Peers | None
    shares: Shares
    history: AnswerHistory | None  # None: no response is stored


class FrontendRoutes:
    """Makes the routes of one frontend."""

    def __init__(self, pipeline: Pipeline, over: RoutedParts) -> None:
        self._settings, self._pipeline, self._over = over.settings, pipeline, over
        self.calls: Mapping[str, Call] = {
            "/v1/chat/completions": GenerationCall(ChatApi(), pipeline),
            "/v1/completions": GenerationCall(CompletionApi(), pipeline),
            "/v1/embeddings": ResultCall(EmbeddingsApi(), pipeline),
            "/v1/responses": GenerationCall(ResponsesApi(over.history, over.offload), pipeline),
        }
        """The calls of OpenAI's APIs, by their paths there."""
        self._of_parts = [route for part in over.parts for route in part.routes()]
        self._of_parts += switched_off([part.name for part in over.parts], self._settings.paths["responses"])

    def for_clients(self) -> ASGIApp:
        """Return the application that serves the API, its pages, and the admin routes where these share its port."""
        paths = self._settings.paths
        inference: dict[str, InferenceRoute] = {
            paths["chat"]: self._inference(self.calls["/v1/chat/completions"]),
            paths["completions"]: self._inference(self.calls["/v1/completions"]),
            **self._vectors(paths["embeddings"]),
            **self._responses(paths["responses"]),
            **(self._messages(paths["messages"]) if self._settings.anthropic_api else {}),
        }
        for part in self._over.parts:
            inference.update(part.inference())
        shapes = {route.path: route.dialect for route in self._of_parts if route.dialect is not OPENAI}
        dialects = PathDialects({**shapes, **{path: route.dialect for path, route in inference.items()}})
        routes = InferenceFirst(inference, self._routes(inference), rule_of_clients(self._settings), dialects)
        site = self._behind(routes, Site(routes.routes, dialects))
        return TidyPaths(with_cors(site, self._settings.cors_origins), routes.routes, self._settings.root_path)

    def for_operators(self) -> ASGIApp:
        """Return the application of a port of its own for the admin routes."""
        dialects = PathDialects({})
        routes = Router(routes=self._operators(), redirect_slashes=False, default=UnmatchedPath(dialects))
        here = SameSiteOnly(routes, rule_of_admins(self._settings))
        return TidyPaths(self._behind(here, Site(routes.routes, dialects, is_for_operators=True)), routes.routes)

    def _behind(self, app: ASGIApp, site: Site) -> ASGIApp:
        """Return `app` behind what the parts put in front of it: that of the last part is the outermost."""
        for part in self._over.parts:
            app = part.in_front_of(app, site)
        return app

    def _routes(self, inference: Mapping[str, InferenceRoute]) -> Sequence[BaseRoute]:
        paths, pipeline, over = self._settings.paths, self._pipeline, self._over
        catalogue = ModelsRoute(pipeline.models, self._settings)
        health = HealthRoute(pipeline.admission, pipeline.models, pipeline.metrics, over.peers, self._troubles)
        metrics = MetricsRoute(pipeline.metrics, over.offload, over.peers)
        document = OpenApiRoute(
            partial(
                openapi_json,
                further=self._described(),
                open_paths=self._open_paths(),
                root_path=self._settings.root_path,
            )
        )
        return [
            *[GuardedRoute(path, route, "POST", access=route.access) for path, route in inference.items()],
            *[
                GuardedRoute(path, NotBuiltRoute(what), "POST", access=Access.MEDIA)
                for path, what in NOT_BUILT_ROUTES.items()
            ],
            *[route for route in self._of_parts if not route.is_admin],
            GuardedRoute(paths["models"], catalogue, "GET", access=Access.ANY_KEY),
            GuardedRoute(paths["models"] + "/{model:path}", catalogue, "GET", access=Access.ANY_KEY),
            GuardedRoute(paths["health"], health, "GET", access=Access.OPEN),
            GuardedRoute(paths["live"], LiveRoute(pipeline.admission), "GET", access=Access.OPEN),
            GuardedRoute(paths["ready"], ReadyRoute(pipeline.admission, pipeline.models), "GET", access=Access.OPEN),
            GuardedRoute(
                paths["metrics"],
                metrics,
                "GET",
                access=Access.OPEN if self._settings.open_metrics else Access.METRICS,
            ),
            GuardedRoute("/openapi.json", document, "GET", access=Access.ANY_KEY),
            *self._pages(),
            *self._admin_routes(None if serves_admin_with_api(self._settings) else AdminElsewhere(self._settings)),
        ]

    def _pages(self) -> Sequence[BaseRoute]:
        """Return the pages for people."""
        paths = self._settings.paths
        links = [
            (DOCS_PATH, "the API, to read and to try"),
            (paths["models"], "the models as JSON"),
            (paths["health"], "whether requests are taken, and by which workers"),
            (paths["metrics"], "metrics for Prometheus"),
            *[link for part in self._over.parts for link in part.links()],
        ]
        root = self._settings.root_path
        shown = [(root + path, what) for path, what in links]
        home = HomePage(lambda: [model.name for model in self._pipeline.models.models()], root + paths["chat"], shown)
        return (
            GuardedRoute("/", home, "GET", access=Access.ANY_KEY),
            GuardedRoute(DOCS_PATH, DocsPage(root), "GET", access=Access.ANY_KEY),
            GuardedRoute(SCRIPT_PATH, ScriptRoute(), "GET", access=Access.ANY_KEY),
        )

    def _troubles(self) -> Iterable[str]:
        return [*FAILURES.troubles(), *(trouble for part in self._over.parts for trouble in part.troubles())]

    def _open_paths(self) -> Collection[str] | None:
        """Return the paths of the document that need no key; None where none does."""
        found = [part.open_paths() for part in self._over.parts]
        return next((paths for paths in found if paths is not None), None)

    def _described(self) -> Sequence[ApiDescription]:
        messages = (MESSAGES_API,) if self._settings.anthropic_api else ()
        of_parts = [api for part in self._over.parts for api in part.described()]
        return (VECTORS_API, RESPONSES_API, *messages, *of_parts)

    # -- inference ---------------------------------------------------------------------------------------------------

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
        counts = TokenCountCall(ResponsesCountApi(self._over.history, self._over.offload), self._pipeline)
        return {
            path: self._inference(self.calls["/v1/responses"]),
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
        return InferenceRoute(call, access=access, body_limit_bytes=limit, budget=self._over.budget)

    # -- operators ---------------------------------------------------------------------------------------------------

    def _admin_routes(self, elsewhere: ASGIApp | None = None) -> Sequence[GuardedRoute]:
        """Return the admin routes; `elsewhere` answers for all of them where they are not served."""
        if self._settings.disable_admin_api:
            return ()
        settings, over = self._settings, self._over
        rule = rule_of_admins(settings)
        adapters: ASGIApp = SameSiteOnly(AdaptersRoute(over.adapters, over.budget), rule)
        busy: ASGIApp = SameSiteOnly(BusyThresholdRoute(over.loads, self._pipeline.models, over.budget), rule)
        routes = [
            GuardedRoute("/busy_threshold", busy, "GET", "POST"),
            GuardedRoute("/admin/shares", SameSiteOnly(SharesRoute(over.shares), rule), "GET"),
            GuardedRoute(ADAPTERS_PATH, adapters, "GET", "POST"),
            GuardedRoute(ADAPTERS_PATH + "/{name:path}", adapters, "DELETE"),
            *[route for route in self._of_parts if route.is_admin],
        ]
        return routes if elsewhere is None else [route.elsewhere(elsewhere) for route in routes]

    def _operators(self) -> Sequence[GuardedRoute]:
        """Return the routes of a port for operators alone, with a document of their own."""
        routes = self._admin_routes()
        documents = [document for part in self._over.parts if (document := part.document_of_operators()) is not None]
        more = [GuardedRoute("/openapi.json", OpenApiRoute(each), "GET", access=Access.OPEN) for each in documents[:1]]
        return [*routes, *(more if routes else ())]
