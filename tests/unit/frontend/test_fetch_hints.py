"""Hints about blocks that a worker can fetch from another one: who gets which, from the KV events to the worker's request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dynamo.common import constants
from dynamo.kv.events import BlocksAdded, BlocksDropped, BlockUpdate, HeldBlock, KvChange, RouterEvent
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import WorkerRank
from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.placement.kv_query import FetchTerms, KvQuery
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.kv.fetch_hints import fetch_terms
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.worker.kv_publishing.publisher import KvEventPublisher
from dynamo.worker.kv_publishing.recovery import KvRecovery
from support.cases import each_case
from support.frontend_cluster import Cluster, ScriptedWorker, cluster, memory_runtime
from support.patience import PATIENCE_SECONDS

BLOCK = 4
PROMPT = list(range(1, 34))  # eight complete blocks, and one token
SOURCE = "tcp://10.0.0.7:5600"
TYPE = constants.KV_HINT_TRANSFER_WORKER_TYPE_RUNTIME_KEY
ENDPOINTS = constants.KV_HINT_TRANSFER_SOURCE_CONTROL_ENDPOINTS_RUNTIME_KEY
CAPABLE = {constants.KV_HINT_TRANSFER_CAPABILITY_KEY: True}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, router_mode="kv", kv_router=KvRouterSettings(policy="default")) as found:
        yield found


async def add(house: Cluster, **runtime_data: Any) -> ScriptedWorker:
    config = ModelRuntimeConfig(total_kv_blocks=1000, max_num_batched_tokens=8192, runtime_data=runtime_data)
    return await house.worker(kv_cache_block_size=BLOCK, runtime_config=config)


async def hold(house: Cluster, worker: ScriptedWorker, names: Sequence[int]) -> KvRecovery:
    """Publish the first blocks of the prompt by the names of an engine, and wait until the frontend knows of them."""
    channel = worker.endpoint.event_channel("kv-events")
    publisher = KvEventPublisher(worker.endpoint, kv_block_size=BLOCK, dp_rank=0, channel=channel)
    publisher.publish_stored(PROMPT[: len(names) * BLOCK], [BLOCK] * len(names), names)
    recovery = await KvRecovery.begin(worker.endpoint, publisher, channel.publisher_id)
    domains = house.frontend.models._rules.kv
    assert domains is not None
    (domain,) = domains._domains.values()
    rank, query = WorkerRank(*publisher.rank), KvQuery(token_ids=PROMPT)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while rank not in domain.placement.router.look_up(query, 0.0).overlaps:
            await asyncio.sleep(0.005)
    return recovery


async def sent_to(house: Cluster, worker: ScriptedWorker) -> Mapping[str, Any]:
    """Return the request that a worker gets when the client names it."""
    nvext = {"backend_instance_id": worker.endpoint.connection_id()}
    assert (await house.client.completion(PROMPT, max_tokens=5, nvext=nvext)).status == 200
    return worker.requests[-1]


async def test_a_worker_that_can_fetch_gets_the_longest_prefix_of_another_one(house: Cluster) -> None:
    target = await add(house, **CAPABLE, **{TYPE: "aggregated"})
    sources = [await add(house, **{TYPE: "aggregated", ENDPOINTS: {"0": SOURCE}}) for _ in range(2)]
    names = range(-3, 4)  # an engine's own names, signed or unsigned
    held = [await hold(house, sources[0], range(100, 105)), await hold(house, sources[1], names)]
    hint = (await sent_to(house, target))["kv_hint"]
    (action,) = hint["actions"]
    assert hint["protocol_version"] == "0.1"
    assert hint["message_id"] != action["action_id"]
    assert (action["action_type"], action["action_version"]) == ("kv.fetch", "1.0")
    assert action["payload"] == {
        "source_control_endpoint": SOURCE,
        "block_hashes": [2**64 - 3, 2**64 - 2, 2**64 - 1, 0, 1, 2, 3],
    }
    # One who holds as much has nothing to fetch, and a source that cannot fetch gets no hint.
    held.append(await hold(house, target, range(7)))
    assert "kv_hint" not in await sent_to(house, target)
    assert "kv_hint" not in await sent_to(house, sources[0])
    for each in held:
        await each.close()


async def test_a_router_before_one_endpoint_names_the_source_too(house: Cluster) -> None:
    target = await add(house, **CAPABLE, **{TYPE: "decode"})
    source = await add(house, **{TYPE: "decode", ENDPOINTS: {"0": SOURCE}})
    held = await hold(house, source, range(100, 108))
    async with memory_runtime() as runtime:
        router = KvRouter(runtime.endpoint("ns.backend.generate"), BLOCK, KvRouterConfig())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await router.best_worker(PROMPT))[2] < 8:  # its events are read
                await asyncio.sleep(0.005)
        answer = await router.generate(PROMPT, "m", worker_id=target.endpoint.connection_id())
        async for _ in answer:
            pass
        (action,) = target.requests[-1]["kv_hint"]["actions"]
        assert action["payload"] == {"source_control_endpoint": SOURCE, "block_hashes": list(range(100, 108))}
    await held.close()


async def test_who_is_no_source(house: Cluster) -> None:
    """A worker of another type, one without an address that can be reached, and one whose card does not name its rank."""
    target = await add(house, **CAPABLE, **{TYPE: "aggregated"})
    cards: list[dict[str, Any]] = [
        {TYPE: "prefill", ENDPOINTS: {"0": SOURCE}}, {TYPE: "aggregated"}, {TYPE: "aggregated", ENDPOINTS: {"1": SOURCE}},
    ]  # fmt: skip
    held = [await hold(house, await add(house, **data), range(at * 10, at * 10 + 8)) for at, data in enumerate(cards)]
    assert "kv_hint" not in await sent_to(house, target)
    held.append(await hold(house, await add(house, **{TYPE: "aggregated", ENDPOINTS: {"0": SOURCE}}), range(90, 92)))
    (action,) = (await sent_to(house, target))["kv_hint"]["actions"]
    assert action["payload"]["block_hashes"] == [90, 91]
    for each in held:
        await each.close()


async def test_a_worker_that_declares_nothing_gets_no_hint(house: Cluster) -> None:
    target, source = await add(house), await add(house, **CAPABLE, **{TYPE: "aggregated", ENDPOINTS: {"0": SOURCE}})
    held = await hold(house, source, range(100, 108))
    assert "kv_hint" not in await sent_to(house, target)
    await held.close()


def terms(worker_type: object = "decode", endpoints: object = None, takes: object = True) -> FetchTerms | None:
    data = {TYPE: worker_type, ENDPOINTS: endpoints, constants.KV_HINT_TRANSFER_CAPABILITY_KEY: takes}
    return fetch_terms(data, 2)


@each_case("address", [SOURCE, "tcp://[2001:db8::1]:5600", "tcp://host:5600"])
def test_an_address_that_a_card_names_is_used(address: str) -> None:
    assert terms(endpoints={"2": address}) == FetchTerms("decode", address, True)


@each_case(
    "address",
    [
        "tcp://0.0.0.0:5600", "tcp://[::]:5600", "tcp://*:5600", "tcp://:5600", "tcp://host:0", "tcp://host",
        "tcp://host:99999", "tcp://[::1:5600", "http://host:5600", 5600, None,
    ],
)  # fmt: skip
def test_an_address_that_no_other_machine_reaches_is_none(address: object) -> None:
    assert terms(endpoints={"2": address}) == FetchTerms("decode", None, True)


def test_a_card_that_cannot_be_understood_takes_no_part() -> None:
    assert terms("agg") is terms(None) is terms(["decode"]) is None
    assert terms(takes="true") == FetchTerms("decode")
    assert terms(endpoints=[SOURCE]) == FetchTerms("decode", None, True)


def test_names_of_blocks_follow_what_an_engine_stores_and_removes() -> None:
    index, rank = PrefixIndex(), WorkerRank(1)
    hashes = block_hashes(PROMPT, BLOCK)
    sequence = sequence_hashes(hashes)

    def change(update: BlockUpdate) -> None:
        assert index.apply(RouterEvent(1, KvChange(0, update))) == "ok"

    def store(names: list[int], of: Sequence[int], parent: int | None = None) -> None:
        change(BlockUpdate(stored=BlocksAdded([HeldBlock(*each) for each in zip(names, of, strict=True)], parent)))

    store([11, 12, 13], hashes[:3])
    assert index.engine_names(rank, sequence) == [11, 12, 13]
    change(BlockUpdate(removed=BlocksDropped([12])))
    assert index.engine_names(rank, sequence) == [11]
    store([22], hashes[1:2], 11)
    store([14], hashes[3:4], 13)
    assert index.engine_names(rank, sequence) == [11, 22, 13, 14]
    assert index.engine_names(WorkerRank(2), sequence) == []
