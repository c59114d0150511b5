"""Event planes for tests: each kind as several processes would have it, and a ZMQ broker in a thread."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import zmq

from dynamo.runtime.base.settings import EventPlaneSettings, NatsSettings, ZmqBroker
from dynamo.runtime.calls.event_plane.base import Event, EventCounts, EventPlane, EventPublisher, NoCounts
from dynamo.runtime.calls.event_plane.memory import MemoryEventPlane
from dynamo.runtime.calls.event_plane.nats import NatsEventPlane
from dynamo.runtime.calls.event_plane.zmq import ZmqEventPlane
from dynamo.runtime.calls.nats_connection import NatsConnection
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryHub
from support.patience import PATIENCE_SECONDS

KINDS = ("mem", "zmq", "zmq broker", "nats")
WALL = 1_700_000_000.5


class Counted(NoCounts):
    """Counts by name of the event."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def _add(self, name: str, amount: int = 1) -> None:
        self.found[name] = self.found.get(name, 0) + amount

    def published(self, topic: str) -> None:
        self._add("published")

    def dropped(self, topic: str) -> None:
        self._add("dropped")

    def received(self, topic: str, missed: int) -> None:
        self._add("received")
        self._add("missed", missed)

    def overflowed(self, topic: str) -> None:
        self._add("overflowed")

    def invalid(self, topic: str) -> None:
        self._add("invalid")


class World:
    """One store, and planes of one kind that meet in it."""

    def __init__(self, kind: str, *, nats_url: str = "", broker: ZmqBroker | None = None) -> None:
        self.kind = kind
        self.hub = MemoryHub()
        self._nats_url = nats_url
        self._broker = broker
        self._memory: MemoryEventPlane | None = None
        self._stack = AsyncExitStack()

    async def plane(self, *, capacity: int = 1000, counts: EventCounts | None = None) -> EventPlane:
        """The plane of one more process, started."""
        plane: EventPlane
        discovery = MemoryDiscovery(self.hub)
        await discovery.start()
        self._stack.push_async_callback(discovery.close)
        if self.kind == "mem":
            if self._memory is None:
                self._memory = MemoryEventPlane(
                    rng=random.Random(1), wall=lambda: WALL, max_queued=capacity, counts=counts
                )
            plane = self._memory
        elif self.kind == "nats":
            connection = NatsConnection(NatsSettings(servers=(self._nats_url,)), wanted_by="--event-plane nats")
            self._stack.push_async_callback(connection.close)
            plane = NatsEventPlane(discovery, connection, wall=lambda: WALL, capacity=capacity, counts=counts)
        else:
            settings = EventPlaneSettings(host="127.0.0.1", subscriber_capacity=capacity, broker=self._broker)
            plane = ZmqEventPlane(discovery, settings, wall=lambda: WALL, counts=counts)
        self._stack.push_async_callback(plane.close)
        await plane.start()
        return plane

    async def aclose(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def world(kind: str, nats_url: str = "") -> AsyncIterator[World]:
    if kind == "zmq broker":
        with zmq_broker() as broker:
            made = World(kind, broker=broker)
            try:
                yield made
            finally:
                await made.aclose()
        return
    made = World(kind, nats_url=nats_url)
    try:
        yield made
    finally:
        await made.aclose()


@contextmanager
def zmq_broker() -> Iterator[ZmqBroker]:
    """XSUB and XPUB, joined by a thread."""
    context = zmq.Context()
    xsub, xpub = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (xsub, xpub)]

    def run() -> None:
        try:
            zmq.proxy(xsub, xpub)
        except zmq.ContextTerminated:
            pass  # this is how it is told to end
        finally:
            xsub.close(linger=0)
            xpub.close(linger=0)

    thread = threading.Thread(target=run, name="zmq broker")
    thread.start()
    try:
        yield ZmqBroker((f"tcp://127.0.0.1:{ports[0]}",), (f"tcp://127.0.0.1:{ports[1]}",))
    finally:
        context.term()
        thread.join()


async def heard(publisher: EventPublisher, events: AsyncIterator[Event]) -> Event:
    """Publish until the subscriber hears the newest message (a connection takes a moment); afterwards nothing is unread."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            newest = publisher.publish(b"hello")
            try:
                async with asyncio.timeout(0.1):
                    while (event := await anext(events)).sequence < newest:
                        pass
            except TimeoutError:
                continue  # not connected yet, or this very message was dropped
            return event
