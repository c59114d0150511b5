"""What every event plane promises: messages by scope and topic, at most once, with gaps that show.

Promises, held by one set of contract tests over all planes:

* A publisher numbers its messages from 0. A subscriber gets each message at most once and in the publisher's order.
* What was lost (a full queue, a lost connection) shows as `missed` on the next message of that publisher. It is up to the
  reader to repair it, with a snapshot from wherever the truth is.
* Publishing never blocks and never fails for lack of readers. A slow reader loses messages; it does not delay others.
* A subscriber receives from the publishers there are and those that come later; what was published before is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, Literal, Protocol
from urllib.parse import quote

from msgspec import Struct

from dynamo.runtime.observe.metrics import Counter, Family, MetricsRegistry

MAX_QUEUED: Final = 100_000  # messages of one subscriber (DYN_ZMQ_EVENT_SUBSCRIBER_CHANNEL_CAPACITY)
MAX_PUBLISHERS: Final = 100_000  # whose sequence a subscriber keeps; the one that is silent for longest goes first
PUBLISHER_ID_BITS: Final = 53  # safe in JSON


@dataclass(frozen=True, slots=True)
class EventScope:
    """Whose events: a namespace's, a component's or an endpoint's."""

    namespace: str
    component: str | None = None
    endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.endpoint is not None and self.component is None:
            raise ValueError("an endpoint's scope names its component, too")

    @property
    def kind(self) -> Literal["namespace", "component", "endpoint"]:
        if self.endpoint is not None:
            return "endpoint"
        return "namespace" if self.component is None else "component"

    @property
    def path(self) -> str:
        """As in keys: `namespace/ns/component/c/endpoint/e`."""
        return "/".join(self._parts())

    @property
    def path_encoded(self) -> str:
        """The path with its segments percent-encoded, as in the two event buckets."""
        return "/".join(encode_segment(part) for part in self._parts())

    @property
    def subject(self) -> str:
        """As in subjects: `namespace.ns.component.c.endpoint.e`."""
        return ".".join(self._parts())

    def to_json(self) -> dict[str, object]:
        """Encode the scope as in records."""
        match self.kind:
            case "namespace":
                return {"kind": "namespace", "name": self.namespace}
            case "component":
                return {"kind": "component", "namespace": self.namespace, "component": self.component}
            case "endpoint":
                endpoint = {"namespace": self.namespace, "component": self.component, "name": self.endpoint}
                return {"kind": "endpoint", "endpoint": endpoint}

    def channel_key(self, topic: str, publisher_id: int) -> str:
        """Return the key inside `v1/event_channels` and `v1/event_sources`: segments percent-encoded."""
        parts = [*self._parts(), "topic", topic, f"{publisher_id:x}"]
        return "/".join(encode_segment(part) for part in parts)

    def _parts(self) -> list[str]:
        parts = ["namespace", self.namespace]
        if self.component is not None:
            parts += ["component", self.component]
        if self.endpoint is not None:
            parts += ["endpoint", self.endpoint]
        return parts


def encode_segment(text: str) -> str:
    """Encode a segment: percent-encode everything but ASCII letters, digits, `_` and `-`."""
    return quote(text, safe="").replace(".", "%2E").replace("~", "%7E")


class Event(Struct, frozen=True):
    """One message as a subscriber gets it."""

    topic: str
    publisher_id: int
    sequence: int
    published_at_ms: int  # unix time
    payload: bytes  # msgpack
    missed: int = 0  # messages of this publisher that were lost right before this one


class EventPublisher(Protocol):
    """Publishes under one scope and topic. Not thread-safe."""

    @property
    def publisher_id(self) -> int: ...

    def publish(self, payload: bytes) -> int:
        """Send one message and return its sequence number. Never blocks."""

    async def close(self) -> None:
        """Leave; idempotent."""


class EventPlane(Protocol):
    """A way for events to travel."""

    async def start(self) -> None:
        """Reach the service the plane needs; idempotent. Raises `CannotConnect` within 5 s, naming address and flag."""

    async def publisher(self, scope: EventScope, topic: str) -> EventPublisher:
        """Make a publisher with an id and a sequence of its own; subscribers can find the publisher."""

    def new_publisher(self, scope: EventScope, topic: str) -> EventPublisher:
        """Make a publisher without waiting: it becomes known in the background."""

    def subscribe(self, scope: EventScope, topic: str) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Subscribe: `async with plane.subscribe(s, t) as events: async for event in events: ...`"""

    async def close(self) -> None:
        """Close every publisher and subscription; idempotent."""


class EventCounts(Protocol):
    """What a plane counts, by topic; every method is called once per message."""

    def published(self, topic: str) -> None:
        """Count a message handed to the transport."""

    def dropped(self, topic: str) -> None:
        """Count a message that was not sent: the outgoing queue is full, or the transport refused the message."""

    def received(self, topic: str, missed: int) -> None:
        """Count a message that a subscriber read; `missed` messages before it were lost."""

    def overflowed(self, topic: str) -> None:
        """Count a message that was dropped because its subscriber was too slow."""

    def invalid(self, topic: str) -> None:
        """Count a message that is not a valid event of this topic."""


class NoCounts:
    """Counts nothing."""

    def published(self, topic: str) -> None: ...

    def dropped(self, topic: str) -> None: ...

    def received(self, topic: str, missed: int) -> None: ...

    def overflowed(self, topic: str) -> None: ...

    def invalid(self, topic: str) -> None: ...


class SequenceWatch:
    """Judges each publisher's sequence numbers: is a message new, and how many are missing before it."""

    def __init__(self, max_publishers: int = MAX_PUBLISHERS) -> None:
        self._next: OrderedDict[int, int] = OrderedDict()
        self._max = max_publishers

    def admit(self, publisher_id: int, sequence: int) -> int | None:
        """Return how many messages are missing before this one; None when it is old, or came twice.

        The first message of a publisher is never a gap: how many there were before the subscription is unknown.
        """
        expected = self._next.get(publisher_id)
        if expected is not None and sequence < expected:
            return None
        self._next[publisher_id] = sequence + 1
        self._next.move_to_end(publisher_id)
        if len(self._next) > self._max:
            self._next.popitem(last=False)
        return 0 if expected is None else sequence - expected


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
