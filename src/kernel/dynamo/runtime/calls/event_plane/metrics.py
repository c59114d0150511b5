"""What the event plane of a process counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dynamo.runtime.observe.metrics import Counter, Family, MetricsRegistry

PUBLISHED: Final = Family("dynamo_event_plane_published_total", "counter", "Events handed to the transport", ("topic",))
DROPPED: Final = Family(
    "dynamo_event_plane_publish_dropped_total",
    "counter",
    "Events that were not sent: the outgoing queue was full, or one was too large",
    ("topic",),
)
RECEIVED: Final = Family("dynamo_event_plane_received_total", "counter", "Events that a subscriber read", ("topic",))
MISSED: Final = Family(
    "dynamo_event_plane_missed_total",
    "counter",
    "Events lost on their way, seen as gaps in a publisher's numbers",
    ("topic",),
)
OVERFLOWED: Final = Family(
    "dynamo_event_plane_receive_dropped_total", "counter", "Events that a slow subscriber had no room for", ("topic",)
)
INVALID: Final = Family(
    "dynamo_event_plane_invalid_total", "counter", "Messages that are not valid events of their topic", ("topic",)
)
FAMILIES: Final = (PUBLISHED, DROPPED, RECEIVED, MISSED, OVERFLOWED, INVALID)


class EventPlaneMetrics:
    """What the event plane of a process counts, by topic; `event_plane.EventCounts`. One per process."""

    def __init__(self, registry: MetricsRegistry) -> None:
        def counter(family: Family) -> Callable[[str], Counter]:
            return family.counters(registry).labels

        self._published, self._dropped = counter(PUBLISHED), counter(DROPPED)
        self._received, self._missed = counter(RECEIVED), counter(MISSED)
        self._overflowed, self._invalid = counter(OVERFLOWED), counter(INVALID)

    def published(self, topic: str) -> None:
        self._published(topic).inc()

    def dropped(self, topic: str) -> None:
        self._dropped(topic).inc()

    def received(self, topic: str, missed: int) -> None:
        self._received(topic).inc()
        if missed:
            self._missed(topic).inc(missed)

    def overflowed(self, topic: str) -> None:
        self._overflowed(topic).inc()

    def invalid(self, topic: str) -> None:
        self._invalid(topic).inc()
