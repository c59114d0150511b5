"""The upkeep of a large fleet is in proportion to what changed of it, and no piece of it holds up the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.models.cards import CardBook, Scope
from dynamo.kv.events import BlocksAdded, BlockUpdate, HeldBlock, KvChange, RouterEvent
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.active_load import ActiveLoad
from dynamo.placement.kv_query import RankInfo
from dynamo.placement.policies.round_robin import RoundRobin
from dynamo.placement.rank_states import RankStates
from dynamo.placement.replica_events import BookedPrompt, BookedWorker, BookingEvent, decode_bookings
from dynamo.placement.timing_learner import TimingLearner
from dynamo.protocol.records import LoraRecord, ModelCard, ModelRecord, ModelRuntimeConfig
from dynamo.router.dispatch import stall_detector
from dynamo.router.dispatch.stall_detector import StallDetector, StallKind, StallPolicy
from dynamo.router.kv.domain import DomainMembers, KvDomain
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.peers.replica_sync import BATCH_SECONDS, STEP_SECONDS, BookingOutbox
from dynamo.router.workers import busy_workers
from dynamo.router.workers.busy_workers import BusyThresholds, BusyWorkers, LoadReport
from dynamo.router.workers.pool import ModelPool
from dynamo.runtime.calls.instances import encode_instance
from dynamo.runtime.discovery.base import INSTANCES, MODEL_CARDS, Delete, Put
from dynamo.runtime.discovery.memory import MemoryDiscovery, shared_hub
from dynamo.runtime.observe.metrics import MetricsRegistry
from dynamo.worker.registration import build_card
from support.frontend_cluster import cluster
from support.patience import PATIENCE_SECONDS
from support.properties import examples

PATH = "ns.c.e"
WORKERS = "dynamo_frontend_model_workers"


class Counted:
    """Counts the calls of a method, which does what it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.calls, method = 0, getattr(owner, name)

        def count(*args: Any, **more: Any) -> Any:
            self.calls += 1
            return method(*args, **more)

        monkeypatch.setattr(owner, name, count)

    def taken(self) -> int:
        """The calls since the last question."""
        calls, self.calls = self.calls, 0
        return calls


# -- loads ---------------------------------------------------------------------------------------------------------------


async def test_a_load_report_is_judged_once_for_a_model_and_its_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(busy_workers, "BUSY_SECONDS", 0.05)
    pools = [ModelPool(f"m{number}", {}, RoundRobin()) for number in range(21)]
    for pool in pools:
        pool.set_members((PATH, worker) for worker in range(1000))
        pool.runtime_config = ModelRuntimeConfig(total_kv_blocks=100)
        assert pool.member_ids is pool.member_ids
    judged = Counted(monkeypatch, BusyThresholds, "is_busy")
    limits = BusyThresholds("", 0.5)
    workers = BusyWorkers(lambda: pools, lambda _: limits)
    for worker in range(200):
        workers.report(LoadReport(worker, 0, 90))
    assert judged.taken() == 200
    assert all(len(pool.busy) == 200 for pool in pools)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while any(pool.busy for pool in pools):  # each is tried again
            await asyncio.sleep(0.01)
    workers.close()


# -- cards and ranks -----------------------------------------------------------------------------------------------------


class Member:
    """A worker at an endpoint, whose card is read."""

    def __init__(self, instance_id: int, endpoint: str = PATH, ranks: range = range(1)) -> None:
        self.endpoint, self.instance_id, self.reads = endpoint, instance_id, 0
        self._card = ModelCard(
            display_name="m",
            runtime_config=ModelRuntimeConfig(data_parallel_start_rank=ranks.start, data_parallel_size=len(ranks)),
        )

    @property
    def card(self) -> ModelCard:
        self.reads += 1
        return self._card


def test_a_domain_reads_the_cards_of_those_that_come_and_go_only() -> None:
    members = DomainMembers()
    fleet = {owner: [Member(worker) for worker in range(300)] for owner in range(5)}
    for owner, of_owner in fleet.items():
        members.update(owner, of_owner)
    for each in (each for of_owner in fleet.values() for each in of_owner):
        each.reads = 0
    gone, changed = members.update(3, [*fleet[3][1:], Member(1000)])
    assert (gone, changed) == (set(), {WorkerRank(1000)})
    assert not any(each.reads for of_owner in fleet.values() for each in of_owner if each.instance_id)


