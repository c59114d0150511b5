"""What the publishers of every plane share: numbers without a gap, and an end that comes once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from dynamo.runtime.calls.event_plane.base import Event


class PublisherSources(NamedTuple):
    """What a plane gives its publishers: ids that no other publisher has, and the time."""

    rng: random.Random
    wall: Callable[[], float]  # unix time in seconds


class NumberedPublisher:
    """The base of a publisher; a plane adds how an event is sent, and what is taken back at the end."""

    def __init__(self, topic: str, publisher_id: int, wall: Callable[[], float]) -> None:
        """`wall`: unix time in seconds."""
        self.publisher_id = publisher_id
        self._topic, self._wall = topic, wall
        self._sequence = 0
        self._closed = False

    def publish(self, payload: bytes) -> int:
        """Send one message and return its sequence number. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("this publisher is closed")
        sequence = self._sequence
        self._sequence += 1
        self._send(Event(self._topic, self.publisher_id, sequence, int(self._wall() * 1000), payload))
        return sequence

    async def close(self) -> None:
        """Leave; idempotent."""
        if not self._closed:
            self._closed = True
            await self._leave()

    def _send(self, event: Event) -> None:
        """Hand an event to the transport, without waiting for it."""
        raise NotImplementedError

    async def _leave(self) -> None:
        """Take back what the plane keeps of this publisher."""
        raise NotImplementedError
