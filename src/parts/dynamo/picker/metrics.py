"""What the picker counts of its own work."""

from __future__ import annotations

from typing import Final

from dynamo.runtime.observe.metrics import Family, MetricsRegistry

CHOICE: Final = Family(
    "dynamo_picker_choice_seconds",
    "histogram",
    "From the last message of a request to its worker: reading, tokens, the choice, and the wait in the router's queue",
    buckets=(0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0),
)
REFUSED: Final = Family(
    "dynamo_picker_refused_total", "counter", "Requests that got an answer in place of a worker", ("status",)
)
STREAMS: Final = Family("dynamo_picker_streams", "gauge", "Streams of gateways that are open")
MOVED: Final = Family(
    "dynamo_picker_moved_total", "counter", "Requests that another worker served than the one that was chosen"
)
FAMILIES: Final = (CHOICE, REFUSED, MOVED, STREAMS)


class PickerMetrics:
    """The figures of one picker."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self.choice = CHOICE.histogram(registry)
        self.refused = REFUSED.counters(registry)
        self.moved = MOVED.counter(registry)
        self.streams = STREAMS.gauge(registry)
