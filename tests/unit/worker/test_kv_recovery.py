"""KV events on their way from an engine to whoever routes: the engine's own socket, gaps, questions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq

from dynamo.errors import InvalidArgument
from dynamo.kv import block_hashes
from dynamo.runtime.calls.context import Context
from dynamo.runtime.discovery.base import EVENT_SOURCES, INSTANCES
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.endpoint import Endpoint
from dynamo.worker.kv_publishing.publisher import KvEventPublisher
from dynamo.worker.kv_publishing.recovery import KvRecovery
from support.patience import PATIENCE_SECONDS

TOKENS = list(range(1, 9))


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with DistributedRuntime(None, "mem", "mem") as runtime:
        yield runtime.endpoint("ns.c.generate")


class Kept:
    """A channel that keeps what it was given."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.messages = 0
        self.changed = asyncio.Event()

    def publish(self, payload: Any) -> None:
        self.messages += 1
        self.events += payload
        self.changed.set()

    async def until(self, count: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(self.events) < count:
                self.changed.clear()
                await self.changed.wait()
        return [entry["event"] for entry in self.events]


class Engine:
    """An engine's PUB socket."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.sequence = 0

    def say(self, *events: Any, topic: bytes = b"kv") -> None:
        self.raw([topic, self.sequence.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, list(events)])])
        self.sequence += 1

    def raw(self, parts: list[bytes]) -> None:
        self._socket.send_multipart(parts)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def engine() -> Any:
    made = Engine()
    yield made
    made.close()


def store(block_hash: int, parent: int | None = None, tokens: list[int] | None = None) -> list[Any]:
    return ["BlockStored", [block_hash], parent, tokens or TOKENS[:4], 4, None, "GPU"]


async def connected(endpoint: Endpoint, engine: Engine) -> tuple[KvEventPublisher, Kept]:
    channel = Kept()
    publisher = KvEventPublisher(
        endpoint, kv_block_size=4, channel=channel, zmq_endpoint=f"tcp://*:{engine.port}", zmq_topic="kv"
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not channel.events:  # a subscription takes a moment
            engine.say(["AllBlocksCleared"])
            await asyncio.sleep(0.01)
    engine.say(store(10**9))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "stored" not in channel.events[-1]["event"]["data"]:  # all that was sent before has arrived
            channel.changed.clear()
            await channel.changed.wait()
    engine.say(["AllBlocksCleared"])
    await channel.until(len(channel.events) + 1)
    channel.events.clear()
    channel.messages = 0
    return publisher, channel


def counters(endpoint: Endpoint) -> dict[str, float]:
    lines = endpoint.runtime.metrics.expose().decode().splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith("dynamo_component_kv_publisher_")]
    return {
        name.removeprefix("dynamo_component_kv_publisher_").removesuffix("_total"): float(value)
        for name, _, value in found
    }


# -- the engine's socket --------------------------------------------------------------------------------------------------


async def test_an_engines_own_events_are_published_in_native_form(endpoint: Endpoint, engine: Engine) -> None:
    publisher, channel = await connected(endpoint, engine)
    engine.say(store(-1), ["BlockStored", [9], -1, TOKENS[4:], 4, None, "CPU"])
    engine.say(["BlockRemoved", [-1], "GPU"])
    stored, lower, removed = await channel.until(3)
    (block,) = stored["data"]["stored"]["blocks"]
    assert block == {"block_hash": 2**64 - 1, "tokens_hash": block_hashes(TOKENS[:4], 4)[0], "mm_extra_info": None}
    assert lower["data"]["stored"]["parent_hash"] == 2**64 - 1
    assert [entry["storage_tier"] for entry in channel.events] == ["device", "host_pinned", "device"]
    assert removed["data"] == {"removed": {"block_hashes": [2**64 - 1]}}
    assert [event["event_id"] for event in (lower, removed)] == [stored["event_id"] + 1, stored["event_id"] + 2]
    publisher.shutdown()
    publisher.shutdown()


async def test_the_events_of_one_message_of_an_engine_are_one_message(endpoint: Endpoint, engine: Engine) -> None:
    publisher, channel = await connected(endpoint, engine)
    engine.say(store(1), ["BlockStored", [2], 1, TOKENS[4:], 4, None, "CPU"], ["BlockRemoved", [1], "GPU"])
    await channel.until(3)
    assert channel.messages == 1
    publisher.shutdown()


async def test_rubbish_from_an_engine_is_counted_and_the_rest_goes_on(
    endpoint: Endpoint, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, channel = await connected(endpoint, engine)
    before = counters(endpoint)
    engine.raw([b"kv", b"short"])
    engine.raw([b"kv", engine.sequence.to_bytes(8, "big"), b"\xc1"])
    engine.sequence += 1
    engine.say(["Nonsense"], store(1, parent=1), [*store(2)[:6], "TAPE"], store(3))
    engine.say(store(4), topic=b"kv-more")
    engine.sequence += 2  # two messages are lost
    engine.say(
        ["BlockStored", [5, 6], None, TOKENS[:4], 4, None, None], store(7)
    )  # tokens for one block, names for two
    await channel.until(3)
    after = counters(endpoint)
    found = {name: after[name] - before[name] for name in after}
    assert (await channel.until(3))[0]["data"] == {"removed": {"block_hashes": []}}
    hashes = [
        b["block_hash"] for e in await channel.until(3) if "stored" in e["data"] for b in e["data"]["stored"]["blocks"]
    ]
    assert hashes == [3, 7]
    assert found["zmq_conversion_issues"] == 4
    assert (found["zmq_filtered_events"], found["zmq_suspicious_events"]) == (1, 1)
    assert found["engines_dropped_events"] == 3  # with the one of the other topic
    assert "unknown event 'Nonsense'" in caplog.text
    publisher.shutdown()


async def test_an_engine_that_begins_again_is_followed_also_where_its_first_messages_were_missed(
    endpoint: Endpoint, engine: Engine
) -> None:
    publisher, channel = await connected(endpoint, engine)
    engine.sequence = 1000
    engine.say(store(1))
    engine.sequence -= 1
    engine.say(store(1))  # the same message again
    engine.sequence = 3  # this socket was connected again after the first three messages of the new engine
    engine.say(store(2))
    engine.say(store(3))
    found = ["stored" in e["data"] or e["data"] for e in await channel.until(4)]
    assert found == [True, "cleared", True, True]
    dump = publisher.answer(None, None)["TreeDump"]["events"]
    assert [b["block_hash"] for e in dump for b in e["event"]["data"]["stored"]["blocks"]] == [2, 3]
    publisher.shutdown()


async def test_an_engine_that_begins_again_has_nothing_any_more(endpoint: Endpoint, engine: Engine) -> None:
    publisher, channel = await connected(endpoint, engine)
    engine.say(store(1))
    engine.sequence = 0
    engine.say(store(2))
    assert ["stored" in e["data"] or e["data"] for e in await channel.until(3)] == [True, "cleared", True]
    dump = publisher.answer(None, None)["TreeDump"]["events"]
    assert [b["block_hash"] for e in dump for b in e["event"]["data"]["stored"]["blocks"]] == [2]
    publisher.shutdown()


async def test_an_address_that_is_none_is_refused_by_name(endpoint: Endpoint) -> None:
    with pytest.raises(InvalidArgument, match=r"ZmqSource\.endpoint 'nowhere'"):
        KvEventPublisher(endpoint, kv_block_size=4, channel=Kept(), zmq_endpoint="nowhere")


# -- recovery -------------------------------------------------------------------------------------------------------------


async def ask(endpoint: Endpoint, publisher_id: int, body: Any) -> Any:
    asked = endpoint.runtime.endpoint(f"ns.c.worker_kv_query_source_{publisher_id:x}")
    client = await asked.client()
    context = Context()
    stream = await client.open(client.pick(context), body, context)
    (item,) = await stream.next_batch()
    assert await stream.next_batch() == []
    return item.extra


async def test_a_gap_is_repaired_by_asking_the_worker(endpoint: Endpoint) -> None:
    channel = Kept()
    publisher = KvEventPublisher(endpoint, kv_block_size=4, dp_rank=2, channel=channel)
    recovery = await KvRecovery.begin(endpoint, publisher, 0xABC)
    for number in range(1, 4):
        publisher.publish_stored(TOKENS[:4], [4], [number], parent_hash=number - 1 or None)
    events = await channel.until(3)
    worker = {"worker_id": endpoint.connection_id(), "dp_rank": 2}

    found = await ask(endpoint, 0xABC, {**worker, "start_event_id": 2, "end_event_id": 2})
    assert [entry["event"] for entry in found["Events"]["events"]] == events[1:]
    dump = await ask(endpoint, 0xABC, {**worker, "start_event_id": None, "end_event_id": None})
    (run,) = dump["TreeDump"]["events"]
    assert [b["block_hash"] for b in run["event"]["data"]["stored"]["blocks"]] == [1, 2, 3]
    assert {key: run[key] for key in ("worker_id", "storage_tier")} == {
        "worker_id": endpoint.connection_id(),
        "storage_tier": "device",
    }
    assert "dp_rank mismatch" in (await ask(endpoint, 0xABC, {**worker, "dp_rank": 0}))["Error"]
    assert "worker_id mismatch" in (await ask(endpoint, 0xABC, {**worker, "worker_id": 1}))["Error"]
    assert "cannot be read" in (await ask(endpoint, 0xABC, {"dp_rank": "x"}))["Error"]
    await recovery.close()
    await recovery.close()


async def test_the_record_of_a_source_is_the_native_one_and_goes_with_it(endpoint: Endpoint) -> None:
    store = endpoint.runtime.discovery
    publisher = KvEventPublisher(endpoint, kv_block_size=4, channel=Kept())
    recovery = await KvRecovery.begin(endpoint, publisher, 0xABC)
    ((key, value),) = (await store.get_prefix(EVENT_SOURCES)).items()
    assert key == f"{EVENT_SOURCES}/namespace/ns/component/c/endpoint/generate/topic/kv-events/abc"
    place = {"namespace": "ns", "component": "c", "name": "generate"}
    worker_id = endpoint.connection_id()
    (instance,) = (await store.get_prefix(f"{INSTANCES}/ns/c/worker_kv_query_source_abc")).values()
    target = json.loads(instance)
    assert target.pop("type") == "Endpoint"
    assert json.loads(value) == {
        "type": "EventSource",
        "scope": {"kind": "endpoint", "endpoint": place},
        "topic": "kv-events",
        "publisher_id": 0xABC,
        "metadata": {
            "kv_state_endpoint": place,
            "worker": {"worker_id": worker_id, "dp_rank": 0},
            "publisher_id": 0xABC,
            "recovery_target": target,
        },
    }
    await recovery.close()
    assert await store.get_prefix(EVENT_SOURCES) == {}
    assert await store.get_prefix(INSTANCES) == {}
