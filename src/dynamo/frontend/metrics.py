"""What a frontend counts. Series are bound once per model and route; a token costs nothing here, a wake-up one call."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Literal, Protocol
from weakref import WeakKeyDictionary

from dynamo.frontend.metric_families import FAMILIES, MODEL_FACTS
from dynamo.frontend.pipeline.stage_timer import ROUTE, STAGES, StageTimer
from dynamo.frontend.worker_gauges import WorkerGauges
from dynamo.router.migration import Move
from dynamo.router.stall_detector import StallKind
from dynamo.runtime.metric_snapshots import absorb
from dynamo.runtime.metrics import (
    Counter,
    Family,
    Gauge,
    Histogram,
    MetricsRegistry,
    Vector,
    count_down,
    count_over,
    count_up,
    observe_each,
)
from dynamo.runtime.settings import env_float, env_int

__all__ = ["UNKNOWN_MODEL", "FrontendMetrics", "RequestMetrics", "RequestType", "check_buckets", "log_buckets"]

UNKNOWN_MODEL: Final = "unknown_model"
"""The label of a model that is not registered: what a client writes must not become a series."""

RequestType = Literal["stream", "unary"]

MAX_BUCKETS: Final = 64  # a histogram is scraped whole; more buckets than this add no information

STALL_SECONDS: Final = 0.1  # a loop turn this late is worth an alert: every stream of the process stood still


def log_buckets(minimum: float, maximum: float, count: int) -> tuple[float, ...]:
    """Return `count` upper bounds, log-spaced from `minimum` to `maximum`, to two significant digits, the first one replaced by 0.

    Raises ValueError unless 0 < minimum < maximum and 2 <= count <= 64.
    """
    if not 0 < minimum < maximum or not 2 <= count <= MAX_BUCKETS:
        raise ValueError(f"need 0 < min < max and 2 <= count <= {MAX_BUCKETS}, got {minimum}, {maximum}, {count}")
    ratio = math.log(maximum / minimum) / (count - 1)
    bounds = {_two_digits(minimum * math.exp(ratio * step)) for step in range(1, count)}
    return (0.0, *sorted(bounds))


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


LOG_BUCKETS: Final[Mapping[str, tuple[float, float, int]]] = {
    "REQUEST_DURATION": (1, 512, 10),
    "INPUT_SEQUENCE_TOKENS": (50, 128_000, 12),
    "CACHED_TOKENS": (50, 128_000, 12),
    "OUTPUT_SEQUENCE_TOKENS": (50, 32_000, 10),
    "TTFT": (0.001, 480, 18),
    "ITL": (0.001, 80, 20),
}


def check_buckets(env: Mapping[str, str]) -> None:
    """Check the `DYN_HISTOGRAM_*` settings. Raises ValueError naming the variables of a setting that makes no valid buckets."""
    for name in LOG_BUCKETS:
        _buckets(name, env)


def _buckets(name: str, env: Mapping[str, str]) -> tuple[float, ...]:
    low, high, count = LOG_BUCKETS[name]
    prefix = f"DYN_HISTOGRAM_{name}"
    chosen = (
        env_float(f"{prefix}_MIN", low, env=env),
        env_float(f"{prefix}_MAX", high, env=env),
        env_int(f"{prefix}_COUNT", count, env=env),
    )
    try:
        return log_buckets(*chosen)
    except ValueError as error:
        raise ValueError(f"{prefix}_MIN, _MAX, _COUNT: {error}") from None


class ModelSeries:
    """The series of one model that do not depend on the route."""

    __slots__ = (
        "active",
        "cached_tokens",
        "duration",
        "inflight",
        "inter_token",
        "output_tokens_total",
        "queue_age",
        "queued",
        "time_to_first_token",
        "tokens",
    )

    def __init__(self, owner: FrontendMetrics, model: str) -> None:
        self.inflight: Gauge = owner._inflight.labels(model)
        self.active: Gauge = owner._active.labels(model)
        self.queued: Gauge = owner._queued.labels(model)
        self.queue_age: Gauge = owner._queue_age.labels(model)
        self.duration: Histogram = owner._duration.labels(model)
        self.time_to_first_token: Histogram = owner._ttft.labels(model)
        self.inter_token: Histogram = owner._itl.labels(model)
        self.tokens: tuple[Histogram, Histogram] = (owner._isl.labels(model), owner._osl.labels(model))  # input, output
        self.cached_tokens: Histogram = owner._cached.labels(model)
        self.output_tokens_total: Counter = owner._output_total.labels(model)


class RouteSeries:
    """The series of one (model, endpoint, request type)."""

    __slots__ = ("at_start", "model", "request_success")

    def __init__(self, owner: FrontendMetrics, model: str, endpoint: str, request_type: str) -> None:
        self.model = owner.model(model)
        started: Counter = owner._started.labels(model, endpoint, request_type)
        self.at_start = (started, self.model.inflight, self.model.queued)
        self.request_success: Counter = owner._requests.labels(model, endpoint, request_type, "success", "")


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


class FrontendMetrics:
    """All families of the frontend, registered once in the runtime's registry."""

    def __init__(
        self, registry: MetricsRegistry, *, prefix: str = "dynamo_frontend", env: Mapping[str, str] | None = None
    ) -> None:
        """Raises ValueError naming the variable when a `DYN_HISTOGRAM_*` setting makes no buckets."""
        env = os.environ if env is None else env
        self._families = {family.name: family.under(prefix) for family in FAMILIES}

        def counters(name: str) -> Vector[Counter]:
            return self._families[name].counters(registry)

        def gauges(name: str) -> Vector[Gauge]:
            return self._families[name].gauges(registry)

        def histograms(name: str, setting: str) -> Vector[Histogram]:
            return self._families[name].with_buckets(_buckets(setting, env)).histograms(registry)

        def one(name: str) -> Family:
            return self._families[name]

        self._started = counters("requests_started_total")
        self._requests = counters("requests_total")
        self._failures = counters("failures_total")
        self._inflight = gauges("inflight_requests")
        self._active = gauges("active_requests")
        self._queued = gauges("queued_requests")
        self._queue_age = gauges("model_queue_age_seconds")
        self._duration = histograms("request_duration_seconds", "REQUEST_DURATION")
        self._ttft = histograms("time_to_first_token_seconds", "TTFT")
        self._itl = histograms("inter_token_latency_seconds", "ITL")
        self._isl = histograms("input_sequence_tokens", "INPUT_SEQUENCE_TOKENS")
        self._osl = histograms("output_sequence_tokens", "OUTPUT_SEQUENCE_TOKENS")
        self._cached = histograms("cached_tokens", "CACHED_TOKENS")
        self._output_total = counters("output_tokens_total")
        self.disconnected_clients = one("disconnected_clients").gauge(registry)
        self._cancellations = counters("model_cancellation_total")
        self._rejections = counters("model_rejection_total")
        self._shed = counters("model_shed_total")
        stalled = counters("stalled_streams_total")
        self._stalled = {kind: stalled.labels(kind.name.lower()) for kind in StallKind}
        self.card_conflicts = counters("model_card_conflicts_total")
        self.materialise_failures = counters("model_load_failures_total")
        self.tokenize: tuple[Histogram, Histogram] = (  # in seconds and in milliseconds
            one("tokenize_seconds").histogram(registry),
            one("tokenizer_latency_ms").histogram(registry, {"operation": "tokenize"}),
        )
        self.template_seconds = one("template_seconds").histogram(registry)
        stage = one("stage_duration_seconds").histograms(registry)
        self.preprocess_seconds: Histogram = stage.labels("preprocess", "")
        stages = one("overhead_seconds").histograms(registry)
        self._stages: tuple[Histogram, ...] = (  # as `observe_stages` counts them
            *[stages.labels(name) for name in STAGES],
            stage.labels("route", ""),
            stage.labels("dispatch", ""),
        )
        self.processes = one("processes").gauge(registry)
        self.processes.set(1)
        self.process_restarts = one("process_restarts_total").counter(registry)
        self._facts = (
            f"{prefix}_model_",
            f"{prefix}_worker_",
            f"{prefix}_event_loop_lag_",
            "process_start_time_",
            "process_max_fds",
        )
        self.event_loop_delay = one("event_loop_delay_seconds").histogram(registry)
        self.event_loop_lag = one("event_loop_lag_seconds").gauge(registry)
        self.event_loop_stalls = one("event_loop_stall_total").counter(registry)
        self._model_gauges = {short: gauges(f"model_{short}") for short in MODEL_FACTS}
        self._workers = gauges("model_workers")
        self._worker_counts: Mapping[tuple[str, str], int] = {}
        self._moves = counters("model_migration_total")
        self._move_seconds = one("model_migration_duration_seconds").histograms(registry)
        self._refusals = counters("refusals_total")
        self._stage_requests = gauges("stage_requests")
        self.tokenizer_cache = TokenizerCacheCounters(
            one("tokenizer_cache_hits_total").counter(registry),
            one("tokenizer_cache_misses_total").counter(registry),
            counters("tokenizer_cache_cached_tokens_total"),
            counters("tokenizer_cache_uncached_tokens_total"),
        )
        self.workers = WorkerGauges(registry, self._families)
        self._registry = registry
        self._models: dict[str, ModelSeries] = {}
        self._routes: dict[tuple[str, str, str], RouteSeries] = {}
        self._unknown = ModelSeries(self, UNKNOWN_MODEL)
        self._models[UNKNOWN_MODEL] = self._unknown

    def expose(self) -> bytes:
        """Write everything in the registry as Prometheus text."""
        return self._registry.expose()

    def expose_group(self, snapshots: Sequence[bytes]) -> bytes:
        """Write the metrics of all processes of a group as those of one process; `snapshots` hold this process's own."""
        merged = MetricsRegistry()
        for one in snapshots:
            absorb(merged, one, is_fact=self._is_fact)
        return merged.expose()

    def _is_fact(self, name: str) -> bool:
        """Return whether a gauge has the same value in every process, or its highest value counts."""
        return name.startswith(self._facts)

    def read_stage_requests(self, count: Callable[[str], int]) -> None:
        """Take the requests of each stage from `count`, at every scrape."""
        for stage in ("preprocess", "route", "dispatch"):
            self._stage_requests.labels(stage, "").read_from(partial(count, stage))

    def refused(self, limit: str) -> None:
        """Count a refusal by a limit of the listener; `limit` is one of a fixed set of names."""
        self._refusals.labels(limit).inc()

    def shed(self, model: str, reason: str) -> None:
        """Count a request that the limits of its model refused."""
        self._shed.labels(model, reason).inc()

    def model(self, name: str) -> ModelSeries:
        """Return the series of a registered model."""
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = ModelSeries(self, name)
        return found

    def forget_model(self, name: str) -> None:
        """Drop a model that is gone: its counters stay exposed, its gauges become 0, and nothing here keeps its name."""
        self._model_gauges["ready"].labels(name).set(0)
        self._queue_age.labels(name).set(0)
        self._models.pop(name, None)
        for key in [key for key in self._routes if key[0] == name]:
            del self._routes[key]

    def describe_model(self, name: str, values: Mapping[str, float | None]) -> None:
        """Set the `model_*` gauges; a key is the part after `model_`, None leaves a gauge alone."""
        for short, value in values.items():
            if value is not None:
                self._model_gauges[short].labels(name).set(value)

    def count_workers(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Set the gauge of workers by (model, role); what was counted before and is not counted now becomes 0."""
        for key in self._worker_counts.keys() - counts.keys():
            self._workers.labels(*key).set(0)
        for key, count in counts.items():
            self._workers.labels(*key).set(count)
        self._worker_counts = counts

    def stalled(self, finding: StallKind) -> None:
        """Count a choice that left its worker for want of progress."""
        self._stalled[finding].inc()

    def moved(self, model: str, moves: Sequence[Move]) -> None:
        """Count the changes of worker of one request that is over."""
        for move in moves:
            kind = "ongoing_request" if move.is_ongoing else "new_request"
            self._moves.labels(model, kind).inc()
            self._move_seconds.labels(model, kind, move.outcome).observe(move.seconds)

    def observe_stages(self, timer: StageTimer) -> None:
        """Count the stages of a request that was answered in full."""
        seconds = timer.seconds
        observe_each(self._stages, (*seconds, seconds[ROUTE], timer.dispatch_seconds))

    def request(self, model: str, endpoint: str, request_type: RequestType, now: float) -> RequestMetrics:
        """Begin to count one request that arrived at `now` (loop time); `model` must be registered or `UNKNOWN_MODEL`."""
        key = (model, endpoint, request_type)
        series = self._routes.get(key)
        if series is None:
            series = self._routes[key] = RouteSeries(self, model, endpoint, request_type)
        return RequestMetrics(self, key, series, now)


class RequestMetrics:
    """The counting of one request. `finish` or `fail` ends it, once; later calls do nothing."""

    __slots__ = ("_ended", "_first_at", "_key", "_last_at", "_observe_gap", "_owner", "_series", "_started_at")

    def __init__(self, owner: FrontendMetrics, key: tuple[str, str, str], series: RouteSeries, now: float) -> None:
        self._owner, self._key, self._series = owner, key, series
        self._started_at = now
        self._first_at: float | None = None
        self._last_at = now
        self._observe_gap = series.model.inter_token.observe_many  # bound once: it runs for every token
        self._ended = False
        count_up(*series.at_start)

    def tokens(self, count: int, now: float) -> None:
        """Count `count` tokens that arrived together at `now`; the interval since the last ones is spread over them."""
        if self._first_at is None:
            model = self._series.model
            self._first_at = now
            count_over(model.queued, model.active)
            model.time_to_first_token.observe(now - self._started_at)
        elif count > 0:
            self._observe_gap((now - self._last_at) / count, count)
        self._last_at = now

    @property
    def key(self) -> tuple[str, str, str]:
        """Its model, endpoint and request type, as the labels have them."""
        return self._key

    @property
    def first_token_seconds(self) -> float | None:
        """From the arrival to the first token; None before it."""
        return None if self._first_at is None else self._first_at - self._started_at

    @property
    def generating_seconds(self) -> float:
        """From the first token to the last one so far."""
        return 0.0 if self._first_at is None else self._last_at - self._first_at

    def finish(self, now: float, *, prompt_tokens: int, output_tokens: int, cached_tokens: int | None) -> None:
        """End a request that was answered in full."""
        if self._close(now):
            self._series.request_success.inc()
            self._count_tokens(prompt_tokens, output_tokens, cached_tokens)

    def fail(
        self,
        now: float,
        *,
        error_type: str,
        failure_class: str,
        reason: str,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
    ) -> None:
        """End a request that failed; `error_type` is the label of `requests_total`."""
        if not self._close(now):
            return
        owner = self._owner
        owner._requests.labels(*self._key, "error", error_type).inc()
        owner._failures.labels(failure_class, reason).inc()
        if error_type == "overload":
            owner._rejections.labels(self._key[0], self._key[1]).inc()
        if output_tokens:
            self._count_tokens(prompt_tokens, output_tokens, None)

    def cancel(self, now: float, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """End a request whose client left."""
        if not self._close(now):
            return
        owner = self._owner
        owner.disconnected_clients.inc()
        owner._requests.labels(*self._key, "error", "cancelled").inc()
        owner._cancellations.labels(*self._key).inc()
        if output_tokens:
            self._count_tokens(prompt_tokens, output_tokens, None)

    def _count_tokens(self, prompt_tokens: int, output_tokens: int, cached_tokens: int | None) -> None:
        model = self._series.model
        observe_each(model.tokens, (prompt_tokens, output_tokens))
        model.output_tokens_total.inc(output_tokens)
        if cached_tokens is not None:
            model.cached_tokens.observe(cached_tokens)

    def _close(self, now: float) -> bool:
        if self._ended:
            return False
        self._ended = True
        model = self._series.model
        count_down(model.inflight, model.queued if self._first_at is None else model.active)
        model.duration.observe(now - self._started_at)
        return True
