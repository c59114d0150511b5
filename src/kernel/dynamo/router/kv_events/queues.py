"""KV events that wait: for the card of their worker, or for an answer about what was lost before them. Pure, and bounded."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from dynamo.kv.events import RouterEvent, blocks_of
from dynamo.kv.overlap import WorkerRank

MAX_EVENTS: Final = 1_024  # of one rank
MAX_BLOCKS: Final = 262_144  # in the events of all ranks, some 40 MB

GRACE_SECONDS: Final = 10.0  # how long the events of a rank wait for the card that names it
MAX_EARLY_RANKS: Final = 1_024
MAX_EARLY_BLOCKS: Final = 65_536


class Room:
    """The blocks that all queues together may hold."""

    __slots__ = ("left",)

    def __init__(self, blocks: int = MAX_BLOCKS) -> None:
        self.left = blocks


class EventQueue:
    """The events of one rank, in the order in which they came."""

    __slots__ = ("_events", "_room")

    def __init__(self, room: Room) -> None:
        self._events: deque[RouterEvent] = deque()
        self._room = room

    def __len__(self) -> int:
        return len(self._events)

    @property
    def first(self) -> RouterEvent | None:
        """The event that came first."""
        return self._events[0] if self._events else None

    def put(self, event: RouterEvent) -> bool:
        """Add an event behind the others; False: there is no room."""
        size = blocks_of(event)
        if len(self._events) >= MAX_EVENTS or size > self._room.left:
            return False
        self._room.left -= size
        self._events.append(event)
        return True

    def put_back(self, event: RouterEvent) -> None:
        """Add an event before the others, where it was taken from."""
        self._room.left -= blocks_of(event)
        self._events.appendleft(event)

    def take(self) -> RouterEvent:
        """Take the first event. Raises IndexError where there is none."""
        event = self._events.popleft()
        self._room.left += blocks_of(event)
        return event

    def clear(self) -> None:
        """Drop every event."""
        while self._events:
            self.take()


class EarlyEvents:
    """Events of ranks that no card names yet. They wait `GRACE_SECONDS` for it."""

    __slots__ = ("_queues", "_room")

    def __init__(self) -> None:
        self._room = Room(MAX_EARLY_BLOCKS)
        # The oldest first, and since when.
        self._queues: OrderedDict[WorkerRank, tuple[float, EventQueue]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queues)

    def put(self, rank: WorkerRank, event: RouterEvent, now: float) -> bool:
        """Keep an event for a while; False: there is no room for it."""
        while self._queues:
            oldest = next(iter(self._queues))
            if self._queues[oldest][0] > now - GRACE_SECONDS:
                break
            self.drop(oldest)
        found = self._queues.get(rank)
        if found is None:
            if len(self._queues) >= MAX_EARLY_RANKS:
                return False
            found = self._queues[rank] = (now, EventQueue(self._room))
        return found[1].put(event)

    def take(self, rank: WorkerRank) -> list[RouterEvent]:
        """Take the events of a rank."""
        found = self._queues.pop(rank, None)
        return [] if found is None else [found[1].take() for _ in range(len(found[1]))]

    def drop(self, rank: WorkerRank) -> None:
        """Drop the events of a rank."""
        self.take(rank)
