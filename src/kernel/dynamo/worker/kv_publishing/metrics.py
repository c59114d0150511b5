"""What becomes of the KV events that engines publish on their own ZMQ sockets."""

from __future__ import annotations

from typing import Final

from dynamo.runtime.observe.metrics import Family, MetricsRegistry

EVENTS: Final = Family("dynamo_component_kv_publisher_zmq_events_total", "counter", "KV events read from engines")
FILTERED: Final = Family(
    "dynamo_component_kv_publisher_zmq_filtered_events_total",
    "counter",
    "KV events left out: not of this worker's own main cache, or of an unknown medium",
)
ISSUES: Final = Family(
    "dynamo_component_kv_publisher_zmq_conversion_issues_total",
    "counter",
    "Messages and KV events of engines that cannot be read",
)
SUSPICIOUS: Final = Family(
    "dynamo_component_kv_publisher_zmq_suspicious_events_total",
    "counter",
    "KV events whose blocks contradict each other; published as empty removals",
)
ENGINE_DROPS: Final = Family(
    "dynamo_component_kv_publisher_engines_dropped_events_total",
    "counter",
    "Messages of engines that were lost on their way to the worker",
)
FAMILIES: Final = (EVENTS, FILTERED, ISSUES, SUSPICIOUS, ENGINE_DROPS)


class KvPublisherMetrics:
    """What becomes of the KV events that engines publish on their own ZMQ sockets. One per process."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self.events, self.filtered = EVENTS.counter(registry), FILTERED.counter(registry)
        self.issues, self.suspicious = ISSUES.counter(registry), SUSPICIOUS.counter(registry)
        self.engine_drops = ENGINE_DROPS.counter(registry)
