"""The metrics of the router's queues, under their native names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dynamo.errors import RouterQueueLimitExceeded
from dynamo.placement.queueing.targets import TARGET_KIND
from dynamo.runtime.observe.metrics import Family, MetricsRegistry

_PREFIX: Final = "dynamo_frontend_router"
_CLASS: Final = ("model", "worker_type", "policy_class")
_REASONS: Final = {
    "requests": "request_limit", "raw_isl_tokens": "raw_isl_token_limit", "cached_tokens": "cached_token_limit",
    TARGET_KIND: "ttft_target",
}  # fmt: skip
_OUTCOMES: Final = ("kept", "missed", "refused")
_LATE: Final = "due_time_passed"

FAMILIES: Final = (
    Family(f"{_PREFIX}_queue_pending_requests", "gauge", "Requests that wait for a worker, by policy class", _CLASS),
    Family(f"{_PREFIX}_queue_pending_isl_tokens", "gauge", "Their prompt tokens", _CLASS),
    Family(
        f"{_PREFIX}_queue_pending_cached_tokens", "gauge", "Of those, the tokens that some worker had cached", _CLASS
    ),
    Family(
        f"{_PREFIX}_queue_backpressure_total", "counter", "Requests refused with 529, by the limit of their class",
        (*_CLASS, "reason"),
    ),
    Family(f"{_PREFIX}_admission_received_total", "counter", "Requests that came to a queue, waiting or not", _CLASS),
    Family(
        f"{_PREFIX}_admission_rejected_total", "counter", "Requests whose deadline passed while they waited",
        (*_CLASS, "reason"),
    ),
    Family(
        f"{_PREFIX}_ttft_targets_total", "counter", "Requests with a target for their first token (`slo_ttft_ms`), by whether it was "
        "`kept`, `missed`, or could not be kept, so that the request was `refused`", (*_CLASS, "outcome"),
    ),
)  # fmt: skip


class QueueMetrics:
    """Counts what happens in the queue of one model and kind of worker."""

    __slots__ = ("_cached", "_isl", "_late", "_received", "_refused", "_requests", "_targets")

    def __init__(self, registry: MetricsRegistry, *, model: str, worker_type: str, classes: Iterable[str]) -> None:
        """`worker_type`: "decode" or "prefill"; workers that do both count as "decode"."""
        labels = {"model": model, "worker_type": worker_type}
        pending, isl, cached, refused, received, late, targets = FAMILIES
        names = tuple(classes)
        self._requests, self._isl, self._cached = (
            {name: gauges.labels(name) for name in names}
            for gauges in (family.gauges(registry, labels) for family in (pending, isl, cached))
        )
        self._received = {name: received.counters(registry, labels).labels(name) for name in names}
        refusals = refused.counters(registry, labels)
        self._refused = {
            (name, kind): refusals.labels(name, reason) for name in names for kind, reason in _REASONS.items()
        }
        aims = targets.counters(registry, labels)
        self._targets = {(name, outcome): aims.labels(name, outcome) for name in names for outcome in _OUTCOMES}
        self._late = {name: late.counters(registry, labels).labels(name, _LATE) for name in names}

    def received(self, policy_class: str) -> None:
        """Count a request that came to the queue."""
        self._received[policy_class].inc()

    def waiting(self, policy_class: str, requests: int, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Count so many requests more that wait, with their tokens; fewer, where the figures are negative."""
        self._requests[policy_class].inc(requests)
        self._isl[policy_class].inc(prompt_tokens)
        self._cached[policy_class].inc(cached_tokens)

    def refused(self, error: RouterQueueLimitExceeded) -> None:
        """Count a request that a limit of its class kept out."""
        self._refused[error.policy_class, error.limit_kind].inc()
        if error.limit_kind == TARGET_KIND:
            self._targets[error.policy_class, "refused"].inc()

    def first_token(self, policy_class: str, is_in_time: bool) -> None:
        """Count the first token of a request that has a target for it."""
        self._targets[policy_class, "kept" if is_in_time else "missed"].inc()

    def late(self, policy_class: str) -> None:
        """Count a request whose deadline passed while it waited."""
        self._late[policy_class].inc()
