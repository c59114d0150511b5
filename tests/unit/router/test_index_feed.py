"""A router's view of the workers' caches, over real planes: it is whole whatever is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.kv.events import (
    MAX_EVENT_BLOCKS,
    MAX_EVENT_BYTES,
    MAX_EVENTS,
    MAX_MESSAGE_BYTES,
    PIECE_BLOCKS,
    BadEvents,
    BlockUpdate,
    RouterEvent,
    blocks_of,
    read_answer,
    read_events,
    split_events,
)
from dynamo.kv.overlap import WorkerRank
from dynamo.router import KvEventFeed
from dynamo.router.kv_events.rank_events import CacheEvents
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.endpoint import EndpointEvents
from dynamo.worker.kv_publishing.publisher import KvEventPublisher
from dynamo.worker.kv_publishing.recovery import KvRecovery
from support.cases import each_case
from support.patience import PATIENCE_SECONDS

PATH = "ns.c.generate"
TOKENS = [1, 2, 3, 4]


class Index:
    """The truth as a router sees it: the blocks of each rank."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], set[int]] = {}
        self.seen: list[RouterEvent] = []
        self.changed = asyncio.Event()

    def apply(self, event: RouterEvent) -> None:
        held = self.held.setdefault((event.worker_id, event.event.dp_rank), set())
        data = event.event.data
        if data == "cleared":
            held.clear()
        elif data.stored is not None:
            held.update(block.block_hash for block in data.stored.blocks)
        elif data.removed is not None:
            held.difference_update(data.removed.block_hashes)
        self.seen.append(event)
        self.changed.set()

    def forget(self, worker_id: int, dp_rank: int) -> None:
        self.held.pop((worker_id, dp_rank), None)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Leaky:
    """A channel that loses what it is told to lose."""

    def __init__(self, channel: EndpointEvents) -> None:
        self._channel = channel
        self.publisher_id = channel.publisher_id
        self.is_losing = False

    def publish(self, payload: Any) -> None:
        if not self.is_losing:
            self._channel.publish(payload)


class Worker:
    def __init__(self, runtime: DistributedRuntime, *, dp_rank: int = 0) -> None:
        self.endpoint = runtime.endpoint(PATH)
        self.channel = Leaky(self.endpoint.event_channel("kv-events"))
        self.publisher = KvEventPublisher(self.endpoint, kv_block_size=4, dp_rank=dp_rank, channel=self.channel)
        self.rank = self.publisher.rank
        self.recovery: KvRecovery | None = None

    async def offer_recovery(self) -> None:
        self.recovery = await KvRecovery.begin(self.endpoint, self.publisher, self.channel.publisher_id)

    def store(self, *hashes: int) -> None:
        for block_hash in hashes:
            self.publisher.publish_stored(TOKENS, [4], [block_hash])


def counts_of(feed: KvEventFeed, worker: Worker) -> CacheEvents:
    return dict(feed.counts())[WorkerRank(*worker.publisher.rank)]


@pytest.fixture(params=["mem", "zmq"])
async def plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DYN_EVENT_PLANE_HOST", "127.0.0.1")
    return str(request.param)


@asynccontextmanager
async def runtime(plane: str, tmp_path: Path) -> AsyncIterator[DistributedRuntime]:
    async with DistributedRuntime(None, None, "mem", event_plane=plane, discovery=FileDiscovery(tmp_path)) as made:
        yield made


async def test_a_router_that_comes_late_is_told_everything_and_then_follows(plane: str, tmp_path: Path) -> None:
    async with runtime(plane, tmp_path) as working, runtime(plane, tmp_path) as routing:
        worker = Worker(working)
        worker.store(1, 2, 3)
        await worker.offer_recovery()
        index = Index()
        async with KvEventFeed(routing.endpoint(PATH), index) as feed:
            await index.until(lambda: index.held.get(worker.rank) == {1, 2, 3})
            worker.publisher.publish_removed([2])
            block_hash = 100
            async with asyncio.timeout(PATIENCE_SECONDS):
                while 100 not in index.held.get(
                    worker.rank, ()
                ):  # a subscription takes a moment; what it misses is a gap
                    worker.store(block_hash)
                    block_hash += 1
                    await asyncio.sleep(0.02)
            await index.until(lambda: index.held[worker.rank] == {1, 3, *range(100, block_hash)})
            assert feed.dumps == 1
        assert worker.recovery is not None
        await worker.recovery.close()


