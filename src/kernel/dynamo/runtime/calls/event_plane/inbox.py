"""What a subscriber has not read yet; shared by every plane."""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from dynamo.runtime.base.tasks import OneWaiter
from dynamo.runtime.calls.event_plane.base import Event, EventCounts, SequenceWatch


class Inbox:
    """An async iterator over events, with a bound: when it is full, new ones are dropped and show as a gap.

    Use it on one event loop.
    """

    def __init__(self, capacity: int, counts: EventCounts) -> None:
        self._events: deque[Event] = deque()
        self._capacity = capacity
        self._counts = counts
        self._watch = SequenceWatch()
        self._waiter = OneWaiter()
        self._closed = False

    def put(self, event: Event) -> None:
        """Take one event, or drop it."""
        if len(self._events) < self._capacity:
            self._events.append(event)
            self._waiter.wake()
        else:
            self._counts.overflowed(event.topic)

    def close(self) -> None:
        """End the iteration once everything that came was read."""
        self._closed = True
        self._waiter.wake()

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Event:
        while True:
            while self._events:
                event = self._events.popleft()
                missed = self._watch.admit(event.publisher_id, event.sequence)
                if missed is None:
                    continue
                self._counts.received(event.topic, missed)
                return replace(event, missed=missed) if missed else event
            if self._closed:
                raise StopAsyncIteration
            await self._waiter.wait()
