"""KV events as vLLM publishes them: msgpack on a ZMQ PUB socket, with a ROUTER socket for what was missed.

A message has three parts: topic (empty), sequence number (u64, big-endian), and `[time, [event, ...], rank]`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec
import zmq

from dynamo.errors import CannotConnect
from dynamo.mocker.stream import MockStream
from dynamo.runtime.calls.event_plane.zmq import SocketReader
from dynamo.scheduling import DEVICE_TIER, HOST_TIER, BlockRun, EvictedBlocks

logger = logging.getLogger(__name__)

KEPT_MESSAGES: Final = 10_000  # for subscribers that missed some
HIGH_WATER_MARK: Final = 10_000  # messages that wait for one subscriber; what it does not read is lost to it
MEDIA: Final = {DEVICE_TIER: "GPU", HOST_TIER: "CPU"}
_END: Final = (-1).to_bytes(8, "big", signed=True)


class EngineWire:
    """The sockets of one rank. Use it on the event loop."""

    def __init__(self, rank: int, block_size: int, host: str, port: int, replay_port: int | None) -> None:
        """Bind `port` of `host`. Raises CannotConnect when a port is taken."""
        self._rank = rank
        self._block_size = block_size
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_MESSAGES)
        self._context = zmq.Context()
        self._replay: SocketReader | None = None
        self._replay_socket: zmq.Socket[bytes] | None = None
        self._socket = self._bound(zmq.PUB, host, port)
        if replay_port is not None:
            self._replay_socket = self._bound(zmq.ROUTER, host, replay_port)
            self._replay = SocketReader(self._replay_socket, self._answer)
            self._replay.start()

    def _bound(self, kind: int, host: str, port: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise CannotConnect(f"KV events of rank {self._rank}: port {port} cannot be bound: {error}") from error
        return socket

    def publish(self, events: Sequence[BlockRun | EvictedBlocks]) -> None:
        """Send the changes of one pass as one message."""
        payload = msgspec.msgpack.encode([time.time(), [self._event(event) for event in events], self._rank])
        self._kept.append((self._sequence, payload))
        self._socket.send_multipart([b"", self._sequence.to_bytes(8, "big"), payload])  # a PUB socket never waits
        self._sequence += 1

    def _event(self, event: BlockRun | EvictedBlocks) -> dict[str, object]:
        if isinstance(event, EvictedBlocks):
            return {
                "type": "BlockRemoved",
                "block_hashes": event.identities,
                "medium": MEDIA[event.tier],
                "group_idx": 0,
            }
        return {
            "type": "BlockStored",
            "block_hashes": event.identities,
            "parent_block_hash": event.parent,
            "token_ids": self._tokens(event),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": MEDIA[event.tier],
            "lora_name": event.request.lora_name,
            "extra_keys": _extra_keys(event),
            "group_idx": 0,
        }

    def _tokens(self, run: BlockRun) -> list[int]:
        request, size = run.request, self._block_size
        stream = request.owner
        assert isinstance(stream, MockStream)
        begin, end, tail_at = run.begin * size, run.end * size, request.tail_block * size
        tail = request.tail or []
        return [*stream.prompt[begin : min(end, tail_at)], *tail[max(begin - tail_at, 0) : max(end - tail_at, 0)]]

    def _answer(self, parts: Sequence[bytes]) -> None:
        """Send what was published from a sequence number on."""
        if len(parts) != 3 or len(parts[2]) != 8 or self._replay_socket is None:
            logger.debug("a request for missed KV events has %d parts; ignored", len(parts))
            return
        client, _, start = parts
        first = int.from_bytes(start, "big")
        answers = [(number.to_bytes(8, "big"), payload) for number, payload in self._kept if number >= first]
        try:
            for number, payload in (*answers, (_END, b"")):
                self._replay_socket.send_multipart([client, b"", number, payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("missed KV events could not all be sent again: %s", error)

    def close(self) -> None:
        """Close the sockets; idempotent."""
        if self._replay is not None:
            self._replay.close()
        if not self._context.closed:
            self._context.destroy(linger=0)


def _extra_keys(run: BlockRun) -> list[list[str]] | None:
    salt = run.request.cache_salt
    return None if not salt else [[f"dynamo-cache-salt:{salt}"]] * (run.end - run.begin)
