"""Events over ZeroMQ: without a broker, publishers found through discovery; or through one, where one is configured.

Without a broker every publisher binds a PUB socket and puts its address in a channel record; a subscriber watches the records of
its scope and topic and connects to those it finds. With one, publishers and subscribers connect to the broker and no peer is
recorded. Sockets are driven from the event loop by their file descriptor: nothing polls.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from dynamo.errors import CannotConnect
from dynamo.runtime.base.addresses import detect_host
from dynamo.runtime.base.forever import forever
from dynamo.runtime.base.settings import EventPlaneSettings, ZmqBroker
from dynamo.runtime.calls.event_plane.announcing import Announcer
from dynamo.runtime.calls.event_plane.base import (
    PUBLISHER_ID_BITS,
    Event,
    EventCounts,
    EventPublisher,
    EventScope,
    NoCounts,
    encode_segment,
)
from dynamo.runtime.calls.event_plane.envelope import (
    BadEvent,
    channel_record,
    decode_parts,
    encode_parts,
    zmq_broker,
    zmq_endpoint,
)
from dynamo.runtime.calls.event_plane.inbox import Inbox
from dynamo.runtime.calls.event_plane.publisher import NumberedPublisher, PublisherSources
from dynamo.runtime.discovery.base import EVENT_CHANNELS, Delete, Discovery, Put
from dynamo.runtime.discovery.follow import follow

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

SEND_QUEUE: Final = 10_000
"""Messages that wait inside a PUB socket for one subscriber that does not read; further ones are lost to it, which it sees
as a gap. The native figure is 100,000: with KV events of some kilobytes a subscriber that hangs could take a gigabyte."""
RECEIVE_QUEUE: Final = 100_000  # a bound of the same kind on the other side, before the inbox
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024  # a peer that announces more is disconnected
# `zmq.POLLIN`, `NOBLOCK` and `SNDMORE`, without the price of its enumerations
_READABLE: Final = 1
_NO_WAIT: Final = 1
_MORE: Final = 2
BURST: Final = 256  # messages read before others on the loop get a turn
CONNECTED_AT_ONCE: Final = 64  # publishers, which take 1 to 2 ms
RECONNECT_MS: Final = 100
RECONNECT_MAX_MS: Final = 2_000
PROBE_SECONDS: Final = 4.0
LOOPBACK: Final = ("127.", "localhost", "::1")


class ZmqEventPlane:
    """`base.EventPlane` over ZeroMQ. Use it on one event loop."""

    def __init__(
        self,
        discovery: Discovery,
        settings: EventPlaneSettings | None = None,
        *,
        counts: EventCounts | None = None,
        rng: random.Random | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings or EventPlaneSettings()
        self._broker = self._settings.broker
        self._counts: EventCounts = counts or NoCounts()
        self._sources = PublisherSources(rng or random.Random(), wall)
        self._announcer = Announcer(discovery)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._publishers: set[_Publisher] = set()
        self._inboxes: set[Inbox] = set()
        self._closed = False

    async def start(self) -> None:
        """Connect to the broker, if there is one. Raises CannotConnect when the broker does not answer."""
        if self._broker is None and self._settings.broker_enabled:
            self._broker = await self._find_broker()
        broker = self._broker
        for endpoint in (*broker.xsub, *broker.xpub) if broker is not None else ():
            await _probe(endpoint)

    async def publisher(self, scope: EventScope, topic: str) -> EventPublisher:
        if self._settings.broker_enabled:
            await self.start()
        made = self._publisher(scope, topic)
        if made.announced is not None:
            await asyncio.shield(made.announced)
        return made

    def new_publisher(self, scope: EventScope, topic: str) -> EventPublisher:
        return self._publisher(scope, topic)

    def _publisher(self, scope: EventScope, topic: str) -> _Publisher:
        import zmq

        socket = self._socket(zmq.PUB)
        publisher_id = self._sources.rng.getrandbits(PUBLISHER_ID_BITS)
        made = _Publisher(self, scope, topic, publisher_id, socket)
        broker = self._broker
        try:
            if broker is not None:
                for endpoint in broker.xsub:
                    socket.connect(endpoint)
            else:
                host = self._settings.host or detect_host()
                port = socket.bind_to_random_port(f"tcp://{_bind_host(host)}")
                transport = {"kind": "Zmq", "config": {"endpoint": f"tcp://{_bracketed(host)}:{port}"}}
                record = channel_record(scope, topic, publisher_id, transport)
                made.announced = self._announcer.announce(made.key, record)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise CannotConnect(f"the zmq event plane cannot open a socket for {topic}: {error}") from error
        self._publishers.add(made)
        return made

    @asynccontextmanager
    async def subscribe(self, scope: EventScope, topic: str) -> AsyncIterator[AsyncIterator[Event]]:
        import zmq

        if self._settings.broker_enabled:
            await self.start()
        inbox = Inbox(self._settings.subscriber_capacity, self._counts)
        broker = self._broker
        subject = f"{scope.subject}.{topic}"
        socket = self._socket(zmq.SUB)
        reader = SocketReader(socket, lambda parts: self._take(inbox, topic, subject, parts))
        self._inboxes.add(inbox)
        try:
            # A topic is also matched by those that begin with it: `_take` compares again.
            socket.subscribe(topic if broker is None else subject)
            if broker is not None:
                for endpoint in broker.xpub:
                    socket.connect(endpoint)
                reader.start()
                yield inbox
            else:
                reader.start()
                async with asyncio.TaskGroup() as group:
                    first = asyncio.Event()
                    connected: dict[str, str] = {}
                    work = partial(self._follow, scope, topic, reader, first, connected)
                    task = group.create_task(forever(work, f"channels of {topic}"))
                    await first.wait()
                    yield inbox
                    task.cancel()
        finally:
            self._inboxes.discard(inbox)
            inbox.close()
            reader.close()

    async def close(self) -> None:
        self._closed = True
        for publisher in list(self._publishers):
            await publisher.close()
        await self._announcer.close()
        for inbox in self._inboxes:
            inbox.close()
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)  # a subscriber still open gets its socket taken away; it ends with its inbox

    # -- inside ------------------------------------------------------------------------------------------------------

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        import zmq

        if self._closed:
            raise RuntimeError("this event plane is closed")
        if self._context is None:
            self._context = zmq.Context(io_threads=self._settings.io_threads)
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, SEND_QUEUE)
        socket.set(zmq.RCVHWM, RECEIVE_QUEUE)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        socket.set(zmq.IPV6, 1)
        return socket

    def _take(self, inbox: Inbox, topic: str, subject: str, parts: Sequence[bytes]) -> None:
        try:
            event = decode_parts(parts)
        except BadEvent as error:
            self._counts.invalid(topic)
            logger.debug("a message of topic %s is no event: %s", topic, error)
            return
        named = parts[0].decode(errors="replace")
        if named not in (topic, subject) or event.topic not in (topic, subject):
            if named in (topic, subject):
                self._counts.invalid(topic)
            return
        inbox.put(event)

    async def _find_broker(self) -> ZmqBroker:
        """Find the broker that has announced itself. Raises CannotConnect when none does so in time."""
        try:
            async with asyncio.timeout(PROBE_SECONDS), self._announcer.discovery.watch(EVENT_CHANNELS) as changes:
                async for batch in changes:
                    for change in batch:
                        if isinstance(change, Put) and (found := zmq_broker(change.value)) is not None:
                            return ZmqBroker(*found)
        except TimeoutError:
            pass  # logged below, as for a store that was closed
        raise CannotConnect(
            "DYN_ZMQ_BROKER_ENABLED is set, but no broker has announced itself in discovery; start one, say where it is with "
            "DYN_ZMQ_BROKER_URL, or leave it out: the event plane needs no broker"
        )

    async def _follow(
        self, scope: EventScope, topic: str, reader: SocketReader, first: asyncio.Event, connected: dict[str, str]
    ) -> None:
        """Keep connected to the publishers there are. `connected`: by key; those of an attempt that failed are in it."""
        prefix = f"{EVENT_CHANNELS}/{scope.path_encoded}/topic/{encode_segment(topic)}"
        async with aclosing(follow(self._announcer.discovery, prefix, set(connected))) as changes:
            async for batch in changes:
                for number, change in enumerate(batch, 1):
                    self._connect(change, connected, reader)
                    if number % CONNECTED_AT_ONCE == 0:
                        await asyncio.sleep(0)
                first.set()
        first.set()  # the store was closed before it answered

    def _connect(self, change: Put | Delete, connected: dict[str, str], reader: SocketReader) -> None:
        endpoint = None
        if isinstance(change, Put):
            try:
                endpoint = zmq_endpoint(change.value)
            except BadEvent as error:
                logger.warning("event channel %s is ignored: %s", change.key, error)
        before = connected.pop(change.key, None)
        if before == endpoint:
            if endpoint is not None:
                connected[change.key] = endpoint
            return
        if before is not None:
            reader.disconnect(before)
        if endpoint is not None and reader.connect(endpoint):
            connected[change.key] = endpoint


class _Publisher(NumberedPublisher):
    def __init__(
        self, plane: ZmqEventPlane, scope: EventScope, topic: str, publisher_id: int, socket: zmq.Socket[bytes]
    ) -> None:
        super().__init__(topic, publisher_id, plane._sources.wall)
        self.key = scope.channel_key(topic, publisher_id)
        self.announced: asyncio.Task[None] | None = None
        self._plane = plane
        self._filter = (topic if plane._broker is None else f"{scope.subject}.{topic}").encode()
        self._socket = socket

    def _send(self, event: Event) -> None:
        import zmq

        try:
            *parts, last = encode_parts(self._filter, event)
            for part in parts:
                self._socket.send(part, _NO_WAIT | _MORE)
            self._socket.send(last, _NO_WAIT)
        except zmq.ZMQError as error:  # a PUB socket never waits; what remains is a context that is being closed
            self._plane._counts.dropped(event.topic)
            logger.debug("an event of %s was not sent: %s", event.topic, error)
        else:
            self._plane._counts.published(event.topic)

    async def _leave(self) -> None:
        self._plane._publishers.discard(self)
        await self._plane._announcer.withdraw(self.key)
        self._socket.close(linger=0)


class SocketReader:
    """Reads a socket from the event loop and hands every message to `take`."""

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[Sequence[bytes]], None]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self._again: asyncio.Handle | None = None
        self._is_reading = False

    def start(self) -> None:
        """Begin to read."""
        self._is_reading = True
        self._loop.add_reader(self._descriptor, self._read)
        self._read()

    def connect(self, endpoint: str) -> bool:
        """Connect to one more publisher; whether that is an address at all."""
        import zmq

        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            logger.warning("%s is no address to connect to: %s", endpoint, error)
            return False
        self._read()  # the call may have taken the descriptor's signal
        return True

    def disconnect(self, endpoint: str) -> None:
        """Leave one; unknown is fine."""
        import zmq

        try:
            self._socket.disconnect(endpoint)
        except zmq.ZMQError as error:
            logger.debug("disconnecting from %s: %s", endpoint, error)
        self._read()

    def close(self) -> None:
        """Stop, and close the socket; idempotent."""
        if self._is_reading:
            self._loop.remove_reader(self._descriptor)
        self._is_reading = False
        if self._again is not None:
            self._again.cancel()
        if not self._socket.closed:
            self._socket.close(linger=0)

    def _read(self) -> None:
        """Read until nothing is left: the descriptor signals new messages only once."""
        import zmq

        self._again = None
        if not self._is_reading or self._socket.closed:
            return
        for number in range(BURST):
            try:
                # Cheaper to check than the exception of a read in vain; but the signal nearly always comes with a message.
                if number and not int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
                    return
                parts = self._socket.recv_multipart(_NO_WAIT)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                logger.debug("a subscription ended: %s", error)
                return
            try:
                self._take(parts)
            except Exception:  # the boundary: a message that breaks its reader must not end the reading
                logger.exception("a message of %d bytes could not be taken", sum(map(len, parts)))
        self._again = self._loop.call_soon(self._read)


async def _probe(endpoint: str) -> None:
    """Raises CannotConnect unless the address accepts connections: a ZMQ socket itself would wait silently."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError) as error:  # TimeoutError is an OSError
        said = str(error) or "no answer"
        raise CannotConnect(
            f"the ZMQ broker at {endpoint} cannot be used ({said}). Start one there, correct DYN_ZMQ_BROKER_URL, or leave it "
            "out: the event plane needs no broker"
        ) from error
    writer.close()


def _bind_host(advertised: str) -> str:
    """Return the host to bind: all interfaces, unless the advertised address is only reachable from this machine."""
    if advertised.startswith(LOOPBACK):
        return "[::1]" if ":" in advertised else "127.0.0.1"
    return "[::]" if ":" in advertised else "0.0.0.0"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
