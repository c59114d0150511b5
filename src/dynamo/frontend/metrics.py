"""What a frontend counts. Series are bound once per model and route; a token costs nothing here, a wake-up one call."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from dynamo.frontend.pipeline.stage_timer import ROUTE, STAGES, StageTimer
from dynamo.router.migration import Move
from dynamo.router.stall_detector import StallKind
from dynamo.runtime.metric_snapshots import absorb
from dynamo.runtime.metrics import Counter, Gauge, Histogram, MetricsRegistry
from dynamo.runtime.settings import env_float, env_int

__all__ = ["UNKNOWN_MODEL", "FrontendMetrics", "RequestMetrics", "RequestType", "check_buckets", "log_buckets"]

UNKNOWN_MODEL: Final = "unknown_model"
"""The label of a model that is not registered: what a client writes must not become a series."""

RequestType = Literal["stream", "unary"]

MAX_BUCKETS: Final = 64  # a histogram is scraped whole; more buckets than this tell nobody anything

_TOKENIZE_BUCKETS: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
_STAGE_BUCKETS: Final = (*_TOKENIZE_BUCKETS, 2.5, 5.0)
_OVERHEAD_BUCKETS: Final = (0.00001, 0.00005, *_STAGE_BUCKETS, 10.0, 30.0, 60.0, 300.0)
_TEMPLATE_BUCKETS: Final = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05)
_MIGRATION_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_EVENT_LOOP_BUCKETS: Final = (0.0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKENIZER_LATENCY_MS_BUCKETS: Final = (0.5, *(float(2**exponent) for exponent in range(10)))

STALL_SECONDS: Final = 0.1  # a loop turn this late is worth an alert: every stream of the process stood still


def log_buckets(minimum: float, maximum: float, count: int) -> tuple[float, ...]:
    """`count` upper bounds, log-spaced from `minimum` to `maximum`, to two significant digits, the first one replaced by 0.

    Raises ValueError unless 0 < minimum < maximum and 2 <= count <= 64.
    """
    if not 0 < minimum < maximum or not 2 <= count <= MAX_BUCKETS:
        raise ValueError(f"need 0 < min < max and 2 <= count <= {MAX_BUCKETS}, got {minimum}, {maximum}, {count}")
    ratio = math.log(maximum / minimum) / (count - 1)
    bounds = {_two_digits(minimum * math.exp(ratio * step)) for step in range(1, count)}
    return (0.0, *sorted(bounds))


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


_LOG_BUCKETS: Final[Mapping[str, tuple[float, float, int]]] = {
    "REQUEST_DURATION": (1, 512, 10),
    "INPUT_SEQUENCE_TOKENS": (50, 128_000, 12),
    "CACHED_TOKENS": (50, 128_000, 12),
    "OUTPUT_SEQUENCE_TOKENS": (50, 32_000, 10),
    "TTFT": (0.001, 480, 18),
    "ITL": (0.001, 80, 20),
}


def check_buckets(env: Mapping[str, str]) -> None:
    """Raises ValueError naming the variables when a `DYN_HISTOGRAM_*` setting makes no buckets."""
    for name in _LOG_BUCKETS:
        _buckets(name, env)


def _buckets(name: str, env: Mapping[str, str]) -> tuple[float, ...]:
    low, high, count = _LOG_BUCKETS[name]
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
        "input_tokens",
        "inter_token",
        "output_tokens",
        "output_tokens_total",
        "queue_age",
        "queued",
        "time_to_first_token",
    )

    def __init__(self, owner: FrontendMetrics, model: str) -> None:
        self.inflight: Gauge = owner._inflight.labels(model)
        self.active: Gauge = owner._active.labels(model)
        self.queued: Gauge = owner._queued.labels(model)
        self.queue_age: Gauge = owner._queue_age.labels(model)
        self.duration: Histogram = owner._duration.labels(model)
        self.time_to_first_token: Histogram = owner._ttft.labels(model)
        self.inter_token: Histogram = owner._itl.labels(model)
        self.input_tokens: Histogram = owner._isl.labels(model)
        self.output_tokens: Histogram = owner._osl.labels(model)
        self.cached_tokens: Histogram = owner._cached.labels(model)
        self.output_tokens_total: Counter = owner._output_total.labels(model)


class RouteSeries:
    """The series of one (model, endpoint, request type)."""

    __slots__ = ("model", "request_success", "started")

    def __init__(self, owner: FrontendMetrics, model: str, endpoint: str, request_type: str) -> None:
        self.model = owner.model(model)
        self.started: Counter = owner._started.labels(model, endpoint, request_type)
        self.request_success: Counter = owner._requests.labels(model, endpoint, request_type, "success", "")


class FrontendMetrics:
    """All families of the frontend, registered once in the runtime's registry."""

    def __init__(
        self, registry: MetricsRegistry, *, prefix: str = "dynamo_frontend", env: Mapping[str, str] | None = None
    ) -> None:
        """Raises ValueError naming the variable when a `DYN_HISTOGRAM_*` setting makes no buckets."""
        env = os.environ if env is None else env
        per_model = ("model",)

        def name(short: str) -> str:
            return f"{prefix}_{short}"

        route = ("model", "endpoint", "request_type")
        self._started = registry.counter_vector(name("requests_started_total"), "Requests that arrived", route)
        self._requests = registry.counter_vector(
            name("requests_total"), "Requests that ended", (*route, "status", "error_type")
        )
        self._failures = registry.counter_vector(name("failures_total"), "Failed requests", ("class", "reason"))
        self._inflight = registry.gauge_vector(name("inflight_requests"), "Requests being handled", per_model)
        self._active = registry.gauge_vector(name("active_requests"), "Requests whose first token came", per_model)
        self._queued = registry.gauge_vector(name("queued_requests"), "Requests waiting for a first token", per_model)
        self._queue_age = registry.gauge_vector(
            name("model_queue_age_seconds"), "How long the oldest request without a token waits for a place", per_model
        )
        self._duration = registry.histogram_vector(
            name("request_duration_seconds"),
            "From arrival to end",
            per_model,
            buckets=_buckets("REQUEST_DURATION", env),
        )
        self._ttft = registry.histogram_vector(
            name("time_to_first_token_seconds"),
            "From arrival to the first token",
            per_model,
            buckets=_buckets("TTFT", env),
        )
        self._itl = registry.histogram_vector(
            name("inter_token_latency_seconds"), "Between tokens of a choice", per_model, buckets=_buckets("ITL", env)
        )
        self._isl = registry.histogram_vector(
            name("input_sequence_tokens"), "Prompt tokens", per_model, buckets=_buckets("INPUT_SEQUENCE_TOKENS", env)
        )
        self._osl = registry.histogram_vector(
            name("output_sequence_tokens"),
            "Tokens generated",
            per_model,
            buckets=_buckets("OUTPUT_SEQUENCE_TOKENS", env),
        )
        self._cached = registry.histogram_vector(
            name("cached_tokens"), "Prompt tokens the engine had", per_model, buckets=_buckets("CACHED_TOKENS", env)
        )
        self._output_total = registry.counter_vector(name("output_tokens_total"), "Tokens generated", per_model)
        self.disconnected_clients = registry.gauge(
            name("disconnected_clients"), "Clients that left before their answer ended"
        )
        self._cancellations = registry.counter_vector(
            name("model_cancellation_total"), "Requests whose client left", ("model", "endpoint", "request_type")
        )
        self._rejections = registry.counter_vector(
            name("model_rejection_total"), "Requests declined for overload", ("model", "endpoint")
        )
        self._shed = registry.counter_vector(
            name("model_shed_total"), "Requests refused before their prompt was looked at", ("model", "reason")
        )
        stalled = registry.counter_vector(
            name("stalled_streams_total"), "Choices that left a worker without progress", ("finding",)
        )
        self._stalled = {finding: stalled.labels(finding.name.lower()) for finding in StallKind}
        self.card_conflicts = registry.counter_vector(
            name("model_card_conflicts_total"), "Workers left out: their card differs from the first", per_model
        )
        self.materialise_failures = registry.counter_vector(
            name("model_load_failures_total"), "Failed attempts to load a model's tokenizer and template", per_model
        )
        self.tokenize_seconds = registry.histogram(
            name("tokenize_seconds"), "Tokenising one prompt", buckets=_TOKENIZE_BUCKETS
        )
        self.template_seconds = registry.histogram(
            name("template_seconds"), "Rendering one chat template", buckets=_TEMPLATE_BUCKETS
        )
        self.tokenizer_latency = registry.histogram(
            name("tokenizer_latency_ms"),
            "Tokenising one prompt",
            {"operation": "tokenize"},
            buckets=_TOKENIZER_LATENCY_MS_BUCKETS,
        )
        stage = registry.histogram_vector(
            name("stage_duration_seconds"), "One stage of a request", ("stage", "phase"), buckets=_STAGE_BUCKETS
        )
        self.preprocess_seconds: Histogram = stage.labels("preprocess", "")
        self._route_seconds: Histogram = stage.labels("route", "")
        self._dispatch_seconds: Histogram = stage.labels("dispatch", "")
        overhead = registry.histogram_vector(
            name("overhead_seconds"),
            "Where the time of a request went; the stages add up to it",
            ("stage",),
            buckets=_OVERHEAD_BUCKETS,
        )
        self._overhead: tuple[Histogram, ...] = tuple([overhead.labels(one) for one in STAGES])
        self.processes = registry.gauge(name("processes"), "Frontend processes that answer on this port")
        self.processes.set(1)
        self.process_restarts = registry.counter(
            name("process_restarts_total"), "Frontend processes that ended by themselves and were started again"
        )
        self._facts = (f"{prefix}_model_", f"{prefix}_event_loop_lag_")
        self.event_loop_delay = registry.histogram(
            name("event_loop_delay_seconds"), "How late the event loop ran a timer", buckets=_EVENT_LOOP_BUCKETS
        )
        self.event_loop_lag = registry.gauge(
            name("event_loop_lag_seconds"), "How late the event loop ran its last timer of a second"
        )
        self.event_loop_stalls = registry.counter(
            name("event_loop_stall_total"), f"Timers that ran more than {STALL_SECONDS} s late"
        )
        self._model_gauges = {
            short: registry.gauge_vector(name(f"model_{short}"), text, per_model)
            for short, text in {
                "ready": "1 while the model serves",
                "total_kv_blocks": "KV blocks of one worker",
                "max_num_seqs": "Sequences one worker runs at once",
                "max_num_batched_tokens": "Tokens of one engine step",
                "context_length": "Context window in tokens",
                "kv_cache_block_size": "Tokens of one KV block",
                "migration_limit": "Retries of a request on another worker",
            }.items()
        }
        self._workers = registry.gauge_vector(
            name("model_workers"), "Workers whose instance can be reached, by role", ("model", "worker_type")
        )
        self._worker_counts: Mapping[tuple[str, str], int] = {}
        self._moves = registry.counter_vector(
            name("model_migration_total"), "Requests tried on another worker", ("model", "migration_type")
        )
        self._move_seconds = registry.histogram_vector(
            name("model_migration_duration_seconds"),
            "From the loss of a worker to the first thing another one said",
            ("model", "migration_type", "outcome"),
            buckets=_MIGRATION_BUCKETS,
        )
        self._refusals = registry.counter_vector(
            name("refusals_total"), "Requests and connections declined by a limit of the listener", ("limit",)
        )
        self._registry = registry
        self._models: dict[str, ModelSeries] = {}
        self._routes: dict[tuple[str, str, str], RouteSeries] = {}
        self._unknown = ModelSeries(self, UNKNOWN_MODEL)
        self._models[UNKNOWN_MODEL] = self._unknown

    def expose(self) -> bytes:
        """Everything in the registry, as Prometheus text."""
        return self._registry.expose()

    def expose_group(self, snapshots: Sequence[bytes]) -> bytes:
        """The metrics of all processes of a group as those of one; `snapshots` hold this process's own."""
        merged = MetricsRegistry()
        for one in snapshots:
            absorb(merged, one, is_fact=self._is_fact)
        return merged.expose()

    def _is_fact(self, name: str) -> bool:
        """Whether a gauge says the same in every process, or the worst of them is what counts."""
        return name.startswith(self._facts)

    def refused(self, limit: str) -> None:
        """A limit of the listener was hit; `limit` is one of a fixed set of names."""
        self._refusals.labels(limit).inc()

    def shed(self, model: str, reason: str) -> None:
        """A request was refused by the limits of its model."""
        self._shed.labels(model, reason).inc()

    def model(self, name: str) -> ModelSeries:
        """The series of a registered model."""
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = ModelSeries(self, name)
        return found

    def forget_model(self, name: str) -> None:
        """The model is gone: its counters stay exposed, its gauge says so, and nothing here keeps its name."""
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
        """A choice left its worker for want of progress."""
        self._stalled[finding].inc()

    def moved(self, model: str, moves: Sequence[Move]) -> None:
        """Count the changes of worker of one request that is over."""
        for move in moves:
            kind = "ongoing_request" if move.is_ongoing else "new_request"
            self._moves.labels(model, kind).inc()
            self._move_seconds.labels(model, kind, move.outcome).observe(move.seconds)

    def observe_stages(self, timer: StageTimer) -> None:
        """Count the stages of a request that was answered in full."""
        for histogram, seconds in zip(self._overhead, timer.seconds, strict=True):
            histogram.observe(seconds)
        self._route_seconds.observe(timer.seconds[ROUTE])
        self._dispatch_seconds.observe(timer.dispatch_seconds)

    def request(self, model: str, endpoint: str, request_type: RequestType, now: float) -> RequestMetrics:
        """Begin to count one request that arrived at `now` (loop time); `model` must be registered or `UNKNOWN_MODEL`."""
        key = (model, endpoint, request_type)
        series = self._routes.get(key)
        if series is None:
            series = self._routes[key] = RouteSeries(self, model, endpoint, request_type)
        return RequestMetrics(self, key, series, now)


