"""KV events of one pod: subscribed to over ZMQ, in their order, and requested again where some were missed.

A message has three parts: topic, sequence number (u64, big-endian), payload (`kv.engine_events`). The replay socket takes a
sequence number and sends every message from there on, and one with the number -1 as the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import zmq

from dynamo.errors import InvalidArgument
from dynamo.kv.engine_events import BadPayload, Cleared, EngineEvent, read_payload
from dynamo.runtime.calls.event_plane.zmq import MAX_MESSAGE_BYTES, RECONNECT_MAX_MS, RECONNECT_MS, SocketReader
from dynamo.worker.kv_publishing.metrics import KvPublisherMetrics

logger = logging.getLogger(__name__)

QUEUE: Final = 10_000  # messages that wait while the event loop is busy, or while others are sent again
REPLAY_SECONDS: Final = 5.0  # without any message of a replay
_END: Final = (-1).to_bytes(8, "big", signed=True)
TakeEvents = Callable[[Sequence[EngineEvent]], None]


class EventAddress(NamedTuple):
    """Where a pod publishes."""

    events: str
    topic: str = ""
    replay: str | None = None  # None: what is missed stays missed


class EngineMessages:
    """The messages of one engine in their order. Pure: it neither reads a socket nor a clock."""

    def __init__(self, name: str, take: TakeEvents, metrics: KvPublisherMetrics) -> None:
        """`take` gets the events of each message; where it raises ValueError it has taken none of them."""
        self._name, self._hand_on, self._metrics = name, take, metrics
        self.next: int | None = None
        """The sequence number after the last one that was taken; None: none was."""
        self._side_groups: set[int] = set()  # of layers beside the main cache, as `read_payload` learns them
        self._warned: set[str] = set()

    def take(self, sequence: int, payload: bytes) -> None:
        """Take a message. What was taken before is ignored, and what is missed before it is counted as lost."""
        expected = 0 if self.next is None else self.next
        if sequence < expected:
            return
        if sequence > expected and self.next is not None:
            self._metrics.engine_drops.inc(sequence - expected)
            self._warn("gap", f"{sequence - expected} message(s) lost; blocks they named stay unknown or stale")
        self.next = sequence + 1
        try:
            batch = read_payload(payload, self._side_groups)
        except BadPayload as error:
            self._metrics.issues.inc()
            self._warn("payload", str(error))
            return
        self._metrics.events.inc(len(batch.events) + batch.filtered + len(batch.issues))
        self._metrics.filtered.inc(batch.filtered)
        self._metrics.suspicious.inc(batch.suspicious)
        self._metrics.issues.inc(len(batch.issues))
        if batch.issues:
            self._warn("event", batch.issues[0])
        try:
            self._hand_on(batch.events)
        except ValueError:
            for event in batch.events:  # one of them is broken: the others need not suffer for it
                self._hand_on_alone(event)

    def begin_again(self) -> None:
        """Forget what the engine held: another process stands behind its address."""
        logger.warning("the engine at %s begins again: its blocks are forgotten", self._name)
        self.next = None
        self._hand_on([Cleared()])

    def _hand_on_alone(self, event: EngineEvent) -> None:
        try:
            self._hand_on([event])
        except ValueError as error:
            self._metrics.issues.inc()
            self._warn("parts", str(error))

    def warn_of_shape(self, parts: int) -> None:
        """Report a message that is none."""
        self._metrics.issues.inc()
        self._warn("shape", f"a message of {parts} parts instead of topic, sequence and payload")

    def _warn(self, kind: str, text: str) -> None:
        """Once at WARNING for each kind of trouble; the metrics count every one."""
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        logger.log(level, "KV events of the engine at %s: %s", self._name, text)


class PodEvents:
    """A subscription to one pod. Make and close it on the event loop; it reconnects by itself."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: EventAddress, messages: EngineMessages
    ) -> None:
        """Raises InvalidArgument for an address that is none."""
        self._context, self._address, self._messages = context, address, messages
        self._waiting: deque[tuple[int, bytes]] = deque()  # behind a replay
        self._replay: SocketReader | None = None
        self._timer: asyncio.TimerHandle | None = None
        socket = self._open(zmq.SUB)
        socket.subscribe(address.topic)
        self._reader = self._connected(socket, address.events, self._live)
        if address.replay is not None:
            try:
                self._request(0)
            except InvalidArgument:
                self.close()
                raise

    def close(self) -> None:
        """Stop reading; idempotent."""
        self._end_replay()
        self._reader.close()

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, QUEUE)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        socket.set(zmq.IPV6, 1)
        return socket

    def _connected(
        self, socket: zmq.Socket[bytes], address: str, take: Callable[[Sequence[bytes]], None]
    ) -> SocketReader:
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise InvalidArgument(f"KV events cannot be read from {address!r}: {error}") from error
        reader = SocketReader(socket, take)
        reader.start()
        return reader

    # -- what is published ---------------------------------------------------------------------------------------------

    def _live(self, parts: Sequence[bytes]) -> None:
        if len(parts) != 3 or len(parts[1]) != 8:
            self._messages.warn_of_shape(len(parts))
            return
        if self._address.topic and parts[0] != self._address.topic.encode():  # ZMQ matches beginnings
            return
        sequence, payload, expected = int.from_bytes(parts[1], "big"), parts[2], self._messages.next
        if self._replay is not None:
            if len(self._waiting) < QUEUE:
                self._waiting.append((sequence, payload))
            else:
                self._finish_replay()
                self._messages.take(sequence, payload)
            return
        if expected is not None and sequence < expected:
            if sequence == expected - 1 and sequence:
                return  # the last one again
            self._messages.begin_again()
            expected = None
        if self._address.replay is not None and sequence > (expected or 0):
            self._waiting.append((sequence, payload))
            self._request(expected or 0)
            return
        self._messages.take(sequence, payload)

    # -- what was missed -----------------------------------------------------------------------------------------------

    def _request(self, first: int) -> None:
        assert self._address.replay is not None
        socket = self._open(zmq.DEALER)
        self._replay = self._connected(socket, self._address.replay, self._again)
        socket.send_multipart([b"", first.to_bytes(8, "big")], zmq.NOBLOCK)
        self._set_timer()

    def _again(self, parts: Sequence[bytes]) -> None:
        if self._replay is None or len(parts) < 2 or len(parts[-2]) != 8:
            return
        if parts[-2] == _END:
            self._finish_replay()
            return
        self._messages.take(int.from_bytes(parts[-2], "big"), parts[-1])
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(REPLAY_SECONDS, self._finish_replay)

    def _finish_replay(self) -> None:
        self._end_replay()
        while self._waiting:
            self._messages.take(*self._waiting.popleft())

    def _end_replay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._replay is not None:
            self._replay.close()
            self._replay = None
