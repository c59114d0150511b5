"""The frontend as an object: its parts wired, its routes as one ASGI application, its life.

    async with Frontend(settings, runtime) as frontend:
        ...  # serve `frontend.asgi`

It can be entered at the ASGI application without any socket, which is how simulations and most tests drive it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from time import thread_time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from dynamo.errors import WorkerUnavailable
from dynamo.frontend.admission.model import AdmissionPolicy
from dynamo.frontend.admission.process import Admission, Stage
from dynamo.frontend.apis.base import Api
from dynamo.frontend.apis.chat import ChatApi
from dynamo.frontend.apis.completions import CompletionApi
from dynamo.frontend.busy_threshold import LOAD_TOPIC, BusyThresholdRoute, LoadFollower
from dynamo.frontend.http.admin import AdminElsewhere, SameSiteOnly, serves_admin_with_api
from dynamo.frontend.http.asgi import RESPOND_EXTENSION, BodyBudget, Receive, Scope, Send, reply, reply_rejected
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.http.offload import Offload, ThreadOffload
from dynamo.frontend.http.operations import HealthRoute, LiveRoute, MetricsRoute, ModelsRoute, OpenApiRoute, Peers
from dynamo.frontend.http.pages import DOCS_PATH, SCRIPT_PATH, DocsPage, HomePage, ScriptRoute
from dynamo.frontend.http.request_id import with_request_id
from dynamo.frontend.http.routes import InferenceFirst
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.models.cards import Scope as NamespaceScope
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.models.files import ModelFiles
from dynamo.frontend.models.served import ServingRules
from dynamo.frontend.pipeline.exchange import ExchangeRegister
from dynamo.frontend.pipeline.inference import Call, Pipeline
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.settings import FrontendSettings
from dynamo.placement import Policy, RouterMode, policy_for
from dynamo.protocol.openai.errors import route_not_found
from dynamo.protocol.records import ModelCard
from dynamo.router.kv_domains import KvDomains
from dynamo.router.pool import WorkerClient
from dynamo.router.stall_detector import StallDetector, StallPolicy
from dynamo.runtime.event_plane.base import Event
from dynamo.text.model import TextModel, load_text_model
from dynamo.text.template_sandbox import NO_CLOCK

if TYPE_CHECKING:
    from dynamo.runtime.distributed import DistributedRuntime

__all__ = ["Frontend"]

logger = logging.getLogger(__name__)

LOOP_PROBE_SECONDS: Final = 1.0  # how often the loop's delay is measured; one timer a second costs nothing


class Frontend:
    """One HTTP frontend over one runtime. The runtime stays the caller's: it is not closed here."""

    def __init__(
        self,
        settings: FrontendSettings,
        runtime: DistributedRuntime,
        *,
        offload: Offload | None = None,
        now: Callable[[], datetime] = datetime.now,
        peers: Peers | None = None,
    ) -> None:
        """`now` is the clock that chat templates may print; `peers` are the other processes on the same port."""
        self.settings = settings
        self._now = now
        limit = settings.max_requests_in_flight
        self.admission = Admission(limit) if peers is None else peers.admission(limit)
        self._peers = peers
        self.metrics = FrontendMetrics(runtime.metrics, prefix=settings.metrics_prefix)
        self._runtime = runtime
        # CPU time of the rendering thread, so that a busy machine refuses nothing; none under virtual time.
        self._template_clock = thread_time if offload is None else NO_CLOCK
        self._offload: Offload = ThreadOffload(settings.preprocess_workers) if offload is None else offload
        # Threads of its own: whatever a card names must not keep prompts waiting for a thread.
        self._loading: Offload = ThreadOffload(settings.concurrent_model_loads) if offload is None else offload
        self._files = ModelFiles(settings.model_cache_dir, settings.model_files)
        self._kv: KvDomains | None = None
        if settings.router_mode == RouterMode.KV:
            self._kv = KvDomains(
                settings.kv_router,
                runtime.endpoint,
                runtime.metrics,
                router_id=runtime.connection_id,
                rng=runtime.rng,
            )
        self.models = ModelDirectory(
            runtime.discovery,
            self._connect,
            self._load,
            ServingRules(
                self._placement_policy,
                AdmissionPolicy(
                    settings.max_requests_per_model, settings.max_queue_age_seconds, settings.capacity_share
                ),
                enforce_disagg=settings.enforce_disagg,
                replacement_wait_seconds=settings.replacement_wait_seconds,
                rng=runtime.rng,
                kv=self._kv,
                bypass=settings.bypass_rules(),
            ),
            scope=NamespaceScope(settings.namespace, settings.namespace_prefix),
            metrics=self.metrics,
            max_models=settings.max_models,
            concurrent_loads=settings.concurrent_model_loads,
        )
        self.exchanges = ExchangeRegister()
        self.metrics.requests.read_stage_requests(self.exchanges.count_in_stage)
        stall_policy = StallPolicy(
            settings.stall_floor_seconds,
            settings.stall_factor,
            settings.first_token_timeout_seconds,
            settings.inter_token_timeout_seconds,
        )
        self.watch = StallDetector(stall_policy, self.metrics.stalled)
        self._budget = BodyBudget(settings.pending_bodies_limit_bytes)
        own_loads = {} if self._kv is None else {"report_own": self._kv.load_reports}
        self.loads = LoadFollower(settings, self.models, self._loads, peers, **own_loads)
        self._probe: asyncio.TimerHandle | None = None
        self.pipeline = Pipeline(
            settings,
            self.admission,
            self.models,
            self.metrics,
            Preprocessor(settings, self.metrics, self._offload),
            self.exchanges,
            self.watch,
        )
        paths = settings.paths
        inference = {paths["chat"]: self._inference(ChatApi()), paths["completions"]: self._inference(CompletionApi())}
        self.asgi = _with_cors(InferenceFirst(inference, self._routes(inference), _unmatched), settings.cors_origins)
        self.admin_asgi: ASGIApp = Router(
            routes=self._admin_routes(self._busy_threshold()),
            redirect_slashes=False,
            default=_unmatched,
        )

    # -- life --------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Frontend:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Follow the store. Raises `CannotConnect` when it cannot be reached."""
        await self._runtime.start()
        await self.models.start()
        self.loads.start()
        self._probe_loop(asyncio.get_running_loop().time())

    async def drain(self, timeout_seconds: float, *, grace_seconds: float = 0.0) -> bool:
        """Decline new requests and wait for those in flight; whether all of them ended in time.

        `grace_seconds`: how long `/health` says that this frontend leaves before it declines anything.
        """
        if grace_seconds > 0:
            self.admission.move(Stage.LEAVING)
            await asyncio.sleep(grace_seconds)
        self.admission.move(Stage.DRAINING)
        return await self.admission.wait_idle(timeout_seconds)

    def cut(self) -> int:
        """End every request in flight with a 503 (or an error event); return how many there were."""
        return self.exchanges.end_all(WorkerUnavailable("the frontend is stopping"))

    def stopping(self) -> None:
        """Mark the process as neither ready nor alive: the listener is about to close."""
        self.admission.move(Stage.STOPPING)

    async def aclose(self) -> None:
        """Leave: the view of the cluster goes last. Idempotent."""
        self.stopping()
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        self.watch.close()
        await self.loads.aclose()
        await self.models.aclose()
        if self._kv is not None:
            await self._kv.aclose()
        self._loading.close()
        self._offload.close()

    def _probe_loop(self, due: float) -> None:
        """Measure how late this very timer runs, how old the queues are, and set the next one."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        late = max(0.0, now - due)
        self.metrics.event_loop.observe(late)
        self.models.measure(now)
        due = now + LOOP_PROBE_SECONDS
        self._probe = loop.call_at(due, self._probe_loop, due)

    # -- parts -------------------------------------------------------------------------------------------------------

    async def _connect(self, endpoint: str) -> WorkerClient:
        return await self._runtime.endpoint(endpoint).client()

    def _placement_policy(self) -> Policy:
        ratio = self._runtime.settings.cuda_to_cpu_ratio
        return policy_for(RouterMode.of(self.settings.router_mode), rng=self._runtime.rng, cuda_to_cpu_ratio=ratio)

    def _loads(self, endpoint: str) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        return self._runtime.events.subscribe(self._runtime.endpoint(endpoint).event_scope, LOAD_TOPIC)

    async def _load(self, card: ModelCard, worker_hosts: frozenset[str]) -> TextModel:
        return await self._loading(lambda: self._load_blocking(card, worker_hosts))

    def _load_blocking(self, card: ModelCard, worker_hosts: frozenset[str]) -> TextModel:
        sources = self._files.collect(card, worker_hosts)
        template = sources.custom_template
        if self.settings.custom_jinja_template is not None:
            with open(self.settings.custom_jinja_template, encoding="utf-8") as file:
                template = file.read()
        return load_text_model(
            sources.directory,
            custom_template=template,
            now=self._now,
            template_budget=self.settings.template_budget,
            template_clock=self._template_clock,
            tokenizer_cache_bytes=self.settings.tokenizer_cache_bytes,
        )

    def _routes(self, inference: Mapping[str, InferenceRoute]) -> Sequence[BaseRoute]:
        paths = self.settings.paths
        catalogue = ModelsRoute(self.models, self.settings)
        return [
            *[_Endpoint(path, route, "POST") for path, route in inference.items()],
            _Endpoint(paths["models"], catalogue, "GET"),
            _Endpoint(paths["models"] + "/{model:path}", catalogue, "GET"),
            _Endpoint(paths["health"], HealthRoute(self.admission, self.models, self.metrics, self._peers), "GET"),
            _Endpoint(paths["live"], LiveRoute(self.admission), "GET"),
            _Endpoint(paths["metrics"], MetricsRoute(self.metrics, self._offload, self._peers), "GET"),
            _Endpoint("/openapi.json", OpenApiRoute(), "GET"),
            *self._pages(),
            *self._admin_routes(
                self._busy_threshold() if serves_admin_with_api(self.settings) else AdminElsewhere(self.settings)
            ),
        ]

    def _pages(self) -> Sequence[BaseRoute]:
        """Return the pages for people."""
        paths = self.settings.paths
        links = (
            (DOCS_PATH, "the API, to read and to try"),
            (paths["models"], "the models as JSON"),
            (paths["health"], "whether requests are taken, and by which workers"),
            (paths["metrics"], "metrics for Prometheus"),
        )
        home = HomePage(lambda: [model.name for model in self.models.models()], paths["chat"], links)
        return (
            _Endpoint("/", home, "GET"),
            _Endpoint(DOCS_PATH, DocsPage(), "GET"),
            _Endpoint(SCRIPT_PATH, ScriptRoute(), "GET"),
        )

    def _inference(self, api: Api[Any]) -> InferenceRoute:
        call = Call(api, self.pipeline)
        return InferenceRoute(call, body_limit_bytes=self.settings.limits.body_limit_bytes, budget=self._budget)

    def _busy_threshold(self) -> SameSiteOnly:
        return SameSiteOnly(BusyThresholdRoute(self.loads, self.models, self._budget), self.settings)

    def _admin_routes(self, busy_threshold: SameSiteOnly | AdminElsewhere) -> Sequence[BaseRoute]:
        if self.settings.disable_admin_api:
            return ()
        return (_Endpoint("/busy_threshold", busy_threshold, "GET", "POST"),)


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
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # client libraries add headers of their own
        allow_credentials=not any_origin,
        expose_headers=["x-request-id", "retry-after", "server-timing"],
    )

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        # The middleware answers a preflight itself.
        is_preflight = scope["type"] == "http" and scope["method"] == "OPTIONS"
        await cors(scope, receive, with_request_id(scope, send) if is_preflight else send)

    return named


class _Endpoint(Route):
    """A route whose wrong method is a 405 with an empty body, as 1.6 answers it."""

    def __init__(self, path: str, endpoint: Any, *methods: str) -> None:
        super().__init__(path, endpoint, methods=methods)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.methods is not None and scope["method"] not in self.methods:
            allowed = ", ".join(sorted(self.methods)).encode()
            await reply(with_request_id(scope, send), 405, b"", content_type=None, extra=((b"allow", allowed),))
        elif isinstance(self.endpoint, InferenceRoute):  # which sends the id itself, without a call per message
            await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, with_request_id(scope, send))


async def _unmatched(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        return
    await reply_rejected(with_request_id(scope, send), route_not_found(scope["method"], scope["path"]))
