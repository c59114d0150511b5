"""The kv router mode beside a pool, where the pool and the router do not know the same workers."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.kv.overlap import WorkerRank
from dynamo.placement import Candidate, CandidateList, Placement, PlacementRequest
from dynamo.placement.kv_query import MAX_OUTPUT, MAX_WEIGHT, KvQuery, PinnedWorkerOverloaded, RankInfo
from dynamo.placement.policies.kv_default import DefaultCostParameters
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.router.__main__ import parse_router_args
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.kv.placement import KvPlaced, KvPlacement
from dynamo.router.kv.router import KvRouter
from dynamo.router.standalone.routed_endpoint import kv_query_of
from dynamo.router.workers.pool import ChosenWorker
from dynamo.runtime.calls.context import Context
from support.cases import each_case


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
    kept, own = CandidateList(newer), CandidateList([Candidate(1), Candidate(2)])
    for _ in range(20):  # those that are kept between choices, of the other workers and of all that the router knows
        assert placement.choose(ask(), kept, 0.0).candidate == kept[0]
        assert placement.choose(ask(), own, 0.0).candidate in own
    assert {placement.choose(ask(), own, 0.0).candidate.instance_id for _ in range(50)} == {1, 2}


def test_a_worker_that_the_router_does_not_know_serves_all_the_same() -> None:
    placement = make(1, 2)
    assert placement.choose(ask(), [Candidate(7)], 0.0).candidate == Candidate(7)
    pinned = Placement(Candidate(7), "pinned")
    assert placement.settle(pinned, ask(), 0.0) is pinned
    assert isinstance(placement.settle(Placement(Candidate(2), "pinned"), ask(), 0.0), KvPlaced)


def test_a_named_worker_over_a_busy_threshold_is_an_overload() -> None:
    placement = make(1, 2)
    with pytest.raises(PinnedWorkerOverloaded):
        placement.settle(Placement(Candidate(2, is_busy=True), "pinned"), ask(), 0.0)


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
    assert max(map(len, placement._running.by_booking)) < 16
    for stream in streams:
        stream.released()
    assert len(placement) == len(placement.router.load) == 0
    assert placement.router.load.of(WorkerRank(1)).blocks == {}


NUMBERS = [float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 10**400]


def members_with(value: float) -> list[tuple[dict[str, Any], str]]:
    return [
        ({"router_config_override": {"prefill_load_scale": value}}, "router_config_override"),
        ({"routing": {"routing_constraints": {"preferred_taints": {"gpu": value}}}}, "preferred_taints"),
        ({"routing": {"priority_jump": value}}, "priority"),
        ({"routing": {"slo_ttft_ms": value}}, "slo_ttft_ms"),
    ]


@each_case("value", NUMBERS)
async def test_a_number_that_no_cost_can_be_computed_with_is_refused_by_name(value: float) -> None:
    for members, name in members_with(value):
        body: Any = {"token_ids": [1, 2], **members}
        with pytest.raises(InvalidArgument, match=name):
            await make(1).query(body, DispatchRecord(), pinned=None)
        with pytest.raises(InvalidArgument, match=name):
            kv_query_of(body)


@each_case("value", NUMBERS)
def test_so_is_the_parameter_of_a_policy(value: float) -> None:
    for policy, name in (
        ("default", "overlap_score_credit"),
        ("time", "decode_weight"),
        ("two-tier", "balance_abs_threshold"),
    ):
        with pytest.raises(InvalidArgument, match=name):
            kv_policy(policy, {name: value})


@each_case("text", ["nan", "inf", "1e308", "-1"])
def test_and_a_setting(text: str) -> None:
    with pytest.raises(SystemExit):
        parse_router_args(["--endpoint", "a.b.c", "--router-kv-overlap-score-credit", text], {})


async def test_the_largest_numbers_that_are_allowed_give_finite_costs() -> None:
    placement = make(1, 2)
    names = [name for name in DefaultCostParameters.__struct_fields__ if name != "router_temperature"]
    placement.router._policy = kv_policy("default", dict.fromkeys(names, MAX_WEIGHT))
    override = {"prefill_load_scale": MAX_WEIGHT, "router_temperature": MAX_WEIGHT}
    body: Any = {
        "token_ids": list(range(64)),
        "router_config_override": override,
        "routing": {"expected_output_tokens": 10**400, "routing_constraints": {"preferred_taints": {"x": MAX_WEIGHT}}},
    }
    query = await placement.query(body, DispatchRecord(), pinned=None)
    selection = placement.select(query, 0.0)
    assert math.isfinite(selection.choice.cost)
    assert query.expected_output == MAX_OUTPUT


async def test_a_prompt_with_images_is_routed_by_its_expansion() -> None:
    placement, record = make(1), DispatchRecord()
    routed = [1, 1_000_007, 1_000_007, 2, 3, 0, 0, 0]
    media = {"routing_token_ids": routed, "block_mm_infos": [], "expanded_prompt_len": 5}
    body: Any = {"token_ids": [1, 99, 2, 3], "mm_routing_info": media}
    query = await placement.query(body, record, pinned=None)
    assert query.sequence == sequence_hashes(block_hashes(routed, 4))
    assert query.prompt_tokens == 5
    body["routing"] = {"dp_rank": 0}
    again = await placement.query(body, record, pinned=None)
    assert again.sequence is query.sequence
    of_service = kv_query_of(body)
    assert (of_service.token_ids, of_service.prompt_tokens) == (routed, 5)


async def test_media_that_are_named_by_block_are_in_the_hashes_of_a_long_prompt() -> None:
    prompt = list(range(40_000))
    body: Any = {
        "token_ids": prompt,
        "mm_routing_info": {"block_mm_infos": [None] * 9_000 + [{"mm_objects": [{"mm_hash": 7}]}]},
    }
    query = await make(1).query(body, DispatchRecord(), pinned=None)
    assert query.sequence == sequence_hashes(block_hashes(prompt, 4, mm_hashes={9_000: [7]}))


async def test_an_expansion_that_cannot_be_read_is_refused_by_name() -> None:
    body: Any = {"token_ids": [1, 2], "mm_routing_info": {"routing_token_ids": [-1]}}
    with pytest.raises(InvalidArgument, match="routing_token_ids"):
        await make(1).query(body, DispatchRecord(), pinned=None)
    with pytest.raises(InvalidArgument, match="routing_token_ids"):
        kv_query_of(body)
