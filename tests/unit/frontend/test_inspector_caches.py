"""The prefix caches in the inspector: what the index knows of each worker, which prompts hit, and which prefixes are hot."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.parts.inspector.caches import MAX_WORKERS, CacheTable, Evictions, merged_caches
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.figures import HISTORY_SLOTS, MINUTE_SLOTS
from dynamo.frontend.parts.inspector.tables import MAX_REQUESTS, TokenRates
from dynamo.frontend.pipeline.plan import Tally
from dynamo.kv.overlap import WorkerRank
from dynamo.protocol.inspector.views import CacheView
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.kv_events.rank_events import CacheEvents
from dynamo.worker.kv_publishing.publisher import KvEventPublisher
from dynamo.worker.kv_publishing.recovery import KvRecovery
from support.frontend_cluster import Cluster, ScriptedWorker, cluster, say
from support.inspecting import Lens
from support.patience import PATIENCE_SECONDS

BLOCK = 4
PROMPT = list(range(1, 18))  # four blocks and a token
HIT: dict[str, Any] = {"completion_usage": {"prompt_tokens_details": {"cached_tokens": 12}}}


async def add(house: Cluster, *, ranks: int = 1, **extra: Any) -> ScriptedWorker:
    config = ModelRuntimeConfig(total_kv_blocks=1000, data_parallel_size=ranks)
    return await house.worker(say("x", extra=extra or None), kv_cache_block_size=BLOCK, runtime_config=config)


def name_of(worker: ScriptedWorker) -> str:
    return f"{worker.endpoint.connection_id():x}"


async def test_caches_and_prefixes_show_what_was_routed_where(tmp_path: Path) -> None:
    settings = KvRouterSettings(use_kv_events=False)  # then the index learns from what was routed
    async with cluster(tmp_path, router_mode="kv", kv_router=settings) as house:
        worker, other = await add(house, **HIT), await add(house, **HIT)
        lens = Lens(house)
        before = await lens.get("snapshot", views="caches,prefixes,workers")
        assert before["prefixes"] == []
        # The router reads the ranks with its first choice; until then nothing is claimed of their blocks.
        assert [(row["blocks_known"], row["hit_share"]) for row in before["caches"]] == [(None, None), (None, None)]
        for _ in range(3):
            assert (await house.client.completion(PROMPT)).status == 200
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (await lens.get("snapshot", views="streams"))["streams"]:
                    pass  # the next one finds its worker idle again, so it goes to the same one
        picture = await lens.get("snapshot", views="caches,workers")
        rows = {row["id"]: row for row in picture["caches"]}
        chosen, idle = (worker, other) if worker.requests else (other, worker)
        row = rows[name_of(chosen)]
        assert (row["blocks_known"], row["blocks_total"], row["tiers"]) == (4, 1000, {"device": 4})
        assert (row["index_share"], row["trust"], row["model"], row["block_size"]) == (1.0, "predicted", "m", BLOCK)
        assert (row["evicted_blocks_per_minute"], row["gaps"], row["resyncs"]) == (None, None, None)
        assert row["hit_share"] == round(12 / 17, 4)
        assert row["hit_blocks_per_minute"] > 0
        assert rows[name_of(idle)]["hit_share"] is None
        shares = {each["id"]: each["prefix_hit_share"] for each in picture["workers"]}
        assert shares == {name_of(chosen): round(12 / 17, 4), name_of(idle): None}


async def test_hot_prefixes_are_those_that_the_last_prompts_hit(tmp_path: Path) -> None:
    settings = KvRouterSettings(use_kv_events=False)
    async with cluster(tmp_path, router_mode="kv", kv_router=settings) as house:
        worker = await add(house)
        inspector, lens = house.frontend.parts["inspector"].inspector, Lens(house)
        assert inspector is not None
        await lens.get("snapshot", views="prefixes")  # from now on choices are kept
        for tail in (90, 91, 91):
            await house.client.completion([*PROMPT[:16], *[tail] * 4])
        inspector.tables.caches._looked_at = None
        picture = await lens.get("snapshot", views="prefixes")
        assert picture["totals"]["prefixes"] == len(picture["prefixes"])
        first, second = picture["prefixes"]
        # One worker holds all of it, so the common beginning and the first end are one stretch; the other one leaves it midway.
        assert (first["blocks"], first["depth"], first["hits"], first["holders"]) == (5, 5, 2, [name_of(worker)])
        assert (second["blocks"], second["depth"], second["hits"]) == (1, 5, 1)
        assert second["parent"] not in (None, first["id"])


async def test_without_an_index_nothing_is_claimed_of_blocks(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="round-robin") as house:
        await add(house, **HIT)
        await house.client.completion(PROMPT)
        picture = await Lens(house).get("snapshot", views="caches,prefixes")
        (row,) = picture["caches"]
        assert (row["blocks_known"], row["trust"], row["index_share"]) == (None, None, None)
        assert (row["evicted_blocks_per_minute"], row["gaps"], row["resyncs"]) == (None, None, None)
        assert row["hit_share"] == round(12 / 17, 4)
        assert picture["prefixes"] == []


async def test_evictions_and_gaps_are_those_of_the_workers_whose_events_are_followed(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="kv") as house:
        worker, silent = await add(house, ranks=2), await add(house)
        publishers, recoveries = [], []
        for rank in (0, 1):
            channel = worker.endpoint.event_channel("kv-events")
            made = KvEventPublisher(worker.endpoint, kv_block_size=BLOCK, dp_rank=rank, channel=channel)
            recoveries.append(await KvRecovery.begin(worker.endpoint, made, channel.publisher_id))
            publishers.append(made)
        cards = house.frontend.models._rules.cards
        assert cards is not None
        followers = [each for domains in cards.domains for each in domains._followers.values()]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while sum(each.feed.dumps for each in followers if each.feed is not None) < len(publishers):
                await asyncio.sleep(0.005)  # what is evicted before a rank has sent its first state is not counted
        table = CacheTable(house.frontend.models, InspectorClock())  # whose slots end when this test says so

        async def until(*expected: float | None) -> None:
            row: CacheView | None = None
            async with asyncio.timeout(PATIENCE_SECONDS):
                while row is None or (row.evicted_blocks_per_minute, row.gaps, row.resyncs) != expected:
                    await asyncio.sleep(0.005)
                    row = next(each for each in table.rows() if each.id == name_of(worker))

        await until(0.0, 0, 0)
        publishers[0].publish_stored(PROMPT[:16], [BLOCK] * 4, [1, 2, 3, 4])
        publishers[0].publish_removed([4, 3])
        await until(24.0, 0, 0)  # two blocks within the first slot of five seconds
        table.sample()
        await until(12.0, 0, 0)
        publishers[0].publish_removed([2])
        await until(18.0, 0, 0)
        for _ in range(MINUTE_SLOTS):
            table.sample()
        await until(0.0, 0, 0)
        rows = {row.id: row for row in table.rows()}
        other = rows[name_of(silent)]
        assert (other.evicted_blocks_per_minute, other.gaps, other.resyncs) == (None, None, None)
        for recovery in recoveries:
            await recovery.close()
        await until(None, None, None)


def test_a_rank_that_comes_back_counts_evictions_from_zero() -> None:
    evictions, rank, other = Evictions(), WorkerRank(7, 0), WorkerRank(7, 1)
    evictions.end_slot({rank: CacheEvents(10), other: CacheEvents(5)})
    evictions.end_slot({rank: CacheEvents(12)})
    assert evictions.per_minute({rank: CacheEvents(3)}) == {7: 80.0}  # 15, 2 and 3 in a quarter of a minute
    assert evictions.per_minute({}) == {}


async def test_what_is_counted_is_bounded_and_forgotten(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        assert house.frontend.parts["inspector"].inspector is not None
        table = CacheTable(house.frontend.models, InspectorClock())
        for number in range(MAX_WORKERS + 5):
            tally = Tally(10)
            tally.note_cached(0, 4)
            tally.prefill_instance_id = number
            table.ended(tally)
        assert len(table._hits) == MAX_WORKERS
        assert (table.hit_share(3), table.hit_share(MAX_WORKERS + 1)) == (0.4, None)
        for _ in range(HISTORY_SLOTS + 1):
            table.sample()
        assert len(table._hits) == 0


def test_the_caches_of_several_processes_are_one() -> None:
    one = CacheView(
        id="a", model="m", role="decode", block_size=4, blocks_known=10, prompt_blocks_per_minute=100.0,
        hit_blocks_per_minute=50.0, hit_share=0.5, history=[1.0, 2.0],
    )  # fmt: skip
    two = CacheView(
        id="a", model="m", role="decode", block_size=4, blocks_known=12, prompt_blocks_per_minute=300.0,
        hit_blocks_per_minute=0.0, hit_share=0.0, history=[3.0],
    )  # fmt: skip
    idle = CacheView(id="b", model="m", role="decode", block_size=4)
    one.evicted_blocks_per_minute, one.gaps, two.evicted_blocks_per_minute, two.gaps = 40.0, 1, 30.0, 2
    merged, rest = merged_caches([[one], [two, idle]])
    assert (merged.evicted_blocks_per_minute, merged.gaps, merged.resyncs) == (40.0, 2, None)
    assert (merged.blocks_known, merged.hit_share, merged.history) == (12, 0.125, [1.0, 5.0])
    assert rest == idle


def test_the_rates_of_a_request_count_the_seconds_that_nobody_looked() -> None:
    rates = TokenRates()
    assert rates.look("a", 10, 100.0) == []
    assert rates.look("a", 30, 101.0) == [20.0]
    assert rates.look("a", 30, 104.0) == [20.0, 0.0, 0.0, 0.0]
    assert rates.look("a", 40, 104.2) == [20.0, 0.0, 0.0, 0.0]  # too soon after the last look
    assert len(rates.look("a", 50, 1000.0)) == 60
    for number in range(MAX_REQUESTS):
        rates.look(f"{number}", 0, 0.0)
    assert rates.of("a") == []


@pytest.mark.parametrize("slots", [1, HISTORY_SLOTS + 3])
async def test_the_history_of_a_cache_has_an_entry_for_each_slot(tmp_path: Path, slots: int) -> None:
    async with cluster(tmp_path) as house:
        await add(house, **HIT)
        await house.client.completion(PROMPT)
        inspector = house.frontend.parts["inspector"].inspector
        assert inspector is not None
        for _ in range(slots):
            inspector.tables.caches.sample()
        found = inspector.tables.caches.rows()
        history = [row.history for row in found]
        assert history == ([[36.0]] if slots == 1 else [[]])  # three blocks in five seconds; long idle: forgotten
