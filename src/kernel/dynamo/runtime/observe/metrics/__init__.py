"""Metrics of a process: a registry, families as tables, and their text. Each set of metrics lives next to what it counts."""

from dynamo.runtime.observe.metrics.exposition import CONTENT_TYPE, TypedFamily, escape_label, sanitize
from dynamo.runtime.observe.metrics.family import Family
from dynamo.runtime.observe.metrics.registry import (
    DURATION_BUCKETS,
    LATENCY_BUCKETS,
    MAX_SERIES,
    Counter,
    Gauge,
    Histogram,
    MetricsRegistry,
    TooManySeries,
    Vector,
    add_each,
    count_down,
    count_over,
    count_up,
    observe_each,
    set_each,
)

__all__ = [
    "CONTENT_TYPE",
    "DURATION_BUCKETS",
    "LATENCY_BUCKETS",
    "MAX_SERIES",
    "Counter",
    "Family",
    "Gauge",
    "Histogram",
    "MetricsRegistry",
    "TooManySeries",
    "TypedFamily",
    "Vector",
    "add_each",
    "count_down",
    "count_over",
    "count_up",
    "escape_label",
    "observe_each",
    "sanitize",
    "set_each",
]
