"""Metrics under the names that the simulated engine has them, so that dashboards made for it show the mock engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from dynamo.runtime.observe.metrics import Family, MetricsRegistry
from dynamo.scheduling import ScheduledRequest, SchedulerCore

BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
LABELS: Final = ("model_name",)

RUNNING: Final = Family("num_requests_running", "gauge", "Requests that run; for sglang `num_running_reqs`", LABELS)
WAITING: Final = Family("num_requests_waiting", "gauge", "Requests that wait; for sglang `num_queue_reqs`", LABELS)
CACHE_USAGE: Final = Family(
    "kv_cache_usage_perc", "gauge", "Part of the cache that running requests use, 0 to 1 (vllm, trtllm)", LABELS
)
OLD_CACHE_USAGE: Final = Family("gpu_cache_usage_perc", "gauge", "The same under its old name (vllm, trtllm)", LABELS)
PREEMPTIONS: Final = Family(
    "num_preemptions_total", "counter", "Running requests that lost their blocks (vllm, trtllm)", LABELS
)
HIT_RATE: Final = Family(
    "cache_hit_rate", "gauge", "Part of the prompt tokens that were cached, 0 to 1 (sglang)", LABELS
)
REQUESTS: Final = Family("num_requests_total", "counter", "Requests that got their first token (sglang)", LABELS)
FIRST_TOKEN: Final = Family(
    "time_to_first_token_seconds", "histogram", "From the request to its first token", LABELS, BUCKETS
)
BETWEEN_TOKENS: Final = Family(
    "inter_token_latency_seconds", "histogram", "Between two tokens of a request", LABELS, BUCKETS
)
WHOLE: Final = Family("e2e_request_latency_seconds", "histogram", "From the request to its last token", LABELS, BUCKETS)
FAMILIES: Final = (
    RUNNING, WAITING, CACHE_USAGE, OLD_CACHE_USAGE, PREEMPTIONS, HIT_RATE, REQUESTS, FIRST_TOKEN, BETWEEN_TOKENS, WHOLE,
)  # fmt: skip
_SGLANG_NAMES: Final = {RUNNING: "num_running_reqs", WAITING: "num_queue_reqs"}


class MockMetrics:
    """The metrics of one mock engine, all its ranks together."""

    def __init__(self, backend: str, model_name: str, cores: Sequence[SchedulerCore]) -> None:
        self._registry = registry = MetricsRegistry()
        self._cores = cores
        self._prompt_tokens = self._cached_tokens = 0
        labels = (("model_name", model_name),)
        is_sglang = backend == "sglang"

        def named(family: Family) -> Family:
            name = _SGLANG_NAMES.get(family, family.name) if is_sglang else family.name
            return replace(family, name=f"{backend}:{name}")

        named(RUNNING).gauge(registry, labels).read_from(lambda: sum(len(core.running) for core in cores))
        named(WAITING).gauge(registry, labels).read_from(lambda: sum(len(core.waiting) for core in cores))
        if is_sglang:
            named(HIT_RATE).gauge(registry, labels).read_from(lambda: self.hit_rate or 0.0)
        else:
            for family in (CACHE_USAGE, OLD_CACHE_USAGE):
                named(family).gauge(registry, labels).read_from(self._usage)
        self._requests = named(REQUESTS).counter(registry, labels) if is_sglang else None
        self._preemptions = None if is_sglang else named(PREEMPTIONS).counter(registry, labels)
        self.first_token, self.between_tokens, self.whole = (
            named(family).histogram(registry, labels) for family in (FIRST_TOKEN, BETWEEN_TOKENS, WHOLE)
        )

    @property
    def hit_rate(self) -> float | None:
        """The part of all prompt tokens that were cached; None: no prompt was computed yet."""
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else None

    def on_first_token(self, request: ScheduledRequest) -> None:
        """Count a request whose prompt was computed."""
        self._prompt_tokens += request.prompt_tokens
        self._cached_tokens += max(0, request.cached_tokens)
        if self._requests is not None:
            self._requests.inc()

    def on_pass(self) -> None:
        """Count what happened since the last pass."""
        if self._preemptions is not None:
            self._preemptions.inc(sum(core.preemptions for core in self._cores) - self._preemptions.value)

    def text(self) -> str:
        """Return the exposition of a scrape."""
        return self._registry.expose().decode()

    def _usage(self) -> float:
        return sum(core.pool.used for core in self._cores) / sum(core.pool.blocks for core in self._cores)
