"""Opens a frontend: its kernel, and its parts, which lie in another wing and are found by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import datetime
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from dynamo.errors import InvalidArgument, Unknown
from dynamo.frontend.admission.model import AdmissionPolicy
from dynamo.frontend.admission.process import Admission
from dynamo.frontend.apis.history import AnswerHistory
from dynamo.frontend.base.asgi import BodyBudget
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.offload import Offload, ThreadOffload
from dynamo.frontend.base.peers import Peers
from dynamo.frontend.base.shares import HELD_SHORTLY, Shares
from dynamo.frontend.models.adapters import AdapterKeeper
from dynamo.frontend.models.busy_threshold import LOAD_TOPIC, LoadFollower
from dynamo.frontend.models.card_routing import CardRouting, GroupRouting
from dynamo.frontend.models.cards import CardEntry, Scope
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.models.files import TextModelLoader
from dynamo.frontend.models.served import ServingRules
from dynamo.frontend.models.settings import ModelSettings
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.pipeline.api import MediaTaker
from dynamo.frontend.pipeline.exchange import ExchangeRegister
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.frontend.pipeline.outcome import Hooks
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.request_records import RequestCounts, RequestLog
from dynamo.frontend.settings import FrontendSettings
from dynamo.placement import Policy, RouterMode, policy_for
from dynamo.protocol.records import ADAPTERS_ENDPOINT
from dynamo.router.dispatch.stall_detector import StallDetector, StallPolicy
from dynamo.router.kv.domains import KvDomains
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.workers.pool import WorkerClient
from dynamo.runtime.calls.event_plane.base import Event

if TYPE_CHECKING:
    from dynamo.runtime.client import Client
    from dynamo.runtime.distributed import DistributedRuntime

_PARTS: Final = "dynamo.frontend.parts.opening"


class ClusterAccess:
    """Stays within one runtime, which it does not close."""

    def __init__(self, settings: ModelSettings, runtime: DistributedRuntime) -> None:
        self._settings = settings
        self._runtime = runtime
        mode = RouterMode.of(settings.router_mode)
        own = self._routing(mode, settings.kv_router)
        self.cards = CardRouting(own, mode, settings.kv_router, self._routing)
        self.kv = own.kv
        self._adapters: dict[str, Client] = {}  # of the components whose adapters were requested

    async def connect(self, endpoint: str) -> WorkerClient:
        """Return a client of an endpoint."""
        return await self._runtime.endpoint(endpoint).client()

    async def ask_adapters(self, entry: CardEntry, body: Mapping[str, object]) -> Mapping[str, object]:
        """Send a request for adapters to the worker of a card. Raises `DynamoException`."""
        namespace, component, _ = entry.endpoint.split(".")
        path = f"{namespace}.{component}.{ADAPTERS_ENDPOINT}"
        client = self._adapters.get(path)
        if client is None:
            client = self._adapters[path] = await self._runtime.endpoint(path).client()
        stream = await client.direct(dict(body), entry.instance_id, annotated=False)
        try:
            async for answer in stream:
                if isinstance(answer, dict):
                    return answer
        except ValueError as error:  # what a caller of `direct` sees of an error
            raise Unknown(str(error)) from error
        finally:
            await stream.aclose()
        raise Unknown("the worker ended without an answer")

    def loads(self, endpoint: str) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Subscribe to the loads that the workers of an endpoint report."""
        return self._runtime.events.subscribe(self._runtime.endpoint(endpoint).event_scope, LOAD_TOPIC)

    def rules(self, shares: Shares) -> ServingRules:
        """Return how models are served. `shares`: whether several owners have their places."""
        settings = self._settings
        limit, age = settings.max_requests_per_model, settings.max_queue_age_seconds
        return ServingRules(
            partial(self._policy, RouterMode.of(settings.router_mode)),
            AdmissionPolicy(limit, age, settings.capacity_share, shares),
            enforce_disagg=settings.enforce_disagg,
            min_initial_workers=settings.router_min_initial_workers,
            replacement_wait_seconds=settings.replacement_wait_seconds,
            cold_start_wait_seconds=settings.cold_start_wait_seconds,
            starting_model=settings.starting_model,
            rng=self._runtime.rng,
            kv=self.kv,
            cards=self.cards,
            bypass=settings.bypass_rules(),
        )

    @asynccontextmanager
    async def report_own(self, endpoint: str) -> AsyncIterator[None]:
        """Report what this process has booked at an endpoint as load, for as long as the block runs."""
        async with AsyncExitStack() as stack:
            for each in self.cards.domains:
                await stack.enter_async_context(each.load_reports(endpoint))
            yield

    def _routing(self, mode: RouterMode, settings: KvRouterSettings) -> GroupRouting:
        """Return how workers are chosen by a mode. Raises InvalidArgument for a policy that cannot be made."""
        runtime, kv = self._runtime, None
        if mode is RouterMode.KV:
            kv = KvDomains(
                settings, runtime.endpoint, runtime.metrics, router_id=runtime.connection_id, rng=runtime.rng
            )
        return GroupRouting(partial(self._policy, mode), kv)

    def _policy(self, mode: RouterMode) -> Policy:
        ratio = self._runtime.settings.cuda_to_cpu_ratio
        return policy_for(mode, rng=self._runtime.rng, cuda_to_cpu_ratio=ratio)

    async def aclose(self) -> None:
        """Leave the KV routing, and the endpoints of adapters."""
        for client in self._adapters.values():
            await client.close()
        self._adapters.clear()
        for each in self.cards.domains:
            await each.aclose()


