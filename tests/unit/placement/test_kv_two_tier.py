"""Balance first, then the longest match that is long enough, then the least loaded."""

from __future__ import annotations

import pytest

from dynamo.errors import InvalidArgument
from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.placement.kv_state import KvRequest, KvState, RankMatch, RankState
from dynamo.placement.policies.kv_policies import kv_policy

POLICY = kv_policy(
    "dynamo-two-tier-cost-fn", {"cache_threshold": 0.5, "balance_abs_threshold": 4, "balance_rel_threshold": 2}
)


def choose(*ranks: tuple[int, int]) -> tuple[int, str]:
    """Choose among ranks (requests, blocks held of a prompt of 10 blocks)."""
    choice = POLICY.choose(
        KvState(
            16,
            KvRequest(160, 10),
            tuple(RankState(WorkerRank(at), requests=requests) for at, (requests, _) in enumerate(ranks)),
            {at: RankMatch(Overlap(held)) for at, (_, held) in enumerate(ranks) if held},
        ),
        0.0,
    )
    return choice.rank.worker_id, choice.reason


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([(4, 9), (0, 0)], (0, "longest_match")),  # 4 apart is not more than the threshold
        ([(5, 9), (0, 0)], (1, "out_of_balance")),
        ([(11, 9), (6, 0)], (0, "longest_match")),  # 11 is less than twice 6
        ([(3, 4), (1, 0)], (1, "match_too_short")),
        ([(3, 5), (1, 0)], (0, "longest_match")),
        ([(3, 9), (1, 9), (0, 2)], (1, "longest_match")),  # of equal matches, the one with fewer requests
        ([(2, 0), (1, 0)], (1, "match_too_short")),
    ],
)
def test_the_rules_in_their_order(ranks: list[tuple[int, int]], expected: tuple[int, str]) -> None:
    assert choose(*ranks) == expected


def test_parameters_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="cache_threshold"):
        kv_policy("dynamo-two-tier-cost-fn", {"cache_threshold": 1.5})
    with pytest.raises(InvalidArgument, match="known: cache_threshold, balance_abs_threshold, balance_rel_threshold"):
        kv_policy("dynamo-two-tier-cost-fn", {"threshold": 1.5})
