"""Events inside one process."""

from __future__ import annotations

import asyncio
import random
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from dynamo.runtime.event_plane.base import (
    MAX_QUEUED,
    PUBLISHER_ID_BITS,
    Event,
    EventPublisher,
    Scope,
    SequenceWatch,
)

Channel = tuple[Scope, str]


class MemoryEventPlane:
    """`base.EventPlane` on one event loop; whoever holds the same plane hears each other."""

    def __init__(
        self,
        *,
        rng: random.Random | None = None,
        wall: Callable[[], float] = time.time,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._rng: Final = rng or random.Random()
        self._wall = wall
        self._max_queued = max_queued
        self._queues: dict[Channel, set[_Queue]] = {}
        self._closed = False

    async def publisher(self, scope: Scope, topic: str) -> EventPublisher:
        return self.new_publisher(scope, topic)

    def new_publisher(self, scope: Scope, topic: str) -> EventPublisher:
        """`publisher` without the waiting that other planes need."""
        self._check_open()
        return _Publisher(self, (scope, topic), self._rng.getrandbits(PUBLISHER_ID_BITS))

    @asynccontextmanager
    async def subscribe(self, scope: Scope, topic: str) -> AsyncIterator[AsyncIterator[Event]]:
        self._check_open()
        queue = _Queue(self._max_queued)
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

    def _send(self, channel: Channel, publisher_id: int, sequence: int, payload: bytes) -> None:
        event = Event(channel[1], publisher_id, sequence, int(self._wall() * 1000), payload)
        for queue in self._queues.get(channel, ()):
            queue.put(event)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this event plane is closed")


_planes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, MemoryEventPlane] = weakref.WeakKeyDictionary()


def shared_event_plane(loop: asyncio.AbstractEventLoop) -> MemoryEventPlane:
    """The plane that runtimes on the same loop share."""
    plane = _planes.get(loop)
    if plane is None or plane._closed:
        plane = _planes[loop] = MemoryEventPlane()
    return plane


class _Publisher:
    def __init__(self, plane: MemoryEventPlane, channel: Channel, publisher_id: int) -> None:
        self._plane = plane
        self._channel = channel
        self._sequence = 0
        self._closed = False
        self.publisher_id = publisher_id

    def publish(self, payload: bytes) -> int:
        if self._closed:
            raise RuntimeError("this publisher is closed")
        sequence = self._sequence
        self._sequence += 1
        self._plane._send(self._channel, self.publisher_id, sequence, bytes(payload))
        return sequence

    async def close(self) -> None:
        self._closed = True


class _Queue:
    """What a subscriber has not read yet; when it is full, new messages are dropped and show as a gap."""

    def __init__(self, max_queued: int) -> None:
        self._events: deque[Event] = deque()
        self._max = max_queued
        self._watch = SequenceWatch()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, event: Event) -> None:
        if len(self._events) < self._max:
            self._events.append(event)
            self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def __aiter__(self) -> _Queue:
        return self

    async def __anext__(self) -> Event:
        while True:
            while self._events:
                event = self._events.popleft()
                missed = self._watch.admit(event.publisher_id, event.sequence)
                if missed is not None:
                    return replace(event, missed=missed) if missed else event
            if self._closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
