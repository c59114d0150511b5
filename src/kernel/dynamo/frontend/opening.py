"""Opens a frontend: its kernel, and those of its parts that are switched on. A part that is off is not even imported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dynamo.frontend.admission.process import Admission
from dynamo.frontend.apis.history import AnswerHistory
from dynamo.frontend.base.asgi import BodyBudget
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.offload import Offload, ThreadOffload
from dynamo.frontend.base.peers import Peers
from dynamo.frontend.models.adapters import AdapterKeeper
from dynamo.frontend.models.busy_threshold import LoadFollower
from dynamo.frontend.models.cards import Scope
from dynamo.frontend.models.cluster_access import ClusterAccess
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.models.text_models import TextModelLoader
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.pipeline.exchange import ExchangeRegister
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.frontend.pipeline.outcome import Hooks
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.reports import RequestCounts, RequestLog
from dynamo.frontend.settings import FrontendSettings
from dynamo.router.dispatch.stall_detector import StallDetector, StallPolicy

if TYPE_CHECKING:
    from dynamo.frontend.parts.batches.part import Batches
    from dynamo.frontend.parts.keys.limit_table import LimitTable
    from dynamo.frontend.parts.keys.part import Keys
    from dynamo.frontend.parts.media.intake import MediaIntake
    from dynamo.frontend.parts.recording.recording import Recording
    from dynamo.frontend.parts.scaling.part import AutoscalePart
    from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)


class PortGroup(Peers, Protocol):
    """The other processes on the same port, and what all of them share (`--workers`)."""

    def admission(self, limit: int) -> Admission:
        """Return the admission that all processes share."""

    def limits(self) -> LimitTable | None:
        """Return the table of the keys' limits that all processes share; None where no route needs a key."""


class OpenedKernel(NamedTuple):
    """What every frontend has."""

    kernel: Kernel
    access: ClusterAccess
    text_models: TextModelLoader
    adapters: AdapterKeeper
    intake: MediaIntake | None  # of the part `media`


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
    metrics.requests.read_stage_requests(register.count_in_stage)
    preparing: Offload = ThreadOffload(settings.preprocess_workers) if offload is None else offload
    intake = _open_intake(settings, preparing, metrics)
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
    kernel = Kernel(
        settings, pipeline, loads, runtime, preparing, BodyBudget(settings.pending_bodies_limit_bytes), peers
    )
    return OpenedKernel(kernel, access, text_models, AdapterKeeper(models, access.ask_adapters), intake)


def open_parts(settings: FrontendSettings, opened: OpenedKernel, peers: PortGroup | None) -> OpenedParts:
    """Open the parts that are switched on. Raises InvalidArgument for settings that cannot be."""
    kernel = opened.kernel
    found: list[Part] = []
    keys = _open_keys(settings, kernel, peers)
    recording = _open_recording(settings, kernel)
    found += [part for part in (keys, recording) if part is not None]
    history: AnswerHistory | None = None
    if _has("stored_responses", settings.stores_responses):
        from dynamo.frontend.parts.stored_responses.part import open_stored_responses

        if (stored := open_stored_responses(settings, kernel)) is not None:
            found.append(stored)
            history = stored.history
    if opened.intake is not None:
        from dynamo.frontend.parts.media.part import MediaService

        found.append(MediaService(settings.media, kernel, opened.intake))
    scaling = _open_scaling(settings, kernel)
    batches = _open_batches(settings, kernel, keys)
    found += [part for part in (scaling, batches) if part is not None]
    if batches is not None and opened.intake is not None:
        opened.intake.serve_files(batches.service.files)
    if _has("inspector", settings.inspector.is_on and not settings.disable_admin_api):
        # By its name, as the kernel imports nothing of another source root.
        inspector = import_module("dynamo.frontend.parts.inspector.part")
        shown = inspector.InspectorPart(settings, kernel, None if recording is None else recording.failures.ring)
        found.append(shown)
        if scaling is not None:
            scaling.on_decision.append(shown.inspector.note_scaling)
    if _has("keys", settings.access_log is not None or settings.audit_log is not None):
        from dynamo.frontend.parts.keys.access_log import RequestLogs

        found.append(RequestLogs(settings))  # in front of all others
    for part in found:
        kernel.pipeline.hooks.add(part)
    return OpenedParts(found, history)


def _has(name: str, is_on: bool) -> bool:
    """Return whether a part is switched on, and there. One that was taken away is named once in the log."""
    if is_on and find_spec(f"dynamo.frontend.parts.{name}") is None:
        logger.warning("the part %s of the frontend is not installed; its settings have no effect", name)
        return False
    return is_on


def _open_keys(settings: FrontendSettings, kernel: Kernel, peers: PortGroup | None) -> Keys | None:
    if not settings.key_sources.exist:
        return None
    # No look for the folder: a frontend that was given keys does not start without its door.
    from dynamo.frontend.parts.keys.part import Keys

    return Keys(settings, kernel, None if peers is None else peers.limits())


def _open_recording(settings: FrontendSettings, kernel: Kernel) -> Recording | None:
    if not _has("recording", True):
        return None
    from dynamo.frontend.parts.recording.recording import open_recording

    return open_recording(settings, kernel.pipeline.metrics.families)


def _open_intake(settings: FrontendSettings, offload: Offload, metrics: FrontendMetrics) -> MediaIntake | None:
    if not _has("media", True):
        return None
    from dynamo.frontend.parts.media.intake import MediaIntake
    from dynamo.frontend.parts.media.metrics import MediaMetrics

    return MediaIntake(settings.media, offload, MediaMetrics(metrics.families))


def _open_scaling(settings: FrontendSettings, kernel: Kernel) -> AutoscalePart | None:
    if not _has("scaling", settings.autoscale):
        return None
    from dynamo.frontend.parts.scaling.part import AutoscalePart

    return AutoscalePart(kernel, settings.autoscale_target)


def _open_batches(settings: FrontendSettings, kernel: Kernel, keys: Keys | None) -> Batches | None:
    if not _has("batches", settings.files_dir is not None):
        return None
    from dynamo.frontend.parts.batches.part import Batches, open_batches

    return Batches(open_batches(settings, kernel.pipeline, None if keys is None else keys.store), kernel)


def _stall_policy(settings: FrontendSettings) -> StallPolicy:
    return StallPolicy(
        settings.stall_floor_seconds,
        settings.stall_factor,
        settings.first_token_timeout_seconds,
        settings.inter_token_timeout_seconds,
    )