class RequestMetrics:
    """The counting of one request. `finish` or `fail` ends it, once; later calls do nothing."""

    __slots__ = ("_ended", "_first_at", "_key", "_last_at", "_owner", "_series", "_started_at")

    def __init__(self, owner: FrontendMetrics, key: tuple[str, str, str], series: RouteSeries, now: float) -> None:
        self._owner, self._key, self._series = owner, key, series
        self._started_at = now
        self._first_at: float | None = None
        self._last_at = now
        self._ended = False
        series.started.inc()
        series.model.inflight.inc()
        series.model.queued.inc()

    def tokens(self, count: int, now: float) -> None:
        """`count` tokens arrived together at `now`; the interval since the last ones is spread over them."""
        model = self._series.model
        if self._first_at is None:
            self._first_at = now
            model.queued.dec()
            model.active.inc()
            model.time_to_first_token.observe(now - self._started_at)
        elif count > 0:
            model.inter_token.observe_many((now - self._last_at) / count, count)
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
        """The request was answered in full."""
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
        """The request ended with an error; `error_type` is the label of `requests_total`."""
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
        """The client left first."""
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
        model.input_tokens.observe(prompt_tokens)
        model.output_tokens.observe(output_tokens)
        model.output_tokens_total.inc(output_tokens)
        if cached_tokens is not None:
            model.cached_tokens.observe(cached_tokens)

    def _close(self, now: float) -> bool:
        if self._ended:
            return False
        self._ended = True
        model = self._series.model
        model.inflight.dec()
        if self._first_at is None:
            model.queued.dec()
        else:
            model.active.dec()
        model.duration.observe(now - self._started_at)
        return True
