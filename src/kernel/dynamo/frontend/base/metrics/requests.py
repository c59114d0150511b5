"""What a frontend counts for each request. Series are bound once per model and route; a token costs nothing here, a wake-up one
call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Final, Literal

from msgspec import Struct

from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.base.stage_timer import ROUTE, STAGES, StageTimer
from dynamo.router.dispatch.migration import Move
from dynamo.runtime.observe.metrics import Counter, Gauge, Histogram, count_down, count_over, count_up, observe_each

UNKNOWN_MODEL: Final = "unknown_model"
"""The label of a model that is not registered: what a client writes must not become a series."""

RequestType = Literal["stream", "unary"]


CLIENTS_AND_LOAD: Final = frozenset({"validation", "not_found", "not_implemented", "cancelled", "overload"})
"""The error types of clients' mistakes and of refused load. The alert of the error rate leaves the same ones out."""


class _TokenFamilies:
    """The families with the tokens of each request that has ended."""

    def __init__(self, families: FrontendFamilies) -> None:
        self.input = families.histograms("input_sequence_tokens", "INPUT_SEQUENCE_TOKENS")
        self.output = families.histograms("output_sequence_tokens", "OUTPUT_SEQUENCE_TOKENS")
        self.cached = families.histograms("cached_tokens", "CACHED_TOKENS")
        self.output_total = families.counters("output_tokens_total")


class _TokenSeries:
    """Counts the tokens of the requests of one model that have ended."""

    __slots__ = ("_lengths", "_output_total", "cached", "input")

    def __init__(self, families: _TokenFamilies, model: str) -> None:
        self.input: Histogram = families.input.labels(model)
        self._lengths: tuple[Histogram, Histogram] = (self.input, families.output.labels(model))
        self.cached: Histogram = families.cached.labels(model)
        self._output_total: Counter = families.output_total.labels(model)

    def count(self, input: int, output: int, cached: int | None) -> None:
        observe_each(self._lengths, (input, output))
        self._output_total.inc(output)
        if cached is not None:
            self.cached.observe(cached)


class ModelFamilies:
    """The families with a series for each model."""

    def __init__(self, families: FrontendFamilies) -> None:
        self.inflight = families.gauges("inflight_requests")
        self.active = families.gauges("active_requests")
        self.queued = families.gauges("queued_requests")
        self.queue_age = families.gauges("model_queue_age_seconds")
        self.duration = families.histograms("request_duration_seconds", "REQUEST_DURATION")
        self.time_to_first_token = families.histograms("time_to_first_token_seconds", "TTFT")
        self.inter_token = families.histograms("inter_token_latency_seconds", "ITL")
        self.tokens = _TokenFamilies(families)


class OutcomeFamilies:
    """The families with a series for each route and what came of its requests."""

    def __init__(self, families: FrontendFamilies) -> None:
        self.started = families.counters("requests_started_total")
        self.requests = families.counters("requests_total")
        self.failures = families.counters("failures_total")
        self.disconnected_clients = families.gauge("disconnected_clients")
        self.cancellations = families.counters("model_cancellation_total")
        self.rejections = families.counters("model_rejection_total")
        self.failed = 0
        """Requests that failed by no doing of their clients, and were not turned away for lack of room."""
        self.refused = 0
        """Requests that ended with an error for a mistake of their client, or for lack of room."""


class ModelSeries:
    """The series of one model that do not depend on the route."""

    __slots__ = (
        "active", "duration", "inflight", "inter_token", "queue_age", "queued", "time_to_first_token", "tokens",
    )  # fmt: skip

    def __init__(self, families: ModelFamilies, model: str) -> None:
        self.inflight: Gauge = families.inflight.labels(model)
        self.active: Gauge = families.active.labels(model)
        self.queued: Gauge = families.queued.labels(model)
        self.queue_age: Gauge = families.queue_age.labels(model)
        self.duration: Histogram = families.duration.labels(model)
        self.time_to_first_token: Histogram = families.time_to_first_token.labels(model)
        self.inter_token: Histogram = families.inter_token.labels(model)
        self.tokens = _TokenSeries(families.tokens, model)


class RouteSeries:
    """The series of one (model, endpoint, request type)."""

    __slots__ = ("at_start", "model", "request_success")

    def __init__(self, model: ModelSeries, outcomes: OutcomeFamilies, key: tuple[str, str, str]) -> None:
        self.model = model
        started: Counter = outcomes.started.labels(*key)
        self.at_start = (started, self.model.inflight, self.model.queued)
        self.request_success: Counter = outcomes.requests.labels(*key, "success", "")


