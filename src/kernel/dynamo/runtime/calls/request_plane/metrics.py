"""What the request plane counts: admission at the worker, calls, sockets, and what a listener refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynamo.runtime.observe.metrics import LATENCY_BUCKETS, Counter, Family, Gauge, Histogram, MetricsRegistry

_WAIT_BUCKETS: Final = (*LATENCY_BUCKETS, 10.0, 30.0, 60.0)

WORK_HANDLER: Final = {
    "engine_requests": Family("dynamo_engine_request", "gauge", "Requests in the engine now"),
    "queued_requests": Family("dynamo_request_queue", "gauge", "Requests waiting for a place in the engine"),
    "rejected_requests": Family(
        "dynamo_rejection_request_total", "counter", "Requests declined because engine and queue were full"
    ),
    "queue_depth": Family("dynamo_work_handler_queue_depth", "gauge", "The same as `dynamo_request_queue`"),
    "queue_capacity": Family("dynamo_work_handler_queue_capacity", "gauge", "Bound of the queue of requests"),
    "queue_age": Family(
        "dynamo_work_handler_queue_age_seconds", "gauge", "How long the first request of the queue has been waiting"
    ),
    "silence": Family(
        "dynamo_work_handler_silence_seconds",
        "gauge",
        "For how long no running request of the engine has had a token, although one had room for it; counted once a second",
    ),
    "longest_silence": Family(
        "dynamo_work_handler_longest_silence_seconds",
        "gauge",
        "How long the request that has been silent for longest had no token",
    ),
    "loop_lag": Family(
        "dynamo_work_handler_event_loop_lag_seconds",
        "gauge",
        "How late the event loop ran the timer of the silence count; 0 while nothing runs",
    ),
    "pool_active_tasks": Family(
        "dynamo_work_handler_pool_active_tasks", "gauge", "The same as `dynamo_engine_request`"
    ),
    "pool_capacity": Family("dynamo_work_handler_pool_capacity", "gauge", "Bound of requests in the engine"),
    "enqueue_rejected": Family(
        "dynamo_work_handler_enqueue_rejected_total", "counter", "The same as `dynamo_rejection_request_total`"
    ),
    "permit_wait_seconds": Family(
        "dynamo_work_handler_permit_wait_seconds",
        "histogram",
        "Seconds from arrival until a handler's task ran: the wait for a place and for the loop",
        buckets=_WAIT_BUCKETS,
    ),
    "network_transit_seconds": Family(
        "dynamo_work_handler_network_transit_seconds",
        "histogram",
        "Seconds from the caller's send to arrival. Not filled",
        buckets=_WAIT_BUCKETS,
    ),
    "time_to_first_response_seconds": Family(
        "dynamo_work_handler_time_to_first_response_seconds",
        "histogram",
        "Seconds from arrival until the first response item left, over `mux`",
        buckets=_WAIT_BUCKETS,
    ),
}
CALLER: Final = {
    "queue_seconds": Family(
        "dynamo_request_plane_queue_seconds",
        "histogram",
        "Seconds a request waited for a connection to its worker; 0 where there was one",
        buckets=LATENCY_BUCKETS,
    ),
    "send_seconds": Family(
        "dynamo_request_plane_send_seconds",
        "histogram",
        "Seconds to encode a request and hand it to its connection, with the wait for one",
        buckets=LATENCY_BUCKETS,
    ),
    "roundtrip_ttft_seconds": Family(
        "dynamo_request_plane_roundtrip_ttft_seconds", "histogram", "Seconds from sending a request to its first item"
    ),
    "inflight_requests": Family(
        "dynamo_request_plane_inflight_requests",
        "gauge",
        "Requests this process sent to workers and that have not ended",
    ),
    "quarantined_instances": Family(
        "dynamo_request_plane_quarantined_instances",
        "gauge",
        "Instances that are left out after a failure, or have not answered since ([quarantine](migration.md#quarantine))",
    ),
    "quarantines": Family(
        "dynamo_request_plane_quarantines_total", "counter", "How often an instance was put in quarantine"
    ),
    "probes": Family(
        "dynamo_request_plane_probes_total",
        "counter",
        "Requests that tried an instance whose time in quarantine was over",
    ),
}

REFUSALS: Final = {
    "tcp": Family(
        "dynamo_transport_tcp_refusals_total",
        "counter",
        "Requests and connections that a limit of the request listener declined or cut; see [limits](settings.md#limits-of-the-listeners)",
        ("limit",),
    ),
    "system": Family(
        "dynamo_system_refusals_total",
        "counter",
        "Requests and connections that a limit of the status server declined or cut",
        ("limit",),
    ),
}


class WorkHandlerMetrics:
    """The worker's side of the transport: admission and the time a request spent on its way. One per process."""

    __slots__ = tuple(WORK_HANDLER)

    engine_requests: Gauge
    enqueue_rejected: Counter
    longest_silence: Gauge
    loop_lag: Gauge
    network_transit_seconds: Histogram
    permit_wait_seconds: Histogram
    pool_active_tasks: Gauge
    pool_capacity: Gauge
    queue_age: Gauge
    queue_capacity: Gauge
    queue_depth: Gauge
    queued_requests: Gauge
    rejected_requests: Counter
    silence: Gauge
    time_to_first_response_seconds: Histogram

    def __init__(self, registry: MetricsRegistry) -> None:
        _bind(self, WORK_HANDLER, registry)


class CallerMetrics:
    """The caller's side of the request plane. One per process."""

    __slots__ = tuple(CALLER)

    inflight_requests: Gauge
    probes: Counter
    quarantined_instances: Gauge
    quarantines: Counter
    queue_seconds: Histogram
    roundtrip_ttft_seconds: Histogram
    send_seconds: Histogram

    def __init__(self, registry: MetricsRegistry) -> None:
        _bind(self, CALLER, registry)


class RefusalMetrics:
    """What one listener declined or cut, by the limit that was hit. One per listener."""

    __slots__ = ("_counters",)

    def __init__(self, registry: MetricsRegistry, family: Family, limits: Sequence[str]) -> None:
        vector = family.counters(registry)
        self._counters = {limit: vector.labels(limit) for limit in limits}

    def count(self, limit: str) -> None:
        """Count one refusal; `limit` is one of those given at the start."""
        self._counters[limit].inc()


def _bind(holder: object, families: dict[str, Family], registry: MetricsRegistry) -> None:
    """Set each family's series as the attribute of its key."""
    for attribute, family in families.items():
        match family.kind:
            case "counter":
                setattr(holder, attribute, family.counter(registry))
            case "gauge":
                setattr(holder, attribute, family.gauge(registry))
            case "histogram":
                setattr(holder, attribute, family.histogram(registry))
