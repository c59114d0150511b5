"""The kv router mode beside a pool, where the pool and the router do not know the same workers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.kv.overlap import WorkerRank
from dynamo.placement import Candidate, Placement, PlacementRequest
from dynamo.placement.kv_query import KvQuery, RankInfo
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.router.kv_placement import KvPlaced, KvPlacement
from dynamo.router.kv_router import KvRouter
from dynamo.router.pool import ChosenWorker
from dynamo.router.record import DispatchRecord
from dynamo.runtime.context import Context


def make(*workers: int) -> KvPlacement:
    rng = random.Random(1)
    placement = KvPlacement(KvRouter(block_size=4, policy=kv_policy("default"), rng=rng), rng=rng)
    placement.read_ranks = lambda: {WorkerRank(each): RankInfo() for each in workers}
    placement.is_stale = True
    return placement


def ask() -> PlacementRequest:
    return PlacementRequest(kv=KvQuery(token_ids=range(16)))


def test_only_workers_of_the_pool_are_chosen_although_the_router_knows_as_many() -> None:
    placement = make(1, 2)  # of two models
    on_two_endpoints = [Candidate(1, "n.c.first"), Candidate(1, "n.c.second")]
    newer = [Candidate(2), Candidate(3)]
    for _ in range(20):
        assert placement.choose(ask(), on_two_endpoints, 0.0).candidate == on_two_endpoints[0]
        assert placement.choose(ask(), newer, 0.0).candidate == newer[0]


def test_a_worker_that_the_router_does_not_know_serves_all_the_same() -> None:
    placement = make(1, 2)
    assert placement.choose(ask(), [Candidate(7)], 0.0).candidate == Candidate(7)
    pinned = Placement(Candidate(7), "pinned")
    assert placement.settle(pinned, ask(), 0.0) is pinned
    assert isinstance(placement.settle(Placement(Candidate(2), "pinned"), ask(), 0.0), KvPlaced)


class Stream:
    """A stream as far as bookings see it."""

    tokens_taken = 0

    def book(self, *, first: Any, released: Any) -> None:
        self.released = released


async def test_one_id_for_many_requests_books_each_of_them_once() -> None:
    placement = make(1)
    streams: list[Stream] = []

    async def open_stream(*_: object) -> Stream:
        streams.append(Stream())
        return streams[-1]

    candidate = Candidate(1)
    client = SimpleNamespace(open=open_stream)
    for _ in range(50):
        chosen = placement.choose(ask(), [candidate], 0.0)
        worker: Any = ChosenWorker(chosen, SimpleNamespace(), client, placement)  # type: ignore[arg-type]
        await placement.open(worker, {"token_ids": list(range(16))}, Context("the same"))
    assert len(placement) == len(placement.router.load) == 50
    assert max(map(len, placement._running)) < 16
    for stream in streams:
        stream.released()
    assert len(placement) == len(placement.router.load) == 0
    assert placement.router.load.of(WorkerRank(1)).blocks == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
async def test_an_override_that_is_no_weight_is_refused_by_name(value: float) -> None:
    body: Any = {"token_ids": [1, 2], "router_config_override": {"prefill_load_scale": value}}
    with pytest.raises(InvalidArgument, match="prefill_load_scale"):
        await make(1).query(body, DispatchRecord(), pinned=None)
