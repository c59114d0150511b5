"""Events inside one process."""

from __future__ import annotations

import asyncio
import random
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from dynamo.runtime.calls.event_plane.base import (
    MAX_QUEUED,
    PUBLISHER_ID_BITS,
    Event,
    EventCounts,
    EventPublisher,
    EventScope,
    NoCounts,
)
from dynamo.runtime.calls.event_plane.inbox import Inbox
from dynamo.runtime.calls.event_plane.publisher import NumberedPublisher

Channel = tuple[EventScope, str]


class MemoryEventPlane:
    """`base.EventPlane` on one event loop; users of the same plane receive each other's events."""

    def __init__(
        self,
        *,
        rng: random.Random | None = None,
        wall: Callable[[], float] = time.time,
        max_queued: int = MAX_QUEUED,
        counts: EventCounts | None = None,
    ) -> None:
        self._rng: Final = rng or random.Random()
        self._wall = wall
        self._max_queued = max_queued
        self._counts: EventCounts = counts or NoCounts()
        self._queues: dict[Channel, set[Inbox]] = {}
        self._closed = False

    async def start(self) -> None:
        """Do nothing: there is nothing to connect to."""

    async def publisher(self, scope: EventScope, topic: str) -> EventPublisher:
        return self.new_publisher(scope, topic)

    def new_publisher(self, scope: EventScope, topic: str) -> EventPublisher:
        self._check_open()
        return _Publisher(self, (scope, topic), self._rng.getrandbits(PUBLISHER_ID_BITS))

    @asynccontextmanager
    async def subscribe(self, scope: EventScope, topic: str) -> AsyncIterator[AsyncIterator[Event]]:
        self._check_open()
        queue = Inbox(self._max_queued, self._counts)
        channel = (scope, topic)
        self._queues.setdefault(channel, set()).add(queue)
        try:
            yield queue
        finally:
            if (queues := self._queues.get(channel)) is not None:
                queues.discard(queue)
                if not queues:
                    del self._queues[channel]

    async def close(self) -> None:
        self._closed = True
        for queues in self._queues.values():
            for queue in queues:
                queue.close()
        self._queues.clear()

    def _send(self, channel: Channel, event: Event) -> None:
        self._counts.published(event.topic)
        for queue in self._queues.get(channel, ()):
            queue.put(event)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this event plane is closed")


_planes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, MemoryEventPlane] = weakref.WeakKeyDictionary()


def shared_event_plane(loop: asyncio.AbstractEventLoop) -> MemoryEventPlane:
    """Return the plane that runtimes on the same loop share."""
    plane = _planes.get(loop)
    if plane is None or plane._closed:
        plane = _planes[loop] = MemoryEventPlane()
    return plane


class _Publisher(NumberedPublisher):
    def __init__(self, plane: MemoryEventPlane, channel: Channel, publisher_id: int) -> None:
        super().__init__(channel[1], publisher_id, plane._wall)
        self._plane, self._channel = plane, channel

    def publish(self, payload: bytes) -> int:
        return super().publish(bytes(payload))  # the publisher's own buffer may be used again

    def _send(self, event: Event) -> None:
        self._plane._send(self._channel, event)

    async def _leave(self) -> None:
        """Do nothing: the plane keeps nothing of a publisher."""
