"""Metrics under the names that the simulated engine has them, so that dashboards made for it show the mock engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynamo.runtime.metrics import MetricsRegistry
from dynamo.scheduling import ScheduledRequest, SchedulerCore

__all__ = ["MockMetrics"]

BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_LATENCIES: Final = (
    ("time_to_first_token_seconds", "Time from the request to its first token"),
    ("inter_token_latency_seconds", "Time between two tokens of a request"),
    ("e2e_request_latency_seconds", "Time from the request to its last token"),
)


class MockMetrics:
    """The metrics of one mock engine, all its ranks together."""

    def __init__(self, backend: str, model_name: str, cores: Sequence[SchedulerCore]) -> None:
        self.registry = registry = MetricsRegistry()
        labels = (("model_name", model_name),)
        self._cores = cores
        self._prompt_tokens = self._cached_tokens = 0
        running, waiting = (
            ("num_running_reqs", "num_queue_reqs")
            if backend == "sglang"
            else ("num_requests_running", "num_requests_waiting")
        )

        def gauge(name: str, meaning: str, read: object) -> None:
            registry.gauge(f"{backend}:{name}", meaning, labels).read_from(read)  # type: ignore[arg-type]

        gauge(running, "Requests that run", lambda: sum(len(core.running) for core in cores))
        gauge(waiting, "Requests that wait", lambda: sum(len(core.waiting) for core in cores))
        if backend == "sglang":
            gauge("cache_hit_rate", "Part of the prompt tokens that were cached, 0 to 1", lambda: self.hit_rate or 0.0)
        else:
            for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
                gauge(name, "Part of the cache that running requests use, 0 to 1", self._usage)
        self._requests = (
            registry.counter("sglang:num_requests_total", "Requests that were admitted", labels)
            if backend == "sglang"
            else None
        )
        self._preemptions = (
            None
            if backend == "sglang"
            else registry.counter(f"{backend}:num_preemptions_total", "Requests that lost their blocks", labels)
        )
        self.first_token, self.between_tokens, self.whole = (
            registry.histogram(f"{backend}:{name}", meaning, labels, buckets=BUCKETS) for name, meaning in _LATENCIES
        )

    @property
    def hit_rate(self) -> float | None:
        """The part of all prompt tokens that were cached; None: no prompt was computed yet."""
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else None

    def on_first_token(self, request: ScheduledRequest) -> None:
        """Count an admitted request."""
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
        return self.registry.expose().decode()

    def _usage(self) -> float:
        return sum(core.pool.used for core in self._cores) / sum(core.pool.blocks for core in self._cores)