async def test_lost_events_are_asked_for_and_nothing_is_applied_twice(plane: str, tmp_path: Path) -> None:
    async with runtime(plane, tmp_path) as working, runtime(plane, tmp_path) as routing:
        worker = Worker(working, dp_rank=3)
        await worker.offer_recovery()
        index = Index()
        async with KvEventFeed(routing.endpoint(PATH), index) as feed:
            await index.until(lambda: feed.dumps == 1)  # of a worker that has said nothing yet
            expected = set[int]()
            for turn in range(5):
                worker.channel.is_losing = True
                worker.store(turn * 10 + 1, turn * 10 + 2)
                await asyncio.sleep(0)  # the outbox is emptied on the loop
                await asyncio.sleep(0)
                worker.channel.is_losing = False
                number = turn * 10 + 3
                expected |= {turn * 10 + 1, turn * 10 + 2}
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while not expected <= index.held.get(worker.rank, set()):
                        worker.store(number)
                        expected.add(number)
                        number += 1
                        await asyncio.sleep(0.02)
            await index.until(lambda: index.held[worker.rank] == expected)
            assert feed.gaps >= 4
            ids = [event.event.event_id for event in index.seen]
            assert feed.dumps == 1
            assert ids == sorted(set(ids))
        assert worker.recovery is not None
        await worker.recovery.close()


async def test_an_event_that_its_worker_does_not_know_is_asked_about_once(tmp_path: Path) -> None:
    async with runtime("mem", tmp_path) as working, runtime("mem", tmp_path) as routing:
        worker = Worker(working)
        await worker.offer_recovery()
        index = Index()
        async with KvEventFeed(routing.endpoint(PATH), index) as feed:
            worker.store(1)
            await index.until(lambda: index.held.get(worker.rank) == {1} and feed.dumps == 1)
            worker_id, dp_rank = worker.rank
            event = {"event_id": 2**40, "data": "cleared", "dp_rank": dp_rank}
            worker.channel.publish({"worker_id": worker_id, "event": event})
            await index.until(lambda: feed.gaps == 1 and feed.dumps >= 2)
            worker.store(2)  # what is true comes through again
            await index.until(lambda: index.held.get(worker.rank) == {1, 2})
            assert feed.gaps == 1
            assert feed.dumps <= 3
        assert worker.recovery is not None
        await worker.recovery.close()


async def test_many_events_in_the_name_of_a_worker_are_not_as_many_questions(tmp_path: Path) -> None:
    async with runtime("mem", tmp_path) as working, runtime("mem", tmp_path) as routing:
        worker = Worker(working)
        asked = 0
        answer = worker.publisher.answer

        def count(start: int | None, end: int | None) -> dict[str, Any]:
            nonlocal asked
            asked += 1
            return answer(start, end)

        worker.publisher.answer = count  # type: ignore[method-assign, assignment]
        await worker.offer_recovery()
        index = Index()
        async with KvEventFeed(routing.endpoint(PATH), index) as feed:
            await index.until(lambda: feed.dumps == 1)
            for number in range(500):
                event = {"event_id": 2**40 + number, "data": "cleared", "dp_rank": worker.rank[1]}
                worker.channel.publish([{"worker_id": worker.rank[0], "event": event}])
                await asyncio.sleep(0)
            worker.store(1)
            await index.until(lambda: index.held.get(worker.rank) == {1})
            assert asked < 10
        assert worker.recovery is not None
        await worker.recovery.close()


