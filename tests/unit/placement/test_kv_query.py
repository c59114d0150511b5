"""The filters before every cost, and the error of each that leaves nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dynamo.errors import InvalidArgument, kind_of, rule_of
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import (
    AllEligibleWorkersFiltered,
    AllEligibleWorkersOverloaded,
    KvQuery,
    NoEndpoints,
    PinnedRankOutOfRange,
    PinnedWorkerNotAllowed,
    PinnedWorkerOverloaded,
    RankInfo,
    eligible_ranks,
    is_unconstrained,
    preferred_weight,
)

A0, A1, B0 = WorkerRank(1, 0), WorkerRank(1, 1), WorkerRank(2, 0)
PLAIN = {A0: RankInfo(), A1: RankInfo(), B0: RankInfo()}


@dataclass
class Case:
    query: KvQuery
    expected: list[WorkerRank] | type[Exception]
    ranks: dict[WorkerRank, RankInfo] = field(default_factory=lambda: PLAIN)
    status: int = 0


FAST, ZONED, BUSY = RankInfo(taints=frozenset({"fast"})), RankInfo(topology={"zone": "a"}), RankInfo(is_busy=True)
CASES = [
    Case(KvQuery(), [A0, A1, B0]),
    Case(KvQuery(), NoEndpoints, {}, 503),
    Case(KvQuery(allowed={2}), [B0]),
    Case(KvQuery(allowed={7}), AllEligibleWorkersFiltered, status=500),
    Case(KvQuery(excluded=[1]), [B0]),
    Case(KvQuery(excluded=[A0]), [A1, B0]),
    Case(KvQuery(excluded=[1, 2]), NoEndpoints, status=503),
    Case(KvQuery(pinned_worker_id=1), [A0, A1]),
    Case(KvQuery(pinned_worker_id=1, pinned_dp_rank=1), [A1]),
    Case(KvQuery(pinned_dp_rank=0), [A0, B0]),
    Case(KvQuery(pinned_worker_id=3), InvalidArgument, status=400),
    Case(KvQuery(pinned_worker_id=1, allowed={2}), PinnedWorkerNotAllowed, status=400),
    Case(KvQuery(pinned_worker_id=2, pinned_dp_rank=1), PinnedRankOutOfRange, status=500),
    Case(KvQuery(pinned_dp_rank=5), PinnedRankOutOfRange, status=500),
    Case(KvQuery(required_taints={"fast"}), [B0], {A0: RankInfo(), B0: FAST}),
    Case(KvQuery(required_taints={"fast", "big"}), AllEligibleWorkersFiltered, {A0: RankInfo(), B0: FAST}, 500),
    Case(KvQuery(required_topology={"zone": "a"}), [A0], {A0: ZONED, B0: RankInfo(topology={"zone": "b"})}),
    Case(KvQuery(required_topology={"zone": "c"}), AllEligibleWorkersFiltered, {A0: ZONED}, 500),
    Case(KvQuery(), [B0], {A0: BUSY, B0: RankInfo()}),
    Case(KvQuery(), AllEligibleWorkersOverloaded, {A0: BUSY, B0: BUSY}, 529),
    Case(KvQuery(allowed={1}), AllEligibleWorkersOverloaded, {A0: BUSY, B0: RankInfo()}, 529),
    Case(KvQuery(pinned_worker_id=1), PinnedWorkerOverloaded, {A0: BUSY, B0: RankInfo()}, 529),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.query)[:60])
def test_what_is_left_after_the_filters(case: Case) -> None:
    if isinstance(case.expected, list):
        left, excluded = eligible_ranks(case.ranks, case.query)
        assert left == case.expected
        assert {each.rank for each in excluded} == case.ranks.keys() - set(left)
        return
    with pytest.raises(case.expected) as caught:
        eligible_ranks(case.ranks, case.query)
    assert rule_of(caught.value).status == case.status, kind_of(caught.value)


def test_an_excluded_rank_carries_its_reason() -> None:
    ranks = {A0: BUSY, A1: RankInfo(), B0: FAST}
    _, excluded = eligible_ranks(ranks, KvQuery(required_taints={"fast"}))
    assert [(each.rank, each.reason) for each in excluded] == [(A0, "taints"), (A1, "taints")]


def test_a_query_without_conditions_skips_the_filters() -> None:
    assert is_unconstrained(KvQuery(preferred_taints={"fast": 1.0}))
    assert not is_unconstrained(KvQuery(pinned_dp_rank=0))
    assert not is_unconstrained(KvQuery(allowed=()))


def test_preferred_weights_add_up() -> None:
    info = RankInfo(taints=frozenset({"fast", "big"}), topology={"zone": "a"})
    query = KvQuery(
        preferred_taints={"fast": 1.0, "cheap": 5.0}, preferred_topology={"zone": ("a", 0.5), "rack": ("r", 9.0)}
    )
    assert preferred_weight(info, query) == 1.5
