"""What a frontend counts: the parts, and what of them concerns the whole process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.base.metrics.models import ModelMetrics
from dynamo.frontend.base.metrics.requests import RequestSeries
from dynamo.frontend.base.metrics.workers import WorkerGauges
from dynamo.router.dispatch.stall_detector import StallKind
from dynamo.runtime.observe.metric_snapshots import absorb
from dynamo.runtime.observe.metrics import Histogram, MetricsRegistry

STALL_SECONDS: Final = 0.1  # a loop turn this late is worth an alert: every stream of the process stood still


class PreparationMetrics:
    """The time that templates and tokenizers take."""

    def __init__(self, families: FrontendFamilies) -> None:
        by_name, registry = families.by_name, families.registry
        self.tokenize: tuple[Histogram, Histogram] = (  # in seconds and in milliseconds
            by_name["tokenize_seconds"].histogram(registry),
            by_name["tokenizer_latency_ms"].histogram(registry, {"operation": "tokenize"}),
        )
        self.template_seconds = by_name["template_seconds"].histogram(registry)


class EventLoopMetrics:
    """How late the loop's own timer runs."""

    def __init__(self, families: FrontendFamilies) -> None:
        self._delay = families.by_name["event_loop_delay_seconds"].histogram(families.registry)
        self.lag = families.gauge("event_loop_lag_seconds")
        self._stalls = families.counter("event_loop_stall_total")

    def observe(self, late: float) -> None:
        """Count one turn of the loop that was `late` seconds late."""
        self._delay.observe(late)
        self.lag.set(late)
        if late > STALL_SECONDS:
            self._stalls.inc()


class _Exposition:
    """A registry as text, alone or with those of the other processes of its group."""

    def __init__(self, registry: MetricsRegistry, prefix: str) -> None:
        self.registry = registry
        self._facts = (
            f"{prefix}_model_",
            f"{prefix}_worker_",
            f"{prefix}_event_loop_lag_",
            f"{prefix}_stored_response",
            f"{prefix}_key_budget_",
            "dynamo_autoscale_",
            "process_start_time_",
            "process_max_fds",
        )

    def expose_group(self, snapshots: Sequence[bytes]) -> bytes:
        """Write the metrics of all processes as those of one."""
        merged = MetricsRegistry()
        for one in snapshots:
            absorb(merged, one, is_fact=self._is_fact)
        return merged.expose()

    def _is_fact(self, name: str) -> bool:
        """Return whether a gauge has the same value in every process, or its highest value counts."""
        return name.startswith(self._facts)


class FrontendMetrics:
    """The families of the frontend itself, registered once in the runtime's registry."""

    def __init__(
        self, registry: MetricsRegistry, *, prefix: str = "dynamo_frontend", env: Mapping[str, str] | None = None
    ) -> None:
        """Raises ValueError naming the variable when a `DYN_HISTOGRAM_*` setting makes no buckets."""
        families = FrontendFamilies(registry, prefix, os.environ if env is None else env)
        self.families = families
        """Opens the families of parts, too."""
        self.requests = RequestSeries(families)
        self.preparation = PreparationMetrics(families)
        self.models = ModelMetrics(families)
        self.workers = WorkerGauges(registry, families.by_name)
        self.event_loop = EventLoopMetrics(families)
        stalled = families.counters("stalled_streams_total")
        self._stalled = {kind: stalled.labels(kind.name.lower()) for kind in StallKind}
        self._refusals = families.counters("refusals_total")
        families.gauge("processes").set(1)
        families.counter("process_restarts_total")  # the parent of a group counts them
        self._exposition = _Exposition(registry, prefix)

    def expose(self) -> bytes:
        """Write everything in the registry as Prometheus text."""
        return self._exposition.registry.expose()

    def expose_group(self, snapshots: Sequence[bytes]) -> bytes:
        """Write the metrics of all processes of a group as those of one process; `snapshots` hold this process's own."""
        return self._exposition.expose_group(snapshots)

    def refused(self, limit: str) -> None:
        """Count a refusal by a limit of the listener; `limit` is one of a fixed set of names."""
        self._refusals.labels(limit).inc()

    def stalled(self, finding: StallKind) -> None:
        """Count a choice that left its worker for lack of progress."""
        self._stalled[finding].inc()

    def forget_model(self, name: str) -> None:
        """Drop a model that is gone: its counters stay exposed, its gauges become 0, and nothing here keeps its name."""
        self.models.forget(name)
        self.requests.forget_model(name)


LOOP_PROBE_SECONDS: Final = 1.0  # how often the loop's delay is measured; one timer a second costs nothing


class LoopProbe:
    """One timer; each of `measures` is called with its time."""

    def __init__(self, metrics: EventLoopMetrics, measures: Sequence[Callable[[float], None]]) -> None:
        self._metrics = metrics
        self._measures = measures
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure now and every second from here on."""
        self._probe(asyncio.get_running_loop().time())

    def stop(self) -> None:
        """Measure no more; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _probe(self, due: float) -> None:
        """Measure how late this very timer runs, and set the next one."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._metrics.observe(max(0.0, now - due))
        for measure in self._measures:
            measure(now)
        due = now + LOOP_PROBE_SECONDS
        self._timer = loop.call_at(due, self._probe, due)