async def test_a_gap_too_old_for_the_worker_is_answered_with_everything(tmp_path: Path) -> None:
    async with runtime("mem", tmp_path) as working, runtime("mem", tmp_path) as routing:
        worker = Worker(working)
        await worker.offer_recovery()
        index = Index()
        async with KvEventFeed(routing.endpoint(PATH), index) as feed:
            worker.store(1)
            await index.until(lambda: index.held.get(worker.rank) == {1} and feed.dumps == 1)
            worker.channel.is_losing = True
            worker.publisher.publish_removed([1])
            for number in range(5000):
                worker.publisher.publish_stored(TOKENS, [4], [number + 10])
                if number % 1000 == 0:
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            worker.channel.is_losing = False
            worker.store(9)
            await index.until(lambda: index.held.get(worker.rank) == {9, *range(10, 5010)})
            assert feed.dumps == 2
            assert counts_of(feed, worker) == CacheEvents(evicted_blocks=0, gaps=1, resyncs=1)
        assert worker.recovery is not None
        await worker.recovery.close()


async def test_what_a_rank_evicts_is_counted_from_the_beginning_on_also_what_got_lost_on_the_way(
    tmp_path: Path,
) -> None:
    async with runtime("mem", tmp_path) as working, runtime("mem", tmp_path) as routing:
        worker, other = Worker(working, dp_rank=1), Worker(working, dp_rank=2)
        worker.store(1, 2, 3, 4, 5, 6)
        worker.publisher.publish_removed([1])  # before anybody followed it
        for each in (worker, other):
            await each.offer_recovery()
        index = Index()
        async with KvEventFeed(routing.endpoint(PATH), index) as feed:
            await index.until(lambda: index.held.get(worker.rank) == {2, 3, 4, 5, 6})
            await index.until(lambda: {rank for rank, _ in feed.counts()} == {worker.rank, other.rank})
            assert counts_of(feed, worker) == CacheEvents()
            worker.publisher.publish_removed([2, 3])
            await index.until(lambda: index.held[worker.rank] == {4, 5, 6})
            assert counts_of(feed, worker) == CacheEvents(evicted_blocks=2)
            worker.channel.is_losing = True
            worker.publisher.publish_removed([4, 5])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            worker.channel.is_losing = False
            worker.store(7)
            await index.until(lambda: index.held[worker.rank] == {6, 7})
            assert counts_of(feed, worker) == CacheEvents(evicted_blocks=4, gaps=1)
            worker.publisher.publish_cleared()
            await index.until(lambda: not index.held[worker.rank])
            assert counts_of(feed, worker) == CacheEvents(evicted_blocks=4, gaps=1)
            assert counts_of(feed, other) == CacheEvents()
            assert worker.recovery is not None
            await worker.recovery.close()
            await index.until(lambda: {rank for rank, _ in feed.counts()} == {other.rank})
        assert other.recovery is not None
        await other.recovery.close()


async def test_a_worker_that_leaves_is_forgotten_and_the_others_stay(tmp_path: Path) -> None:
    async with runtime("mem", tmp_path) as one, runtime("mem", tmp_path) as two, runtime("mem", tmp_path) as routing:
        leaving, staying = Worker(one), Worker(two)
        for worker in (leaving, staying):
            worker.store(1)
            await worker.offer_recovery()
        index = Index()
        async with KvEventFeed(routing.endpoint(PATH), index):
            await index.until(lambda: set(index.held) == {leaving.rank, staying.rank})
            assert leaving.recovery is not None
            await leaving.recovery.close()
            await index.until(lambda: set(index.held) == {staying.rank})
        assert staying.recovery is not None
        await staying.recovery.close()


async def test_without_recovery_a_gap_forgets_what_may_be_wrong(tmp_path: Path) -> None:
    async with runtime("mem", tmp_path) as working, runtime("mem", tmp_path) as routing:
        worker = Worker(working)
        index = Index()
        async with KvEventFeed(routing.endpoint(PATH), index) as feed:
            worker.store(1)
            await index.until(lambda: index.held.get(worker.rank) == {1})
            worker.channel.is_losing = True
            worker.publisher.publish_removed([1])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            worker.channel.is_losing = False
            worker.store(2)
            await index.until(lambda: index.held.get(worker.rank) == {2})
            assert feed.gaps == 1
            assert counts_of(feed, worker) == CacheEvents(evicted_blocks=0, gaps=1, resyncs=0)


