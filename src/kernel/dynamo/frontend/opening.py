"""Opens a frontend: its kernel, and its parts, which lie in another wing and are found by name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from dynamo.errors import InvalidArgument
from dynamo.frontend.admission.process import Admission
from dynamo.frontend.apis.history import AnswerHistory
from dynamo.frontend.base.asgi import BodyBudget
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.offload import Offload, ThreadOffload
from dynamo.frontend.base.peers import Peers
from dynamo.frontend.base.shares import HELD_SHORTLY, Shares
from dynamo.frontend.models.adapters import AdapterKeeper
from dynamo.frontend.models.busy_threshold import LoadFollower
from dynamo.frontend.models.cards import Scope
from dynamo.frontend.models.cluster_access import ClusterAccess
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.models.files import TextModelLoader
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.pipeline.api import MediaTaker
from dynamo.frontend.pipeline.exchange import ExchangeRegister
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.frontend.pipeline.outcome import Hooks
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.request_records import RequestCounts, RequestLog
from dynamo.frontend.settings import FrontendSettings
from dynamo.router.dispatch.stall_detector import StallDetector, StallPolicy

if TYPE_CHECKING:
    from dynamo.runtime.distributed import DistributedRuntime

_PARTS: Final = "dynamo.frontend.parts.opening"


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
    access = ClusterAccess(settings, runtime)
    text_models = TextModelLoader(settings, offload, now=now)
    models = ModelDirectory(
        runtime.discovery,
        access.connect,
        text_models.load,
        access.rules(),
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
    shares = Shares()
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