owners = st.dictionaries(
    st.tuples(st.integers(0, 4), st.sampled_from(["n.c.a", "n.c.b"])), st.integers(1, 3), max_size=6
)


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 2), owners), max_size=12))
def test_a_domain_has_the_ranks_and_places_of_all_its_owners(
    steps: list[tuple[int, dict[tuple[int, str], int]]],
) -> None:
    members, known = DomainMembers(), dict[int, dict[tuple[int, str], Member]]()
    for owner, wanted in steps:
        before, former = known.get(owner, {}), dict(members.cards)
        known[owner] = {
            key: each
            if (each := before.get(key)) is not None and each.card.runtime_config.data_parallel_size == ranks
            else Member(key[0], key[1], range(ranks))
            for key, ranks in wanted.items()
        }
        gone, changed = members.update(owner, known[owner].values())
        there = [each for of_owner in known.values() for each in of_owner.values()]
        expected = {WorkerRank(each.instance_id, rank) for each in there for rank in each.card.runtime_config.ranks}
        assert members.cards.keys() == expected
        assert gone == former.keys() - expected
        assert changed == {rank for rank, card in members.cards.items() if former.get(rank) is not card}
        assert members.endpoints == {each.endpoint for each in there}
        assert members.places.keys() == {each.instance_id for each in there}
        assert all(
            place in {each.endpoint for each in there if each.instance_id == worker}
            for worker, place in members.places.items()
        )


def card(worker: int, adapter: str | None = None, seqs: int = 8, ranks: int = 1) -> Put:
    config = ModelRuntimeConfig(total_kv_blocks=100, max_num_seqs=seqs, data_parallel_size=ranks)
    made = build_card(adapter or "m", runtime_config=config)
    if adapter is not None:
        made.lora = LoraRecord(adapter)
    record = ModelRecord(
        namespace="ns", component="c", endpoint="e", instance_id=worker, card_json=made.to_json(), model_suffix=adapter
    )
    return Put(f"{MODEL_CARDS}/{record.key}", record.encode())


def test_a_group_is_the_same_object_until_a_card_of_it_has_changed() -> None:
    book = CardBook(Scope())
    (key,) = book.apply([card(1), card(2, seqs=4, ranks=2)])
    other = book.apply([card(1, "a")])[0]
    group = book.group(key)
    assert group is not None
    assert group is book.group(key)
    book.apply([card(2, "a")])
    assert group is book.group(key)
    assert (book.names, book.size, book.base_names()) == ({"m", "a"}, 4, {1: "m", 2: "m"})
    book.apply([Delete(card(1).key), Delete(card(1, "a").key)])
    changed = book.group(key)
    assert changed is not None
    assert [(each.instance_id, each.ranks, each.requests) for each in changed.accepted] == [(2, range(2), 8)]
    book.apply([Delete(card(number, name).key) for number in (2,) for name in (None, "a")])
    assert (book.names, book.endpoints, book.size, key in book, other in book) == (set(), set(), 0, False, False)


class Store:
    """The records of workers that only stand in the store."""

    def __init__(self) -> None:
        self._store = MemoryDiscovery(shared_hub(asyncio.get_running_loop()))

    async def join(self, *workers: int) -> None:
        await self._store.start()
        for worker in workers:
            record = encode_instance("ns", "c", "e", worker, {"transport": {"mem": str(worker)}})
            await self._store.put(f"{INSTANCES}/ns/c/e/{worker:x}", record)
            for put in (card(worker), card(worker, "a"), card(worker, "b")):
                await self._store.put(put.key, put.value)

    async def leave(self, worker: int) -> None:
        for key in (f"{INSTANCES}/ns/c/e/{worker:x}", *(card(worker, name).key for name in (None, "a", "b"))):
            await self._store.delete(key)


async def test_a_worker_that_joins_or_leaves_costs_a_frontend_as_much_as_it_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos, states = Counted(monkeypatch, KvDomain, "_info"), Counted(monkeypatch, RankStates, "_state")
    store = Store()
    async with cluster(tmp_path, router_mode="kv", kv_router=KvRouterSettings()) as house:
        models = house.frontend.models

        async def settled(count: int) -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(models.served()) < 3 or any(
                    {
                        len(pool.listed_ids),
                        pool.workers,
                        house.metric(WORKERS, model=pool.name, worker_type="aggregated"),
                    }
                    != {count}
                    for pool in models.pools()
                ):
                    await asyncio.sleep(0.01)
            placement = models.served()[0].kv
            assert placement is not None
            while len(placement.current_router().records()) != count:  # of a whole fleet one look takes a part
                assert placement.is_stale

        await store.join(*range(1, 201))
        await settled(200)
        assert infos.taken() >= 200
        states.taken()
        await store.join(201)
        await settled(201)
        assert (infos.taken(), states.taken()) == (1, 1)
        assert {model.name: model.workers for model in models.served()} == {"m": 201, "a": 201, "b": 201}
        await store.leave(7)
        await settled(200)
        assert (infos.taken(), states.taken()) == (0, 0)


def test_the_records_of_ranks_are_kept_where_nothing_of_them_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Counted(monkeypatch, RankStates, "_state")
    load = ActiveLoad(16)
    states = RankStates(load, TimingLearner())
    ranks = {WorkerRank(number): RankInfo(total_kv_blocks=100) for number in range(1, 500, 2)}
    states.set(ranks)
    states.current()
    assert made.taken() == len(ranks)
    load.add("r", WorkerRank(5), [1], prompt_tokens=16, cached_tokens=0, now=0.0)
    ranks = {**ranks, WorkerRank(4): RankInfo(total_kv_blocks=7), WorkerRank(9): RankInfo(total_kv_blocks=8)}
    del ranks[WorkerRank(3)]
    states.set(ranks)
    found = {record.rank: record for record in states.current()}
    assert made.taken() == 3  # the one that joined, the one that is known otherwise, and the one with a request
    assert list(found) == sorted(ranks)
    sizes = (found[WorkerRank(4)].total_kv_blocks, found[WorkerRank(9)].total_kv_blocks)
    assert (sizes, found[WorkerRank(5)].requests) == ((7, 8), 1)
    assert all(states.loads[states.known.place(rank)] is load.of(rank) for rank in ranks)