async def test_rubbish_among_events_and_sources_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with runtime("mem", tmp_path) as working, runtime("mem", tmp_path) as routing:
        worker = Worker(working)
        key = f"v1/event_sources/{worker.endpoint.event_scope.channel_key('kv-events', 7)}"
        await working.discovery.put(key, b'{"type":"EventSource"}')
        index = Index()
        async with KvEventFeed(routing.endpoint(PATH), index):
            worker.endpoint.event_channel("kv-events").publish({"no": "event"})
            worker.store(5)
            await index.until(lambda: index.held.get(worker.rank) == {5})
    assert "is not read" in caplog.text


@each_case("item", [None, {}, {"a": 1, "b": 2}, {"Events": {"events": 3}}, {"TreeDump": {}}])
def test_an_answer_that_is_none_is_refused(item: Any) -> None:
    with pytest.raises(BadEvents):
        read_answer(item)


def test_a_single_event_is_read_as_well_as_a_list() -> None:
    assert read_answer({"TooNew": {"newest_available": 3}}).kind == "TooNew"
    with pytest.raises(BadEvents):
        read_events(b"\xc1")


# -- losses at the end -----------------------------------------------------------------------------------------------


async def lose(worker: Worker, *hashes: int) -> None:
    """Publish blocks in messages that are lost."""
    worker.channel.is_losing = True
    worker.store(*hashes)
    for _ in range(3):
        await asyncio.sleep(0)  # the outbox is emptied on the loop
    worker.channel.is_losing = False


async def test_a_loss_at_the_very_end_shows_when_the_worker_says_its_last_event_again(
    plane: str, tmp_path: Path
) -> None:
    async with runtime(plane, tmp_path) as working, runtime(plane, tmp_path) as routing:
        worker = Worker(working)
        await worker.offer_recovery()
        index = Index()
        async with KvEventFeed(routing.endpoint(PATH), index) as feed:
            worker.store(1)
            await index.until(lambda: index.held.get(worker.rank) == {1} and feed.dumps == 1)
            await lose(worker, 2, 3)  # nothing is published behind these
            await index.until(lambda: index.held.get(worker.rank) == {1, 2, 3})
            assert [event.event.event_id for event in index.seen][-2:] == [2, 3]
        assert worker.recovery is not None
        await worker.recovery.close()


async def test_a_worker_that_never_says_anything_twice_is_asked_once_after_each_silence(tmp_path: Path) -> None:
    async with runtime("mem", tmp_path) as working, runtime("mem", tmp_path) as routing:
        worker = Worker(working)
        worker.publisher._repeats.close()  # as a native worker
        asked: list[int | None] = []
        answer = worker.publisher.answer

        def count(start: int | None, end: int | None) -> dict[str, Any]:
            asked.append(start)
            index.changed.set()
            return answer(start, end)

        worker.publisher.answer = count  # type: ignore[method-assign, assignment]
        await worker.offer_recovery()
        index = Index()
        async with KvEventFeed(routing.endpoint(PATH), index) as feed:
            await index.until(lambda: feed.dumps == 1)
            worker.store(1)
            await index.until(lambda: asked == [None, 2])
            worker.store(2)
            await index.until(lambda: index.held.get(worker.rank) == {1, 2})
            await lose(worker, 3)
            await index.until(lambda: index.held.get(worker.rank) == {1, 2, 3})
            assert (asked, feed.dumps, feed.gaps) == ([None, 2, 3], 1, 0)
        assert worker.recovery is not None
        await worker.recovery.close()


# -- what no worker should send --------------------------------------------------------------------------------------


def stored_event(rank: tuple[int, int], event_id: int, names: Sequence[int]) -> dict[str, Any]:
    blocks = [{"block_hash": name, "tokens_hash": name} for name in names]
    data = {"stored": {"parent_hash": None, "blocks": blocks}}
    return {"worker_id": rank[0], "event": {"event_id": event_id, "data": data, "dp_rank": rank[1]}}


@each_case(
    "payload",
    [
        [stored_event((1, 0), 1, range(MAX_EVENT_BLOCKS + 1))],
        [stored_event((1, 0), 1, [1])] * (MAX_EVENTS + 1),
        [{**stored_event((1, 0), 1, [1]), "more": b"x" * MAX_EVENT_BYTES}],
        stored_event((1, 0), 2**63, [1]),
        stored_event((1, 0), -1, [1]),
    ],
)
def test_an_event_or_message_beyond_its_bounds_is_refused(payload: object) -> None:
    with pytest.raises(BadEvents):
        read_events(msgspec.msgpack.encode(payload))
    with pytest.raises(BadEvents):
        split_events(bytes(MAX_MESSAGE_BYTES + 1))


