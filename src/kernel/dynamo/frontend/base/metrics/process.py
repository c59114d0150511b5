"""What a frontend counts: the parts, and what of them concerns the whole process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.base.metrics.requests import RequestSeries
from dynamo.frontend.base.metrics.table import MODEL_FACTS
from dynamo.router.dispatch.stall_detector import StallKind
from dynamo.runtime.observe.metric_snapshots import absorb
from dynamo.runtime.observe.metrics import Counter, Family, Gauge, Histogram, MetricsRegistry, Vector, set_each

NO_RANK: Final = "none"  # as the native frontend labels what is not of one rank
MAX_WORKERS: Final = 4096

_LAST: Final = ("time_to_first_token_seconds", "input_sequence_tokens", "inter_token_latency_seconds")
_LOAD: Final = ("active_decode_blocks", "active_prefill_tokens")

STALL_SECONDS: Final = 0.1  # a loop turn this late is worth an alert: every stream of the process stood still
LOOP_PROBE_SECONDS: Final = 1.0  # how often the loop's delay is measured; one timer a second costs nothing


class WorkerGauges:
    """Keeps the gauges of the workers that exist. `worker_id` is the instance id in lower-case hex."""

    def __init__(self, registry: MetricsRegistry, families: Mapping[str, Family]) -> None:
        """`families`: by name without prefix; those of `worker_...` are taken."""
        self._registry = registry
        self._families = {short: families[f"worker_{short}"] for short in _LOAD}
        self._families |= {short: families[f"worker_last_{short}"] for short in _LAST}
        self._gauges: dict[int, dict[tuple[str, str], Gauge]] = {}  # by worker, then (name, rank)
        self._last: dict[int, tuple[Gauge, ...]] = {}  # by worker, those of `_LAST` in its order
        self._roles: dict[int, str] = {}

    def answered(self, worker_id: int, first_token_seconds: float, input_tokens: int, itl_seconds: float) -> None:
        """Note the last request that a worker answered; `itl_seconds` is its mean time between tokens."""
        last = self._last.get(worker_id)
        if last is None:
            found = [self._gauge(worker_id, short, NO_RANK) for short in _LAST]
            last = tuple([gauge for gauge in found if gauge is not None])
            if len(last) < len(_LAST):
                return
            self._last[worker_id] = last
        set_each(last, (first_token_seconds, input_tokens, itl_seconds))

    def loaded(self, worker_id: int, dp_rank: int, decode_blocks: int | None, prefill_tokens: int | None) -> None:
        """Note the load that one rank reported."""
        for short, value in zip(_LOAD, (decode_blocks, prefill_tokens), strict=True):
            if value is not None and (gauge := self._gauge(worker_id, short, str(dp_rank))) is not None:
                gauge.set(value)

    def keep_only(self, roles: Mapping[int, str]) -> None:
        """Learn the workers that exist and their roles; the gauges of the others go."""
        for worker_id in self._gauges.keys() - roles.keys():
            self._last.pop(worker_id, None)
            for gauge in self._gauges.pop(worker_id).values():
                self._registry.remove(gauge)
        self._roles = dict(roles)

    def _gauge(self, worker_id: int, short: str, dp_rank: str) -> Gauge | None:
        role = self._roles.get(worker_id)
        if role is None:
            return None  # it has left, and its gauges with it
        held = self._gauges.get(worker_id)
        if held is None:
            if len(self._gauges) >= MAX_WORKERS:
                return None
            held = self._gauges[worker_id] = {}
        gauge = held.get((short, dp_rank))
        if gauge is None:
            # A worker that does both is a "decode" one on these gauges, as on 1.6.1's.
            kind = "decode" if role == "aggregated" else role
            labels = {"worker_id": f"{worker_id:x}", "dp_rank": dp_rank, "worker_type": kind}
            gauge = held[short, dp_rank] = self._families[short].gauge(self._registry, labels)
        return gauge


class CacheTotals(Protocol):
    """The running totals of a tokenizer's cache."""

    hits: int
    misses: int
    cached_tokens: int
    uncached_tokens: int


class TokenizerCacheCounters:
    """Turns the running totals of tokenizer caches into counters, which never fall when a model is loaded anew."""

    def __init__(
        self, hits: Counter, misses: Counter, cached_tokens: Vector[Counter], uncached_tokens: Vector[Counter]
    ) -> None:
        self._hits, self._misses = hits, misses
        self._cached, self._uncached = cached_tokens, uncached_tokens
        self._seen: WeakKeyDictionary[CacheTotals, tuple[int, int, int, int]] = WeakKeyDictionary()

    def count(self, model: str, totals: CacheTotals) -> None:
        """Count what was added to `totals` since the last call with the same object."""
        now = (totals.hits, totals.misses, totals.cached_tokens, totals.uncached_tokens)
        before = self._seen.get(totals, (0, 0, 0, 0))
        counters = (self._hits, self._misses, self._cached.labels(model), self._uncached.labels(model))
        for counter, total, known in zip(counters, now, before, strict=True):
            counter.inc(max(0, total - known))
        self._seen[totals] = now


class ModelMetrics:
    """The gauges and counters of models and their workers."""

    def __init__(self, families: FrontendFamilies) -> None:
        self.card_conflicts = families.counters("model_card_conflicts_total")
        self.load_failures = families.counters("model_load_failures_total")
        self.tokenizer_cache = TokenizerCacheCounters(
            families.counter("tokenizer_cache_hits_total"),
            families.counter("tokenizer_cache_misses_total"),
            families.counters("tokenizer_cache_cached_tokens_total"),
            families.counters("tokenizer_cache_uncached_tokens_total"),
        )
        self._encoder_requests = families.counters("encoder_requests_total")
        self._encoder_fallbacks = families.counter("encoder_fallbacks_total")
        self._facts = {short: families.gauges(f"model_{short}") for short in MODEL_FACTS}
        self._workers = families.gauges("model_workers")
        self._worker_counts: Mapping[tuple[str, str], int] = {}

    def encoder_outcome(self, outcome: str) -> None:
        """Count what became of one request to an encode worker, or a request that went on without one (`fallback`)."""
        if outcome == "fallback":
            self._encoder_fallbacks.inc()
        else:
            self._encoder_requests.labels(outcome).inc()

    def forget(self, name: str) -> None:
        """Show a model that is gone as not ready."""
        self._facts["ready"].labels(name).set(0)

    def describe(self, name: str, values: Mapping[str, float | None]) -> None:
        """Set the `model_*` gauges; a key is the part after `model_`, None leaves a gauge alone."""
        for short, value in values.items():
            if value is not None:
                self._facts[short].labels(name).set(value)

    def count_workers(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Set the gauge of workers by (model, role); what was counted before and is not counted now becomes 0."""
        for key in self._worker_counts.keys() - counts.keys():
            self._workers.labels(*key).set(0)
        for key, count in counts.items():
            self._workers.labels(*key).set(count)
        self._worker_counts = counts


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