class StageSeries:
    """The stages of requests: how long each takes, and how many requests are in it."""

    def __init__(self, families: FrontendFamilies) -> None:
        self._requests = families.gauges("stage_requests")
        stage = families.histograms("stage_duration_seconds")
        stages = families.histograms("overhead_seconds")
        self.preprocess_seconds: Histogram = stage.labels("preprocess", "")
        self._seconds: tuple[Histogram, ...] = (  # as `observe` counts them
            *[stages.labels(name) for name in STAGES],
            stage.labels("route", ""),
            stage.labels("dispatch", ""),
        )

    def read_requests(self, count: Callable[[str], int]) -> None:
        """Take the requests of each stage from `count`, at every scrape."""
        for stage in ("preprocess", "route", "dispatch"):
            self._requests.labels(stage, "").read_from(partial(count, stage))

    def observe(self, timer: StageTimer) -> None:
        """Count the stages of a request that was answered in full."""
        seconds = timer.seconds
        observe_each(self._seconds, (*seconds, seconds[ROUTE], timer.dispatch_seconds))


class RequestSeries:
    """Begins the counting of each request, and counts what a request leaves behind."""

    def __init__(self, families: FrontendFamilies) -> None:
        self._families = ModelFamilies(families)
        self._outcomes = OutcomeFamilies(families)
        self._models: dict[str, ModelSeries] = {UNKNOWN_MODEL: ModelSeries(self._families, UNKNOWN_MODEL)}
        self._routes: dict[tuple[str, str, str], RouteSeries] = {}
        self._shed = families.counters("model_shed_total")
        self._moves = families.counters("model_migration_total")
        self._move_seconds = families.histograms("model_migration_duration_seconds")
        self.stages = StageSeries(families)

    def begin(self, model: str, endpoint: str, request_type: RequestType, now: float) -> RequestMetrics:
        """Begin to count one request that arrived at `now` (loop time); `model` must be registered or `UNKNOWN_MODEL`."""
        key = (model, endpoint, request_type)
        series = self._routes.get(key)
        if series is None:
            series = self._routes[key] = RouteSeries(self.model(model), self._outcomes, key)
        return RequestMetrics(self._outcomes, key, series, now)

    def counted(self, model: str, endpoint: str) -> None:
        """Count a request that was answered by the frontend alone: no worker generated anything for it."""
        key = (model, endpoint, "unary")
        self._outcomes.started.labels(*key).inc()
        self._outcomes.requests.labels(*key, "success", "").inc()

    def model(self, name: str) -> ModelSeries:
        """Return the series of a registered model."""
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = ModelSeries(self._families, name)
        return found

    def forget_model(self, name: str) -> None:
        """Drop a model that is gone: its counters stay exposed, its queue has no age, and nothing here keeps its name."""
        self._families.queue_age.labels(name).set(0)
        self._models.pop(name, None)
        for key in [key for key in self._routes if key[0] == name]:
            del self._routes[key]

    def shed(self, model: str, reason: str) -> None:
        """Count a request that the limits of its model refused."""
        self._shed.labels(model, reason).inc()

    def moved(self, model: str, moves: Sequence[Move]) -> None:
        """Count the changes of worker of one request that is over."""
        for move in moves:
            kind = "ongoing_request" if move.is_ongoing else "new_request"
            self._moves.labels(model, kind).inc()
            self._move_seconds.labels(model, kind, move.outcome).observe(move.seconds)

    @property
    def bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The upper bounds of the buckets of first tokens and of the gaps between tokens."""
        series = self._models[UNKNOWN_MODEL]
        return series.time_to_first_token.bounds, series.inter_token.bounds

    def totals(self) -> RequestTotals:
        """Add up what all models have counted: some microseconds for each model."""
        totals = RequestTotals(shed=sum([counter.value for counter in self._shed.series()]))
        first, inter = self.bounds
        totals.first_token, totals.inter_token = [0] * (len(first) + 1), [0] * (len(inter) + 1)
        for model in self._models.values():
            totals.running += model.inflight.value
            totals.waiting += model.queued.value
            totals.ended += model.duration.count
            totals.input_tokens += model.tokens.input.sum
            totals.cached_tokens += model.tokens.cached.sum
            totals.first_token = list(map(add, totals.first_token, model.time_to_first_token.counts))
            totals.inter_token = list(map(add, totals.inter_token, model.inter_token.counts))
        totals.started = totals.ended + totals.running
        totals.failed, totals.refused = self._outcomes.failed, self._outcomes.refused
        totals.output_tokens = sum(totals.first_token) + sum(totals.inter_token)  # counted as they come
        return totals


class RequestTotals(Struct):
    """What all models have counted so far, added up. The lists are the buckets of histograms, not cumulated."""

    started: float = 0.0
    ended: float = 0.0
    failed: float = 0.0  # of those that have ended: neither their clients' mistakes, nor turned away
    refused: float = 0.0  # of those that have ended: their clients' mistakes, or turned away
    shed: float = 0.0
    input_tokens: float = 0.0  # of requests that have ended
    cached_tokens: float = 0.0  # of them
    output_tokens: float = 0.0  # of running requests, too
    running: float = 0.0
    waiting: float = 0.0  # of those that run: without a token
    first_token: list[int] = []
    inter_token: list[int] = []


class RequestMetrics:
    """The counting of one request. `finish` or `fail` ends it, once; later calls do nothing."""

    __slots__ = ("_ended", "_first_at", "_key", "_observe_gap", "_outcomes", "_series", "_started_at", "progress_at")

    def __init__(self, outcomes: OutcomeFamilies, key: tuple[str, str, str], series: RouteSeries, now: float) -> None:
        self._outcomes, self._key, self._series = outcomes, key, series
        self._started_at = now
        self._first_at: float | None = None
        self.progress_at = now  # when tokens came last; before the first ones, when it arrived
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
            self._observe_gap((now - self.progress_at) / count, count)
        self.progress_at = now

    @staticmethod
    def token_each(requests: Sequence[RequestMetrics], now: float) -> None:
        """Count one token of each request, all of which arrived together at `now`.

        In a step of an engine nearly all requests of a model had their last token at the same time: these are one observation.
        """
        last_at, count = 0.0, 0
        model: ModelSeries | None = None
        for request in requests:
            before, series = request.progress_at, request._series.model
            if request._first_at is None:
                request.tokens(1, now)
                continue
            request.progress_at = now
            if before != last_at or series is not model:
                if model is not None:
                    model.inter_token.observe_many(now - last_at, count)
                last_at, model, count = before, series, 0
            count += 1
        if model is not None:
            model.inter_token.observe_many(now - last_at, count)

    @property
    def key(self) -> tuple[str, str, str]:
        """Its model, endpoint and request type, as the labels have them."""
        return self._key

    @property
    def first_token_seconds(self) -> float | None:
        """From the arrival to the first token; None before it."""
        return None if self._first_at is None else self._first_at - self._started_at

    @property
    def last_token_at(self) -> float | None:
        """When the last tokens came; None before the first ones."""
        return None if self._first_at is None else self.progress_at

    @property
    def generating_seconds(self) -> float:
        """From the first token to the last one so far."""
        return 0.0 if self._first_at is None else self.progress_at - self._first_at

    def finish(self, now: float, *, prompt_tokens: int, output_tokens: int, cached_tokens: int | None) -> None:
        """End a request that was answered in full."""
        if self._close(now):
            self._series.request_success.inc()
            self._series.model.tokens.count(prompt_tokens, output_tokens, cached_tokens)

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
        outcomes = self._outcomes
        outcomes.requests.labels(*self._key, "error", error_type).inc()
        outcomes.failures.labels(failure_class, reason).inc()
        if error_type not in CLIENTS_AND_LOAD:
            outcomes.failed += 1
        elif error_type != "cancelled":
            outcomes.refused += 1
        if error_type == "overload":
            outcomes.rejections.labels(self._key[0], self._key[1]).inc()
        if output_tokens:
            self._series.model.tokens.count(prompt_tokens, output_tokens, None)

    def cancel(self, now: float, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """End a request whose client left."""
        if not self._close(now):
            return
        outcomes = self._outcomes
        outcomes.disconnected_clients.inc()
        outcomes.requests.labels(*self._key, "error", "cancelled").inc()
        outcomes.cancellations.labels(*self._key).inc()
        if output_tokens:
            self._series.model.tokens.count(prompt_tokens, output_tokens, None)

    def _close(self, now: float) -> bool:
        if self._ended:
            return False
        self._ended = True
        model = self._series.model
        count_down(model.inflight, model.queued if self._first_at is None else model.active)
        model.duration.observe(now - self._started_at)
        return True