class PortGroup(Peers, Protocol):
    """The other processes on the same port (`--workers`), and the admission that all of them share."""

    def admission(self, limit: int) -> Admission:
        """Return the admission that all processes share."""


class OpenedKernel(NamedTuple):
    """What every frontend has."""

    kernel: Kernel
    access: ClusterAccess
    text_models: TextModelLoader
    adapters: AdapterKeeper
    intake: MediaTaker | None  # of the part `media`


class OpenedParts(NamedTuple):
    """The parts in the order in which they listen, and what the kernel needs of one of them."""

    parts: list[Part]
    history: AnswerHistory | None  # None: no response is stored


def open_kernel(
    settings: FrontendSettings,
    runtime: DistributedRuntime,
    offload: Offload | None,
    now: Callable[[], datetime],
    peers: PortGroup | None,
) -> OpenedKernel:
    """Make the kernel. Nothing is followed yet. Raises ValueError for metrics that cannot be made."""
    limit = settings.max_requests_in_flight
    metrics = FrontendMetrics(runtime.metrics, prefix=settings.metrics_prefix)
    access, shares = ClusterAccess(settings, runtime), Shares()
    text_models = TextModelLoader(settings, offload, now=now)
    models = ModelDirectory(
        runtime.discovery,
        access.connect,
        text_models.load,
        access.rules(shares),
        scope=Scope(settings.namespace, settings.namespace_prefix),
        metrics=metrics,
        max_models=settings.max_models,
        concurrent_loads=settings.concurrent_model_loads,
    )
    register = ExchangeRegister()
    metrics.requests.stages.read_requests(register.count_in_stage)
    preparing: Offload = ThreadOffload(settings.preprocess_workers) if offload is None else offload
    parts = _parts()
    intake: MediaTaker | None = None if parts is None else parts.open_intake(settings, preparing, metrics)
    pipeline = Pipeline(
        settings,
        Admission(limit) if peers is None else peers.admission(limit),
        models,
        metrics,
        Preprocessor(settings, metrics, preparing),
        intake,
        register,
        StallDetector(_stall_policy(settings), metrics.stalled),
        Hooks([RequestCounts(metrics), RequestLog(settings.overload_status)]),
    )
    loads = LoadFollower(settings, models, access.loads, peers, report_own=access.report_own)
    shares.show_each(models.places)
    bodies = shares.bound("bodies", settings.pending_bodies_limit_bytes, weight=HELD_SHORTLY, unit="bytes")
    kernel = Kernel(settings, pipeline, loads, runtime, preparing, BodyBudget(bodies), peers, shares)
    return OpenedKernel(kernel, access, text_models, AdapterKeeper(models, access.ask_adapters), intake)


def open_parts(settings: FrontendSettings, opened: OpenedKernel, peers: PortGroup | None) -> OpenedParts:
    """Open the parts that are switched on. Raises InvalidArgument for settings that cannot be."""
    if (wing := _parts()) is None:
        if settings.key_sources.exist:  # a missing folder must not open the door
            raise InvalidArgument("keys are configured, but the parts of the frontend are not installed")
        return OpenedParts([], None)
    found: OpenedParts = wing.open_parts(settings, opened, peers)
    return found


def _parts() -> ModuleType | None:
    """Return the module that opens the parts, by its name, as the kernel imports nothing of another wing."""
    return import_module(_PARTS) if find_spec(_PARTS) is not None else None


def _stall_policy(settings: FrontendSettings) -> StallPolicy:
    return StallPolicy(
        settings.stall_floor_seconds,
        settings.stall_factor,
        settings.first_token_timeout_seconds,
        settings.inter_token_timeout_seconds,
    )
