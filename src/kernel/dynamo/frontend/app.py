"""The frontend as an object: its parts wired, its routes as one ASGI application, its life.

    async with Frontend(settings, runtime) as frontend:
        ...  # serve `frontend.asgi`

It can be entered at the ASGI application without any socket, which is how simulations and most tests drive it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from dynamo.errors import WorkerUnavailable
from dynamo.frontend.admission.process import Admission, Stage
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.metrics.loop_probe import LoopProbe
from dynamo.frontend.base.offload import Offload, ThreadOffload
from dynamo.frontend.http.application import FrontendRoutes, OperatorParts
from dynamo.frontend.http.operations import Peers
from dynamo.frontend.models.adapters import AdapterKeeper
from dynamo.frontend.models.busy_threshold import LoadFollower
from dynamo.frontend.models.cards import Scope as NamespaceScope
from dynamo.frontend.models.cluster_access import ClusterAccess
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.models.text_models import TextModelLoader
from dynamo.frontend.parts.batches.opening import open_batches
from dynamo.frontend.parts.inspector.inspector import Inspector
from dynamo.frontend.parts.inspector.other_frontends import open_other_frontends
from dynamo.frontend.parts.keys.charging import KeyCharges
from dynamo.frontend.parts.keys.key_store import KeyStore
from dynamo.frontend.parts.keys.opening import OpenedKeys, open_cluster_limits, open_keys
from dynamo.frontend.parts.keys.request_logs import RequestLogs
from dynamo.frontend.parts.media.intake import MediaIntake
from dynamo.frontend.parts.recording.opening import open_recording
from dynamo.frontend.parts.recording.recording import Recording
from dynamo.frontend.parts.scaling.signals import MANY, AutoscaleSignals
from dynamo.frontend.parts.stored_responses.opening import open_response_store
from dynamo.frontend.pipeline.exchange import ExchangeRegister
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.frontend.pipeline.outcome import Hooks
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.reports import RequestCounts, RequestLog
from dynamo.frontend.settings import FrontendSettings
from dynamo.router.stall_detector import StallDetector, StallPolicy
from dynamo.scaling.decide import ScaleRules

if TYPE_CHECKING:
    from dynamo.runtime.distributed import DistributedRuntime

__all__ = ["Frontend"]

logger = logging.getLogger(__name__)


class OpenedParts(NamedTuple):
    """What a frontend is made over, for tools and tests."""

    runtime: DistributedRuntime
    keys: OpenedKeys
    recording: Recording


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
        limit = settings.max_requests_in_flight
        admission = Admission(limit) if peers is None else peers.admission(limit)
        self.metrics = FrontendMetrics(runtime.metrics, prefix=settings.metrics_prefix)
        access = ClusterAccess(settings, runtime)
        text_models = TextModelLoader(settings, offload, now=now)
        self.models = ModelDirectory(
            runtime.discovery,
            access.connect,
            text_models.load,
            access.rules(),
            scope=NamespaceScope(settings.namespace, settings.namespace_prefix),
            metrics=self.metrics,
            max_models=settings.max_models,
            concurrent_loads=settings.concurrent_model_loads,
        )
        self.loads = LoadFollower(settings, self.models, access.loads, peers, report_own=access.report_own)
        adapters = AdapterKeeper(self.models, access.ask_adapters)
        register = ExchangeRegister()
        self.metrics.requests.read_stage_requests(register.count_in_stage)
        preparing: Offload = ThreadOffload(settings.preprocess_workers) if offload is None else offload
        recording = open_recording(settings, self.metrics.dropped_records)
        opened = open_keys(settings, self.metrics.keys, None if peers is None else peers.limits())
        cluster_limits = open_cluster_limits(settings, opened, runtime.discovery)
        self.pipeline = Pipeline(
            settings,
            admission,
            self.models,
            self.metrics,
            Preprocessor(settings, self.metrics, preparing),
            MediaIntake(settings.media, preparing, self.metrics.media),
            register,
            StallDetector(_stall_policy(settings), self.metrics.stalled),
            Hooks([RequestCounts(self.metrics), RequestLog(settings.overload_status)]),
        )
        self.opened = OpenedParts(runtime, opened, recording)
        hooks = self.pipeline.hooks
        if opened.quotas is not None:
            hooks.add(KeyCharges(opened.quotas))
        hooks.add(recording)
        responses = open_response_store(
            settings.responses_store, settings.response_limits, is_shared_port=peers is not None
        )
        self.batches = open_batches(settings, self.pipeline, opened.keys)
        if self.batches is not None:
            self.pipeline.media.serve_files(self.batches.files)
            hooks.add(self.batches)
        logs = RequestLogs(settings)
        self.inspector: Inspector | None = None
        if _has_inspector(settings):
            self.inspector = Inspector(self.pipeline, self.loads, peers, failures=recording.failures.ring)
            hooks.add(self.inspector)
        others = None if self.inspector is None else open_other_frontends(settings.inspector, runtime.discovery)
        if self.inspector is not None and others is not None:
            self.inspector.join(others)
        signals = None if not settings.autoscale else self._signals(runtime, peers)
        operators = OperatorParts(
            opened=opened,
            loads=self.loads,
            adapters=adapters,
            logs=logs,
            peers=peers,
            inspector=self.inspector,
            signals=signals,
        )
        routes = FrontendRoutes(self.pipeline, preparing, responses, self.batches, operators)
        self.asgi = routes.for_clients()
        self.admin_asgi = routes.for_operators()
        measures = [self.models.measure, *(() if signals is None else (partial(self._measure_load, signals),))]
        probe = LoopProbe(self.metrics.event_loop, measures)
        self._starts: list[Callable[[], Awaitable[None] | None]] = [
            runtime.start,
            self.models.start,
            self.loads.start,
            adapters.start,
            probe.start,
            recording.start,
        ]
        self._starts += [part.start for part in (opened.keys, opened.meter) if part is not None]
        self._parts = AsyncExitStack()  # closed from the last one to the first: the view of the cluster goes late
        self._parts.callback(preparing.close)
        self._parts.push_async_callback(logs.aclose)
        self._parts.push_async_callback(self.pipeline.media.aclose)
        if responses is not None:
            self._parts.push_async_callback(responses.aclose)
        if self.keys is not None:
            self.keys.on_look.append(self._cut_revoked)
            self._parts.push_async_callback(self.keys.aclose)
        if opened.quotas is not None:
            self._parts.callback(opened.quotas.table.close)
        if cluster_limits is not None:
            self._starts.append(cluster_limits.start)
            self._parts.push_async_callback(cluster_limits.aclose)
        if opened.meter is not None:  # after the requests have ended, and before their limits go
            self._parts.push_async_callback(opened.meter.aclose)
        self._parts.push_async_callback(recording.aclose)
        self._parts.callback(text_models.close)
        self._parts.push_async_callback(access.aclose)
        self._parts.push_async_callback(self.models.aclose)
        self._parts.push_async_callback(adapters.aclose)
        self._parts.push_async_callback(self.loads.aclose)
        self._parts.callback(self.watch.close)
        if signals is not None:
            self._parts.push_async_callback(signals.aclose)
        self._parts.callback(probe.stop)
        if self.batches is not None:
            self._parts.push_async_callback(self.batches.aclose)
            self._starts.append(self.batches.start)
        if self.inspector is not None:
            self._starts.append(self.inspector.start)
            self._parts.push_async_callback(self.inspector.aclose)
        if others is not None:
            self._starts.append(others.start)
            self._parts.push_async_callback(others.aclose)

    def _signals(self, runtime: DistributedRuntime, peers: Peers | None) -> AutoscaleSignals:
        rules = ScaleRules(0, MANY, self.settings.autoscale_target)
        reports_of = self.loads.busy_workers.reports_of
        return AutoscaleSignals(self.models, runtime.metrics, reports_of, rules, peers, member=str(os.getpid()))

    def _measure_load(self, signals: AutoscaleSignals, now: float) -> None:
        for key, before, decision in signals.measure(now):
            if self.inspector is not None:
                self.inspector.note_scaling(key, before, decision)

    @property
    def admission(self) -> Admission:
        """How many requests are in flight, and whether new ones are welcome."""
        return self.pipeline.admission

    @property
    def exchanges(self) -> ExchangeRegister:
        """The requests in flight."""
        return self.pipeline.register

    @property
    def watch(self) -> StallDetector:
        """What watches the streams for a want of progress."""
        return self.pipeline.stalls

    @property
    def keys(self) -> KeyStore | None:
        """The keys in service; None where no route needs one."""
        return self.opened.keys.keys

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
        for start in self._starts:
            begun = start()
            if begun is not None:
                await begun

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

    def _cut_revoked(self) -> None:
        """End the requests of keys that were taken away, where these say so."""
        if self.keys is not None and self.keys.cuts_requests:
            cut = self.exchanges.end_revoked(self.keys.is_gone)
            if cut:
                logger.warning("%d request(s) were cut, because their key was revoked", cut)

    def stopping(self) -> None:
        """Mark the process as neither ready nor alive: the listener is about to close."""
        self.admission.move(Stage.STOPPING)
        if self.inspector is not None:
            self.inspector.stopping()

    async def aclose(self) -> None:
        """Leave: the view of the cluster goes last. Idempotent."""
        self.stopping()
        await self._parts.aclose()


def _has_inspector(settings: FrontendSettings) -> bool:
    return settings.inspector.is_on and not settings.disable_admin_api


def _stall_policy(settings: FrontendSettings) -> StallPolicy:
    return StallPolicy(
        settings.stall_floor_seconds,
        settings.stall_factor,
        settings.first_token_timeout_seconds,
        settings.inter_token_timeout_seconds,
    )
