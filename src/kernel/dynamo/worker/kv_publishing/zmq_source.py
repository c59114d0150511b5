"""KV events from an engine's own ZMQ socket: subscribe, read, hand on.

A message has three parts: topic, sequence (u64, big-endian), payload (`kv.engine_events`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from dynamo.errors import InvalidArgument
from dynamo.kv.engine_events import BadPayload, Cleared, EngineEvent, read_payload
from dynamo.runtime.calls.event_plane.zmq import MAX_MESSAGE_BYTES, RECONNECT_MAX_MS, RECONNECT_MS, SocketReader
from dynamo.worker.kv_publishing.metrics import KvPublisherMetrics

logger = logging.getLogger(__name__)

QUEUE: Final = 10_000  # messages that wait while the event loop is busy
_WILDCARDS: Final = ("tcp://*:", "tcp://0.0.0.0:")  # how engines write where they bind; they run beside us


class ZmqEngineEvents:
    """A subscription to one engine. Create and close it on the event loop; it reconnects by itself."""

    def __init__(
        self, endpoint: str, topic: str, take: Callable[[Sequence[EngineEvent]], None], metrics: KvPublisherMetrics
    ) -> None:
        """`take` gets the events of each message, in order; where it raises ValueError it has taken none of them.

        Raises InvalidArgument for an address that is none.
        """
        self._endpoint = endpoint
        self._topic = topic.encode()
        self._hand_on = take
        self._metrics = metrics
        self._next: int | None = None  # the sequence number after the last one seen
        self._side_groups: set[int] = set()  # of layers beside the main cache, as `read_payload` learns them
        self._warned: set[str] = set()
        self._context = zmq.Context()
        socket = self._context.socket(zmq.SUB)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, QUEUE)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        socket.subscribe(topic)
        address = endpoint
        for wildcard in _WILDCARDS:
            if address.startswith(wildcard):
                address = "tcp://127.0.0.1:" + address.removeprefix(wildcard)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            self._context.term()
            raise InvalidArgument(f"ZmqSource.endpoint {endpoint!r} cannot be subscribed to: {error}") from error
        self._reader = SocketReader(socket, self._take)
        self._reader.start()

    def close(self) -> None:
        """Stop reading; idempotent."""
        self._reader.close()
        self._context.term()

    def _take(self, parts: Sequence[bytes]) -> None:
        if len(parts) != 3 or len(parts[1]) != 8:
            self._metrics.issues.inc()
            self._warn("shape", f"a message of {len(parts)} parts instead of topic, sequence and payload")
            return
        if self._topic and parts[0] != self._topic:  # ZMQ matches beginnings
            return
        events = self._in_sequence(int.from_bytes(parts[1], "big"))
        if events is None:
            return
        try:
            batch = read_payload(parts[2], self._side_groups)
        except BadPayload as error:
            self._metrics.issues.inc()
            self._warn("payload", str(error))
        else:
            self._metrics.events.inc(len(batch.events) + batch.filtered + len(batch.issues))
            self._metrics.filtered.inc(batch.filtered)
            self._metrics.suspicious.inc(batch.suspicious)
            self._metrics.issues.inc(len(batch.issues))
            if batch.issues:
                self._warn("event", batch.issues[0])
            events += batch.events
        try:
            self._hand_on(events)
        except ValueError:
            self._hand_on_each(events)

    def _hand_on_each(self, events: Sequence[EngineEvent]) -> None:
        """Hand on the events of which one is broken: the others need not suffer for it."""
        for event in events:
            try:
                self._hand_on([event])
            except ValueError as error:
                self._metrics.issues.inc()
                self._warn("parts", str(error))

    def _in_sequence(self, sequence: int) -> list[EngineEvent] | None:
        """Check the sequence number; return the events to publish before this message, or None for an old message."""
        expected = self._next
        if expected is not None and sequence == expected - 1 and sequence:
            return None  # the last one again
        self._next = sequence + 1
        if expected is not None and sequence < expected:
            # Its first messages may have been sent before this socket was connected again.
            logger.warning("the engine at %s begins again: its blocks are forgotten", self._endpoint)
            self._metrics.engine_drops.inc(sequence)
            return [Cleared()]
        if expected is not None and sequence > expected:
            self._metrics.engine_drops.inc(sequence - expected)
            self._warn("gap", f"{sequence - expected} message(s) lost; blocks they named stay unknown or stale")
        return []

    def _warn(self, kind: str, text: str) -> None:
        """Once at WARNING for each kind of trouble; the metrics count every one."""
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        logger.log(level, "KV events of the engine at %s: %s", self._endpoint, text)