@each_case("last", [2**63, -1])
def test_an_answer_with_an_event_id_beyond_its_bounds_is_refused(last: int) -> None:
    with pytest.raises(BadEvents, match="last_event_id"):
        read_answer({"Events": {"events": [], "last_event_id": last}})


async def test_what_is_refused_is_a_gap_which_is_filled(tmp_path: Path) -> None:
    async with runtime("mem", tmp_path) as working, runtime("mem", tmp_path) as routing:
        worker = Worker(working)
        await worker.offer_recovery()
        index, refused = Index(), list[str]()
        async with KvEventFeed(routing.endpoint(PATH), index, on_refused=refused.append) as feed:
            await index.until(lambda: feed.dumps == 1)
            worker.endpoint.event_channel("kv-events").publish(
                [stored_event(worker.rank, 1, range(MAX_EVENT_BLOCKS + 1)), stored_event(worker.rank, 2, [2])]
            )
            worker.store(1)
            await index.until(lambda: index.held.get(worker.rank) == {1} and refused == ["unreadable"])
            worker.store(3)
            await index.until(lambda: index.held.get(worker.rank) == {1, 3})
        assert worker.recovery is not None
        await worker.recovery.close()


async def test_an_index_that_fails_costs_the_rank_and_not_the_feed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fragile(Index):
        def apply(self, event: RouterEvent) -> None:
            if event.worker_id == bad.rank[0]:
                raise ValueError("no such luck")
            super().apply(event)

    async with runtime("mem", tmp_path) as one, runtime("mem", tmp_path) as two, runtime("mem", tmp_path) as routing:
        bad, good = Worker(one), Worker(two)
        for worker in (bad, good):
            await worker.offer_recovery()
        index, refused = Fragile(), list[str]()
        async with KvEventFeed(routing.endpoint(PATH), index, on_refused=refused.append) as feed:
            await index.until(lambda: feed.dumps == 2)
            bad.store(1, 2)
            good.store(3)
            await index.until(lambda: index.held.get(good.rank) == {3} and "failed" in refused)
            good.store(4)
            await index.until(lambda: index.held.get(good.rank) == {3, 4})
        for worker in (bad, good):
            assert worker.recovery is not None
            await worker.recovery.close()


async def test_a_whole_cache_is_applied_in_pieces_between_which_others_run(tmp_path: Path) -> None:
    """The longest turn is counted in blocks: this machine's speed does not matter."""
    turns: list[int] = []
    applied = 0

    class Counting(Index):
        def apply(self, event: RouterEvent) -> None:
            nonlocal applied
            applied += blocks_of(event)
            super().apply(event)

    async def tick() -> None:
        nonlocal applied
        while True:
            turns.append(applied)
            applied = 0
            await asyncio.sleep(0)

    async with runtime("mem", tmp_path) as working, runtime("mem", tmp_path) as routing:
        worker = Worker(working)
        names = list(range(1, 30_001))
        long = [{"block_hash": name, "tokens_hash": name} for name in names]
        wrapped = stored_event(worker.rank, 0, ()) | {}
        wrapped["event"]["data"]["stored"]["blocks"] = long
        answer = {"TreeDump": {"events": [wrapped], "last_event_id": 7, "reset_scope": "all"}}
        worker.publisher.answer = lambda start, end: answer  # type: ignore[method-assign, assignment]
        await worker.offer_recovery()
        index = Counting()
        ticking = asyncio.create_task(tick())
        async with KvEventFeed(routing.endpoint(PATH), index):
            await index.until(lambda: index.held.get(worker.rank) == set(names))
        ticking.cancel()
        assert max(turns) <= 2 * PIECE_BLOCKS
        chain = [event.event.data for event in index.seen]
        assert [each.stored.parent_hash for each in chain if isinstance(each, BlockUpdate) and each.stored] == [
            None,
            *range(PIECE_BLOCKS, 30_000, PIECE_BLOCKS),
        ]
        assert worker.recovery is not None
        await worker.recovery.close()