def stored(worker: int, first: int) -> RouterEvent:
    blocks = [HeldBlock(first + at, first + at) for at in range(10)]
    return RouterEvent(worker, KvChange(0, BlockUpdate(stored=BlocksAdded(blocks))))


def test_a_rank_that_is_forgotten_leaves_room_for_another_one() -> None:
    index = PrefixIndex(max_ranks=2)
    hashes: dict[int, list[int]] = {}
    for turn in range(6):
        for worker in (1, 2):
            assert index.apply(stored(10 * turn + worker, 1000 * worker)) == "ok"
        (rank,) = [each for each in index._device.ranks if each[0] == 10 * turn + 1]
        hashes[turn] = index._device.holders.blocks_of(index._device.ranks[rank].bit)
        index.forget(10 * turn + 1, 0)
        assert index.blocks() == 10
        assert WorkerRank(10 * turn + 1) not in index.find(hashes[turn][:1])
        index.forget(10 * turn + 2)
    assert index.blocks() == 0


# -- metrics -------------------------------------------------------------------------------------------------------------


def test_the_series_of_many_workers_that_leave_go_without_a_search() -> None:
    registry = MetricsRegistry()
    workers = FrontendMetrics(registry, env={}).workers
    workers.keep_only(dict.fromkeys(range(1500), "aggregated"))
    for worker in range(1500):
        workers.answered(worker, 0.1, 10, 0.01)
        workers.loaded(worker, 0, 1, 1)
    began = time.process_time()
    workers.keep_only({7: "aggregated"})
    assert time.process_time() - began < 0.3  # a search through all series takes 1.3 s, and this 3 ms
    assert {line for line in registry.expose().splitlines() if b"worker_id=" in line and b'"7"' not in line} == set()
    assert registry.expose().count(b'worker_id="7"') == 5


# -- stalls --------------------------------------------------------------------------------------------------------------


class Stream:
    """A stream that never has a token."""

    request_id, attempts, is_reading = "r", 1, True

    def __init__(self, worker: int, seen: list[int]) -> None:
        self.instance_id, self._seen, self.left = worker, seen, 0

    @property
    def tokens(self) -> int:
        self._seen[-1] += 1
        return 0

    def fail_over(self, error: Exception, *, is_worker_fault: bool, is_last: bool) -> bool:
        self.left += 1
        return True


async def test_the_stalls_of_many_streams_are_looked_for_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_detector, "EXAMINED_AT_ONCE", 50)
    seen, found = [0], list[StallKind]()
    detector = StallDetector(StallPolicy(0.0, first_token_seconds=0.2), found.append)
    streams = [Stream(number % 7, seen) for number in range(1000)]
    for each in streams:
        detector.add(each)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not all(each.left for each in streams):
            detector.remove(streams[3]) if len(seen) == 30 else None  # between two pieces
            streams[3].left = 1
            await asyncio.sleep(0)
            seen.append(0)
    for each in streams:
        detector.remove(each)
    assert len(detector) == 0
    assert set(found) == {StallKind.FIRST_TOKEN}
    assert 0 < max(seen) <= 200  # a piece of both passes, of which one ends with all streams of a worker


# -- replicas ------------------------------------------------------------------------------------------------------------


class Published:
    """A publisher that keeps what it is given."""

    publisher_id = 1

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def publish(self, payload: bytes) -> int:
        self.payloads.append(payload)
        return len(self.payloads)

    async def close(self) -> None: ...


def events() -> Iterator[BookingEvent]:
    for number in range(10):
        yield BookingEvent(f"r{number}", BookedWorker(1), "MarkPrefillCompleted", 9)
        yield BookingEvent(f"r{number}", BookedWorker(1), "Free", 9)


async def test_steps_wait_for_a_booking_and_share_its_message() -> None:
    loop, publisher = asyncio.get_running_loop(), Published()
    outbox = BookingOutbox(publisher, is_batching=True)
    began = loop.time()
    for event in events():
        outbox.put(event)
    assert outbox._timer is not None
    assert outbox._timer.when() >= began + STEP_SECONDS
    outbox.put(BookingEvent("new", BookedWorker(1), BookedPrompt([1, 2]), 9))
    assert outbox._timer.when() <= loop.time() + BATCH_SECONDS
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not publisher.payloads:
            await asyncio.sleep(0)
    assert [each.request_id for each in decode_bookings(publisher.payloads[0])][-1] == "new"
    assert len(decode_bookings(publisher.payloads[0])) == 21
