"""Opens the parts that are switched on. A part that is off is not even imported.

The kernel finds this module by its name, and serves without any part where the module is not installed.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from dynamo.frontend.apis.history import AnswerHistory
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.opening import OpenedKernel, OpenedParts
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.parts.switches import RlSettings, TokenRouteSettings
from dynamo.frontend.settings import FrontendSettings

if TYPE_CHECKING:
    from dynamo.frontend.parts.batches.part import Batches
    from dynamo.frontend.parts.keys.limit_table import LimitTable
    from dynamo.frontend.parts.keys.part import Keys
    from dynamo.frontend.parts.media.intake import MediaIntake
    from dynamo.frontend.parts.recording.recording import Recording
    from dynamo.frontend.parts.scaling.part import AutoscalePart

logger = logging.getLogger(__name__)


class SharedLimits(Protocol):
    """The other processes on the same port, as the part `keys` sees them."""

    def limits(self) -> LimitTable | None:
        """Return the table of the keys' limits that all processes share; None where no route needs a key."""


def open_parts(settings: FrontendSettings, opened: OpenedKernel, peers: SharedLimits | None) -> OpenedParts:
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
    intake: MediaIntake | None = None
    if opened.intake is not None:
        from dynamo.frontend.parts.media.intake import MediaIntake
        from dynamo.frontend.parts.media.part import MediaService

        if not isinstance(opened.intake, MediaIntake):
            raise TypeError(f"the intake of media is a {type(opened.intake).__name__}, not what `open_intake` opens")
        intake = opened.intake
        found.append(MediaService(settings.media, kernel, intake))
    if _has("vllm_routes", True):
        from dynamo.frontend.parts.vllm_routes.part import VllmRoutes

        found.append(VllmRoutes(kernel))
    if _has("ollama", True):
        from dynamo.frontend.parts.ollama.part import OllamaPart

        found.append(OllamaPart(kernel))
    if _has("route_extensions", bool(settings.route_extensions)):
        from dynamo.frontend.parts.route_extensions.part import RouteExtensions

        found.append(RouteExtensions(settings.route_extensions, kernel))
    if (token_routes := _open_token_routes(kernel)) is not None:
        found.append(token_routes)
    rl = RlSettings.from_env()
    if _has("rl", rl.is_on):
        from dynamo.frontend.parts.rl.part import RlPart

        found.append(RlPart(kernel, rl))
    scaling, residency = _open_scaling(settings, kernel), _open_residency(settings, kernel)
    batches = _open_batches(settings, kernel, keys)
    found += [part for part in (scaling, residency, batches) if part is not None]
    if _has("fallbacks", bool(settings.fallbacks)):
        from dynamo.frontend.parts.fallbacks.part import FallbackPart

        found.append(FallbackPart(settings, kernel))  # after the one that loads models
    if batches is not None and intake is not None:
        intake.serve_files(batches.service.files)
    if _has("inspector", settings.inspector.is_on and not settings.disable_admin_api):
        # By its name, as this wing imports nothing of the wing `inspect`.
        inspector = import_module("dynamo.frontend.parts.inspector.part")
        shown = inspector.InspectorPart(settings, kernel, None if recording is None else recording.failures.ring)
        found.append(shown)
        if scaling is not None:
            scaling.on_decision.append(shown.inspector.note_scaling)
    if _has("keys", settings.access_log is not None or settings.audit_log is not None):
        from dynamo.frontend.parts.keys.access_log import RequestLogs

        found.append(RequestLogs(settings))  # in front of all others
    for part in found:
        for listener in part.listeners():
            kernel.pipeline.hooks.add(listener)
    return OpenedParts(found, history)


def _has(name: str, is_on: bool) -> bool:
    """Return whether a part is switched on, and there. One that was taken away is named once in the log."""
    if is_on and find_spec(f"dynamo.frontend.parts.{name}") is None:
        logger.warning("the part %s of the frontend is not installed; its settings have no effect", name)
        return False
    return is_on


def _open_keys(settings: FrontendSettings, kernel: Kernel, peers: SharedLimits | None) -> Keys | None:
    if not settings.key_sources.exist:
        return None
    # No check for the folder: a frontend that was given keys does not start without its door.
    from dynamo.frontend.parts.keys.part import Keys

    return Keys(settings, kernel, None if peers is None else peers.limits())


def _open_recording(settings: FrontendSettings, kernel: Kernel) -> Recording | None:
    if not _has("recording", True):
        return None
    from dynamo.frontend.parts.recording.recording import open_recording

    return open_recording(settings, kernel.pipeline.metrics.families)


def open_intake(settings: FrontendSettings, offload: Offload, metrics: FrontendMetrics) -> MediaIntake | None:
    """Open what fetches and checks pictures and sound of requests; the pipeline of the kernel needs it first."""
    if not _has("media", True):
        return None
    from dynamo.frontend.parts.media.intake import MediaIntake
    from dynamo.frontend.parts.media.metrics import MediaMetrics

    return MediaIntake(settings.media, offload, MediaMetrics(metrics.families))


def _open_token_routes(kernel: Kernel) -> Part | None:
    settings = TokenRouteSettings.from_env()
    if not _has("token_routes", settings.vllm or settings.sglang):
        return None
    from dynamo.frontend.parts.token_routes.part import TokenRoutes

    return TokenRoutes(kernel, settings)


def _open_scaling(settings: FrontendSettings, kernel: Kernel) -> AutoscalePart | None:
    if not _has("scaling", settings.autoscale):
        return None
    from dynamo.frontend.parts.scaling.part import AutoscalePart

    return AutoscalePart(kernel, settings.autoscale_target)


def _open_residency(settings: FrontendSettings, kernel: Kernel) -> Part | None:
    descriptor = settings.residency_descriptor
    if descriptor is None or not _has("residency", True):
        return None
    from dynamo.frontend.parts.residency.part import ResidencyPart

    return ResidencyPart(kernel, descriptor, settings.cold_start_wait_seconds)


def _open_batches(settings: FrontendSettings, kernel: Kernel, keys: Keys | None) -> Batches | None:
    if not _has("batches", settings.files_dir is not None):
        return None
    from dynamo.frontend.parts.batches.part import Batches, open_batches

    return Batches(open_batches(settings, kernel, None if keys is None else keys.store), kernel)
