"""A worker in Rust whose engine publishes its KV events on a ZMQ socket: `KvEventSource::Zmq`."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from dynamo.kv.hashing import block_hashes
from dynamo.runtime.calls.event_plane.envelope import decode_parts, zmq_endpoint
from support.patience import PATIENCE_SECONDS
from support.processes import until
from support.rust_worker import NEEDS_ENGINE, RustWorker

pytestmark = NEEDS_ENGINE
CHANNELS = re.compile(r"v1/event_channels/[^.]")
PREFIX = "dynamo_component_kv_publisher_"


@dataclass
class Engine:
    """The socket of an engine, and what the worker makes of it."""

    context: zmq.asyncio.Context
    endpoint: str
    socket: Any = None

    async def open(self) -> None:
        """Listen, and return once the worker has subscribed."""
        self.socket = self.context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 50)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    self.socket.bind(self.endpoint)
                    break
                except zmq.ZMQError as error:  # the library closes an earlier socket in its own time
                    if error.errno != zmq.EADDRINUSE:
                        raise
                    await asyncio.sleep(0.01)
        await self.subscribed()

    async def subscribed(self) -> None:
        """Return with the next subscription; the end of an earlier one is none."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await self.socket.recv() != b"\x01":
                pass

    async def send(self, sequence: int, *events: Any) -> None:
        payload = msgspec.msgpack.encode([0.0, list(events)])
        await self.socket.send_multipart([b"any", struct.pack(">Q", sequence), payload])

    def close(self) -> None:
        self.socket.close(linger=0)


def stored(*names: int, parent: int | None = None) -> dict[str, Any]:
    tokens = [token for name in names for token in range(name, name + 16)]
    return {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 16,
    }


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


class Router:
    """A subscriber of the KV events of a worker."""

    def __init__(self, context: zmq.asyncio.Context, worker: RustWorker) -> None:
        worker.instance()
        channels = [(worker.store / name).read_bytes() for name in worker.records() if CHANNELS.match(name)]
        (record,) = [record for record in channels if json.loads(record)["topic"] == "kv-events"]
        endpoint = zmq_endpoint(record)
        assert endpoint is not None
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        self.socket.connect(endpoint)
        self.seen = 0
        self.waiting: list[Any] = []

    async def next(self) -> Any:
        """The next change; the last event is published again and again, which is no change."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not self.waiting:
                message = decode_parts(await self.socket.recv_multipart())
                events = [one["event"] for one in msgspec.msgpack.decode(message.payload)]
                self.waiting = [event for event in events if event["event_id"] > self.seen]
        event = self.waiting.pop(0)
        self.seen = event["event_id"]
        return event["data"]


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
async def test_the_blocks_of_the_engine_are_published(
    tmp_path: Path, context: zmq.asyncio.Context, transport: str, unused_tcp_port: int
) -> None:
    place = f"tcp://127.0.0.1:{unused_tcp_port}" if transport == "tcp" else f"ipc://{tmp_path}/kv"
    engine = Engine(context, place)
    worker = RustWorker.start(tmp_path, "--zmq-kv-events", place.replace("127.0.0.1", "*"))
    try:
        router = Router(context, worker)
        await engine.open()
        # The worker repeats its last event: a router that subscribes late gets the first one all the same.
        await engine.send(0, stored(100, 200))
        blocks = (await router.next())["stored"]["blocks"]
        hashes = block_hashes([*range(100, 116), *range(200, 216)], 16)
        assert [(block["block_hash"], block["tokens_hash"]) for block in blocks] == [
            (100, hashes[0]),
            (200, hashes[1]),
        ]
        await engine.send(1, {"type": "BlockRemoved", "block_hashes": [200]})
        assert await router.next() == {"removed": {"block_hashes": [200]}}

        # Three messages are lost, an event cannot be read, and one is of another engine's cache.
        await engine.send(5, {"type": "Nonsense"}, stored(300, parent=100) | {"medium": "S3"}, stored(400, parent=100))
        assert (await router.next())["stored"]["parent_hash"] == 100
        wanted = {"engines_dropped_events": 3, "zmq_conversion_issues": 1, "zmq_filtered_events": 1, "zmq_events": 5}
        assert {name: worker.metric(f"{PREFIX}{name}_total") for name in wanted} == wanted

        # The engine begins again: what it held is gone.
        engine.close()
        engine = Engine(context, place)
        await engine.open()
        await engine.send(1, stored(500))
        assert await router.next() == "cleared"
        assert [block["block_hash"] for block in (await router.next())["stored"]["blocks"]] == [500]
    finally:
        worker.close()


def test_an_address_that_is_none_ends_the_start(tmp_path: Path) -> None:
    worker = RustWorker.start(tmp_path, "--zmq-kv-events", "inproc://kv")
    try:
        assert worker.exit_code() == 1
        assert 'CannotConnect: kv publisher setup (dp_rank=0): the endpoint "inproc://kv"' in worker.log
    finally:
        worker.close()


async def test_messages_of_another_shape_cost_nothing(
    tmp_path: Path, context: zmq.asyncio.Context, unused_tcp_port: int
) -> None:
    engine = Engine(context, f"tcp://127.0.0.1:{unused_tcp_port}")
    worker = RustWorker.start(tmp_path, "--zmq-kv-events", engine.endpoint)
    try:
        worker.instance()
        await engine.open()
        for parts in ([b"one"], [b"a", b"b", b"c"], [b"", bytes(8), b"\xc1"], [b"x"] * 40):
            await engine.socket.send_multipart(parts)
        await until(
            lambda: worker.metric(f"{PREFIX}zmq_conversion_issues_total") >= 3, lambda: f"issues; log:\n{worker.log}"
        )
        router = Router(context, worker)
        await engine.subscribed()  # forty parts end a connection, and the worker comes back
        await engine.send(1, stored(100))
        assert "stored" in await router.next()
    finally:
        worker.close()
