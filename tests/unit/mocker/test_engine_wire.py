"""KV events on the sockets of the engine: what a relay reads, and what it can ask for again."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
import zmq
import zmq.asyncio

from dynamo.errors import CannotConnect
from dynamo.kv.engine_events import Removed, Stored, read_payload
from dynamo.mocker.engine_wire import EngineWire
from dynamo.mocker.stream import MockStream
from dynamo.mocker.timing import FixedTiming
from dynamo.scheduling import EvictedBlocks, ScheduledRequest, SchedulerOptions, make_core
from support.patience import PATIENCE_SECONDS
from support.virtual_engine import play


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def subscribed(port: int, replay_port: int) -> AsyncIterator[tuple[Any, Any]]:
    """A relay's socket, and one that asks for what was missed."""
    with zmq.asyncio.Context() as context:
        subscriber, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        try:
            subscriber.subscribe("")
            subscriber.connect(f"tcp://127.0.0.1:{port}")
            asker.connect(f"tcp://127.0.0.1:{replay_port}")
            yield subscriber, asker
        finally:
            subscriber.close(linger=0)
            asker.close(linger=0)


async def test_blocks_travel_with_their_tokens_and_can_be_asked_for_again() -> None:
    events_port, replay_port = free_port(), free_port()
    prompt = list(range(10))
    stream = MockStream(0, prompt, 0.0)
    request = ScheduledRequest.of_tokens("r", prompt, 8, 4, itertools.count(1000), owner=stream, lora_name="a")
    core = make_core(SchedulerOptions(num_gpu_blocks=8, block_size=4), FixedTiming(1, 1))
    line = play(core, [(0, request)])
    wire = EngineWire(3, 4, "127.0.0.1", events_port, replay_port)
    try:
        with pytest.raises(CannotConnect, match=str(events_port)):
            EngineWire(3, 4, "127.0.0.1", events_port, None)
        async with asyncio.timeout(PATIENCE_SECONDS), subscribed(events_port, replay_port) as (subscriber, asker):
            while not await subscriber.poll(10):  # until the subscription is there
                wire.publish([EvictedBlocks([7])])
            _, first, payload = await subscriber.recv_multipart()
            assert read_payload(payload).events == [Removed([7])]
            wire.publish(line.events)
            batch = read_payload(payload)
            while batch.events == [Removed([7])]:
                _, number, payload = await subscriber.recv_multipart()
                batch = read_payload(payload)
            assert batch.dp_rank == 3
            stored = [event for event in batch.events if isinstance(event, Stored)]
            assert [token for event in stored for token in event.token_ids] == [*range(10), *range(1000, 1006)]
            assert [name for event in stored for name in event.block_hashes] == request.identities
            assert [event.parent for event in stored] == [None, *request.identities[1:3]]
            assert {event.lora_name for event in stored} == {"a"}
            await asker.send_multipart([b"", number])
            assert (await asker.recv_multipart()) == [b"", number, payload]
            assert (await asker.recv_multipart()) == [b"", b"\xff" * 8, b""]
            assert first < number
    finally:
        wire.close()
        wire.close()
