"""Routers that keep one account, over real event planes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import KvQuery, RankInfo
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.placement.replica_events import (
    MAX_BATCH,
    BookedPrompt,
    BookedWorker,
    BookingEvent,
    PrefillHint,
    decode_bookings,
    encode_bookings,
)
from dynamo.placement.session_affinity import SessionAffinity, SessionLease
from dynamo.router.kv.router import KvRouter, KvRouterOptions
from dynamo.router.peers.replica_sync import BINDINGS_TOPIC, BOOKINGS_TOPIC, BookingOutbox, ReplicaSync, SessionSync
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from support.patience import PATIENCE_SECONDS
from support.processes import until

PATH = "ns.c.generate"
A, B = WorkerRank(1), WorkerRank(2, 1)
BLOCK = 16
PROMPT = list(range(100))  # six complete blocks and a bit


@asynccontextmanager
async def runtime(plane: str, tmp_path: Path) -> AsyncIterator[DistributedRuntime]:
    async with DistributedRuntime(None, None, "mem", event_plane=plane, discovery=FileDiscovery(tmp_path)) as made:
        yield made


@pytest.fixture(params=["mem", "zmq"])
def plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DYN_EVENT_PLANE_HOST", "127.0.0.1")
    return str(request.param)


def make_router(options: KvRouterOptions | None = None) -> KvRouter:
    router = KvRouter(block_size=BLOCK, policy=kv_policy("default"), rng=random.Random(1), options=options)
    router.set_ranks({A: RankInfo(), B: RankInfo()})
    return router


@asynccontextmanager
async def synced(runtime: DistributedRuntime, router: KvRouter, router_id: int) -> AsyncIterator[ReplicaSync]:
    endpoint = runtime.endpoint(PATH)
    async with ReplicaSync(endpoint, router.load, router_id=router_id, block_size=BLOCK) as sync:
        router.observer = sync
        yield sync
        router.observer = None


def now() -> float:
    return asyncio.get_running_loop().time()


def loads(router: KvRouter) -> list[tuple[int, float, int]]:
    load = router.load
    return [(load.prefill_tokens(rank), load.decode_blocks(rank), load.requests(rank)) for rank in (A, B)]


async def connect(first: KvRouter, second: KvRouter) -> None:
    """Book and free at both until each sees the other: a subscription takes a moment."""
    number = 0
    for here, there in ((first, second), (second, first)):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not len(there.load):
                number += 1
                here.book(f"hello {number}", here.select(KvQuery(token_ids=[1]), now()), now())
                await asyncio.sleep(0.02)
                here.free(f"hello {number}", now())
    await until(lambda: not len(first.load) and not len(second.load), lambda: f"{loads(first)} {loads(second)}")


async def test_what_one_router_books_the_other_counts(plane: str, tmp_path: Path) -> None:
    first, second = make_router(), make_router()
    async with (
        runtime(plane, tmp_path) as here,
        runtime(plane, tmp_path) as there,
        synced(here, first, 101),
        synced(there, second, 102),
    ):
        await connect(first, second)
        selection = first.select(KvQuery(token_ids=PROMPT, expected_output=7), now())
        first.book("r", selection, now())
        await until(lambda: loads(second) == loads(first) != [(0, 0, 0)] * 2, lambda: str(loads(second)))
        chosen = second.select(KvQuery(token_ids=range(1000, 1100)), now())
        assert chosen.rank != selection.rank  # the other router's request is load here
        second.book("r", chosen, now())  # the same id, by another client
        await until(lambda: sorted(loads(first)) == [(100, 6, 1)] * 2, lambda: str(loads(first)))
        first.first_token("r", now())
        await until(lambda: loads(second) == loads(first), lambda: str(loads(second)))
        assert sorted(loads(second)) == [(0, 6, 1), (100, 6, 1)]
        first.free("r", now())
        second.free("r", now())
        await until(lambda: not len(first.load) and not len(second.load), lambda: f"{loads(first)} {loads(second)}")


async def test_a_worker_reports_the_first_token_of_any_routers_request(tmp_path: Path) -> None:
    async with runtime("mem", tmp_path) as here:
        router = make_router()
        async with synced(here, router, 101) as sync:
            for request_id, rank in (("own", A), ("theirs", B)):
                router.book("own", router.select(KvQuery(token_ids=PROMPT, pinned_worker_id=1), 0.0), 0.0)
                prompt = BookedPrompt(list(range(6)), True, None, PrefillHint(90))
                sync.take(BookingEvent("theirs", BookedWorker(*B), prompt, 202), 0.0)
                assert router.load.prefill_tokens(rank) > 0
                sync.take(BookingEvent(request_id, BookedWorker(*rank), "MarkPrefillCompleted", rank.worker_id), 1.0)
                assert router.load.prefill_tokens(rank) == 0
            assert loads(router) == [(0, 6, 1), (0, 6, 1)]


async def test_blocks_that_no_request_shares_are_counted_apart_for_each_router(tmp_path: Path) -> None:
    async with runtime("mem", tmp_path) as here:
        router = make_router()
        async with synced(here, router, 101) as sync:
            for router_id in (202, 203):
                peer = make_router(KvRouterOptions(assumes_kv_reuse=False))
                names = peer.select(KvQuery(token_ids=PROMPT, pinned_worker_id=1), 0.0).tracking_sequence
                booked = BookingEvent("r", BookedWorker(*A), BookedPrompt(names), router_id)
                for event in decode_bookings(encode_bookings([booked])):
                    sync.take(event, 0.0)
            assert loads(router)[0][1:] == (12, 2)


async def test_own_events_unknown_requests_and_late_ends_change_nothing(tmp_path: Path) -> None:
    async with runtime("mem", tmp_path) as here:
        router = make_router()
        async with synced(here, router, 101) as sync:
            prompt = BookedPrompt([1, 2], True, None, PrefillHint(32))

            def take(data: object, router_id: int, rank: WorkerRank = A) -> None:
                sync.take(BookingEvent("r", BookedWorker(*rank), data, router_id), 0.0)  # type: ignore[arg-type]

            take(prompt, 101)
            take("MarkPrefillCompleted", 303)
            take("Free", 303)
            assert loads(router) == [(0, 0, 0)] * 2
            take(prompt, 202)
            take(prompt, 202, B)  # known already
            take("Free", 202, B)  # of an attempt elsewhere
            take("Free", 303)  # of a router that has not booked it
            assert loads(router) == [(32, 2, 1), (0, 0, 0)]
            take("Free", 202)
            take("Free", 202)
            assert loads(router) == [(0, 0, 0)] * 2
            assert sync.received == 8


async def test_what_a_router_that_has_gone_had_booked_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_EVENT_PLANE_HOST", "127.0.0.1")
    router = make_router()
    async with runtime("zmq", tmp_path) as here, synced(here, router, 101) as sync:
        async with runtime("zmq", tmp_path) as there:
            channel = there.endpoint(PATH).event_channel(BOOKINGS_TOPIC)
            data = {"AddRequest": {"token_sequence": [1], "track_prefill_tokens": True}}
            event = {"request_id": "r", "worker": {"worker_id": 1}, "data": data, "router_id": 7}
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not sync.received:  # a subscription takes a moment
                    channel.publish({"events": [{**event, "request_id": "x" * 5000}, event]})
                    await asyncio.sleep(0.02)
            assert sync.invalid
            assert len(router.load) == 1
            await channel.close()
        await until(lambda: len(router.load) == 0)


async def test_a_message_that_cannot_be_read_is_counted_and_the_next_one_is_taken(tmp_path: Path) -> None:
    async with runtime("mem", tmp_path) as here:
        router = make_router()
        async with synced(here, router, 101) as sync:
            channel = here.endpoint(PATH).event_channel(BOOKINGS_TOPIC)
            channel.publish({"events": 5})
            bare = {"request_id": "r", "worker": {"worker_id": 9, "dp_rank": 3}, "router_id": 7, "lora_name": None}
            add = {"token_sequence": [1], "track_prefill_tokens": True, "prefill_load_hint": None}
            channel.publish({**bare, "data": {"AddRequest": add}})
            await until(lambda: sync.received == 1)
            assert sync.invalid == 1
            assert router.load.requests(WorkerRank(9, 3)) == 1  # a worker not known here is counted all the same
            await channel.close()


class Published:
    """A publisher that keeps what it is given."""

    publisher_id = 1

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def publish(self, payload: bytes) -> int:
        self.payloads.append(payload)
        return len(self.payloads)

    async def close(self) -> None: ...


async def test_events_that_come_together_share_a_message_where_the_plane_batches() -> None:
    event = BookingEvent("r", BookedWorker(1), "Free", 9)
    for is_batching, sizes in ((True, [MAX_BATCH, MAX_BATCH, 1]), (False, [1] * (2 * MAX_BATCH + 1))):
        publisher = Published()
        outbox = BookingOutbox(publisher, is_batching=is_batching)
        for _ in range(2 * MAX_BATCH + 1):
            outbox.put(event)
        await until(lambda found=publisher: bool(found.payloads))  # type: ignore[misc]
        assert [len(decode_bookings(each)) for each in publisher.payloads] == sizes
        assert ("events" in msgspec.msgpack.decode(publisher.payloads[0])) is is_batching


async def test_too_many_waiting_events_drop_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.router.peers.replica_sync.MAX_QUEUED", 2)
    publisher = Published()
    outbox = BookingOutbox(publisher, is_batching=True)
    for name in "abc":
        outbox.put(BookingEvent(name, BookedWorker(1), "Free", 9))
    outbox.flush()
    assert [each.request_id for each in decode_bookings(publisher.payloads[0])] == ["a", "b"]
    assert outbox.dropped == 1


async def test_bindings_of_sessions_reach_the_other_router(plane: str, tmp_path: Path) -> None:
    tables = [SessionAffinity(60.0, writer_id=number, is_known=lambda rank: rank in (A, B)) for number in (1, 2)]
    async with (
        runtime(plane, tmp_path) as here,
        runtime(plane, tmp_path) as there,
        SessionSync(here.endpoint(PATH), tables[0]) as sync,
        SessionSync(there.endpoint(PATH), tables[1]) as other,
    ):
        lease = tables[0].acquire("s", now())
        assert isinstance(lease, SessionLease)
        record = lease.bind(B, now(), time.time_ns())
        channel = here.endpoint(PATH).event_channel(BINDINGS_TOPIC)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while tables[1].bound_rank("s", now()) is None or not other.invalid:
                channel.publish("not a binding")
                sync.report(record)
                await asyncio.sleep(0.02)
        assert tables[1].bound_rank("s", now()) == B
        assert tables[0].bound_rank("s", now()) == B
        await channel.close()
