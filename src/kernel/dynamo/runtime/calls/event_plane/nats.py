"""Events over core NATS: the envelope is the message, the scope and topic are the subject.

Publishing puts a message into a queue of the process, which one task empties while there is a server. A server that is gone
or stalls fills the queue; what no longer fits is dropped and counted, and shows as a gap.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from dynamo.errors import CannotConnect
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.event_plane.announcing import Announcer
from dynamo.runtime.calls.event_plane.base import (
    MAX_QUEUED,
    PUBLISHER_ID_BITS,
    Event,
    EventCounts,
    EventPublisher,
    EventScope,
    NoCounts,
)
from dynamo.runtime.calls.event_plane.envelope import BadEvent, channel_record, decode_envelope, encode_envelope
from dynamo.runtime.calls.event_plane.inbox import Inbox
from dynamo.runtime.calls.event_plane.publisher import NumberedPublisher, PublisherSources
from dynamo.runtime.calls.nats_connection import NatsConnection
from dynamo.runtime.discovery.base import Discovery

logger = logging.getLogger(__name__)

MAX_OUTBOX_MESSAGES: Final = 10_000
MAX_OUTBOX_BYTES: Final = 64 * 1024 * 1024
UNSENT_BYTES: Final = 1024 * 1024  # what the client may hold before we wait for the server to take it
FLUSH_SECONDS: Final = 5
SUBSCRIBE_SECONDS: Final = 5
MAX_UNREAD_MESSAGES: Final = 65_536  # between the socket and the inbox, in one turn of the loop
MAX_UNREAD_BYTES: Final = 256 * 1024 * 1024  # of one subscription; more is lost and shows as a gap
BURST: Final = 64  # messages sent before others on the loop get a turn


class NatsEventPlane:
    """`base.EventPlane` over core NATS. Use it on one event loop."""

    def __init__(
        self,
        discovery: Discovery,
        connection: NatsConnection,
        *,
        counts: EventCounts | None = None,
        rng: random.Random | None = None,
        wall: Callable[[], float] = time.time,
        capacity: int = MAX_QUEUED,
        max_outbox: int = MAX_OUTBOX_MESSAGES,
    ) -> None:
        """`connection` may be shared; the code that made it closes it."""
        self._connection = connection
        self._counts: EventCounts = counts or NoCounts()
        self._sources = PublisherSources(rng or random.Random(), wall)
        self._capacity = capacity
        self._announcer = Announcer(discovery)
        self.outbox = _Outbox(connection, self._counts, max_outbox)
        self._publishers: set[_Publisher] = set()
        self._inboxes: set[Inbox] = set()
        self._closed = False

    async def start(self) -> None:
        await self._connection.start()

    async def publisher(self, scope: EventScope, topic: str) -> EventPublisher:
        await self.start()
        made = self._publisher(scope, topic)
        await asyncio.shield(made.announced)
        return made

    def new_publisher(self, scope: EventScope, topic: str) -> EventPublisher:
        return self._publisher(scope, topic)

    def _publisher(self, scope: EventScope, topic: str) -> _Publisher:
        self._check_open()
        publisher_id = self._sources.rng.getrandbits(PUBLISHER_ID_BITS)
        transport = {"kind": "Nats", "config": {"subject_prefix": scope.subject}}
        key = scope.channel_key(topic, publisher_id)
        # For presence only: a subscription to the subject receives from every publisher.
        announced = self._announcer.announce(key, channel_record(scope, topic, publisher_id, transport))
        made = _Publisher(self, scope, topic, publisher_id, key, announced)
        self._publishers.add(made)
        return made

    @asynccontextmanager
    async def subscribe(self, scope: EventScope, topic: str) -> AsyncIterator[AsyncIterator[Event]]:
        self._check_open()
        await self.start()
        inbox = Inbox(self._capacity, self._counts)

        async def take(message: Any) -> None:
            try:
                event = decode_envelope(message.data)
            except BadEvent as error:
                self._counts.invalid(topic)
                logger.debug("a message of topic %s is no event: %s", topic, error)
                return
            if event.topic == topic:
                inbox.put(event)
            else:
                self._counts.invalid(topic)

        client = self._connection.client
        subscription = await client.subscribe(
            subject_of(scope, topic),
            cb=take,
            pending_msgs_limit=MAX_UNREAD_MESSAGES,
            pending_bytes_limit=MAX_UNREAD_BYTES,
        )
        self._inboxes.add(inbox)
        try:
            if self._connection.is_connected:  # what is published from here on is received
                await client.flush(SUBSCRIBE_SECONDS)
            yield inbox
        finally:
            self._inboxes.discard(inbox)
            inbox.close()
            if not client.is_closed:
                await subscription.unsubscribe()

    async def close(self) -> None:
        self._closed = True
        for publisher in list(self._publishers):
            await publisher.close()
        await self._announcer.close()
        for inbox in self._inboxes:
            inbox.close()
        await self.outbox.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this event plane is closed")


class _Outbox:
    """Events on their way to the server: bounded in count and bytes, sent by one task in their order."""

    def __init__(self, connection: NatsConnection, counts: EventCounts, max_events: int) -> None:
        self._connection, self._counts, self._max_events = connection, counts, max_events
        self._events: deque[tuple[str, str, bytes]] = deque()  # subject, topic, envelope
        self._bytes = 0
        self._waiting = asyncio.Event()
        self._work = Background()

    def put(self, subject: str, topic: str, envelope: bytes) -> None:
        """Send an event as soon as there is a server, or count it as dropped where there is no room."""
        if len(self._events) >= self._max_events or self._bytes + len(envelope) > MAX_OUTBOX_BYTES:
            self._counts.dropped(topic)
            return
        self._events.append((subject, topic, envelope))
        self._bytes += len(envelope)
        self._waiting.set()
        if not self._work:
            self._work.keep(self._send_all, "event plane: nats sender")

    async def _send_all(self) -> None:
        while True:
            await self._waiting.wait()
            await self._connection.wait_connected()
            for _ in range(min(BURST, len(self._events))):
                subject, topic, envelope = self._events.popleft()
                self._bytes -= len(envelope)
                await self._send(subject, topic, envelope)
            if not self._events:
                self._waiting.clear()
            else:
                await asyncio.sleep(0)

    async def _send(self, subject: str, topic: str, envelope: bytes) -> None:
        try:
            client = self._connection.client
            await client.publish(subject, envelope)
            self._counts.published(topic)
            if client.pending_data_size > UNSENT_BYTES:
                await client.flush(FLUSH_SECONDS)
        except CannotConnect:
            self._counts.dropped(topic)  # the connection is being closed
        except Exception as error:  # too large, or the server went this very moment: the next one may get through
            self._counts.dropped(topic)
            logger.debug("an event of %s was not sent: %s: %s", topic, type(error).__name__, error)

    async def close(self) -> None:
        """Stop sending; what is left is dropped."""
        await self._work.close()
        self._events.clear()


class _Publisher(NumberedPublisher):
    def __init__(
        self,
        plane: NatsEventPlane,
        scope: EventScope,
        topic: str,
        publisher_id: int,
        key: str,
        announced: asyncio.Task[None],
    ) -> None:
        super().__init__(topic, publisher_id, plane._sources.wall)
        self.announced = announced
        self._plane = plane
        self._subject = subject_of(scope, topic)
        self._key = key

    def _send(self, event: Event) -> None:
        self._plane.outbox.put(self._subject, event.topic, encode_envelope(event))

    async def _leave(self) -> None:
        self._plane._publishers.discard(self)
        await self._plane._announcer.withdraw(self._key)


def subject_of(scope: EventScope, topic: str) -> str:
    """Return the NATS subject. Anything a subject cannot hold (blanks, wildcards, an empty token) becomes `_`."""
    parts = [*scope.subject.split("."), *topic.split(".")]
    return ".".join("".join("_" if c.isspace() or c in "*>" else c for c in part) or "_" for part in parts)
