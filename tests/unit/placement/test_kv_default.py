"""The native cost, step by step, and what every policy of KV-aware placement has in common."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument
from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.placement.kv_query import KvOverrides, Trust
from dynamo.placement.kv_state import KvPolicy, KvRequest, KvState, RankMatch, RankState
from dynamo.placement.policies.kv_default import DefaultCost, DefaultCostParameters
from dynamo.placement.policies.kv_policies import kv_policy, kv_policy_types
from support.properties import examples


def state(
    *ranks: tuple[int, float, int, int],
    tokens: int = 160,
    matches: dict[int, RankMatch] | None = None,
    request: dict[str, object] | None = None,
) -> KvState:
    """Make a state of ranks (prefill tokens, decode blocks, requests, device blocks of the prompt), block size 16."""
    held = {at: RankMatch(Overlap(device)) for at, (_, _, _, device) in enumerate(ranks) if device}
    return KvState(
        16,
        KvRequest(tokens, tokens // 16, **(request or {})),  # type: ignore[arg-type]
        tuple(
            RankState(WorkerRank(number), prefill_tokens=prefill, decode_blocks=decode, requests=requests)
            for number, (prefill, decode, requests, _) in enumerate(ranks, 1)
        ),
        held | (matches or {}),
    )


def costs(given: KvState, **weights: float) -> list[float]:
    choice = DefaultCost.of(weights).choose(given, 0.0, with_terms=True)
    return [each.total for each in choice.candidates]


def test_the_worked_example_of_the_reference() -> None:
    # 10 prompt blocks; the ranks hold 2, 5 and 8 of them and have 10, 5 and 9 active blocks with the prompt.
    matches = {at: RankMatch(Overlap(held), active_blocks=10) for at, held in enumerate([2, 5, 8])}
    given = state((0, 10, 0, 0), (0, 5, 0, 0), (0, 9, 0, 0), matches=matches)
    assert costs(given) == [18, 10, 11]
    assert DefaultCost().choose(given, 0.99).rank == WorkerRank(2)


def test_the_cost_is_what_waits_and_the_prompt_less_what_is_held_plus_the_blocks() -> None:
    given = state((32, 7, 3, 4))
    assert costs(given) == [(32 + 160) / 16 - 4 + 7 + 10]
    assert costs(given, prefill_load_scale=0.5, decode_active_request_weight=2) == [0.5 * (12 - 4) + 17 + 6]
    assert costs(given, overlap_score_credit=0) == [12 + 17]
    assert costs(state((32, 7, 3, 40))) == [17]  # a credit beyond the work is worth no more than the work


def test_lower_tiers_and_a_shared_cache_count_by_their_weights() -> None:
    held = {0: RankMatch(Overlap(2, 3, 4))}
    given = state((0, 0, 0, 0), matches=held, request={"shared_hits": ((0, 5), (8, 10))})
    assert costs(given) == [10 - 2 - 0.75 * 3 - 0.25 * 4 + 10]
    assert costs(given, shared_cache_multiplier=0.5) == [10 - 2 - 0.75 * 3 - 0.25 * 4 - 0.5 * (3 + 2) + 10]
    assert costs(given, host_cache_hit_weight=1, disk_cache_hit_weight=0) == [10 - 5 + 10]


def test_the_credit_decays_with_what_waits_beyond_the_least() -> None:
    given = state((16, 0, 0, 4), (16 + 160, 0, 0, 4))
    assert costs(given, overlap_score_credit_decay=1) == [11 - 4 + 10, 21 - 4 / 2 + 10]


def test_blocks_that_are_active_already_are_not_new() -> None:
    given = state((0, 6, 0, 0), matches={0: RankMatch(Overlap(), active_blocks=4)})
    assert costs(given) == [10 + 6 + 6]
    off: dict[str, object] = {"tracks_prefill": False}  # which takes another way
    assert costs(state((0, 6, 0, 0), matches={0: RankMatch(active_blocks=4)}, request=off)) == [6 + 6]


def test_without_prefill_tracking_only_blocks_count() -> None:
    off: dict[str, object] = {"tracks_prefill": False}
    assert costs(state((320, 7, 3, 0), request=off)) == [17]
    unknown = RankState(WorkerRank(1), has_load=False)
    assert costs(KvState(16, KvRequest(160, 10, tracks_prefill=False), (unknown,))) == [10 + 10]


def test_without_prefill_tracking_the_credit_is_taken_off_the_blocks() -> None:
    rank = RankState(WorkerRank(1), decode_blocks=7, requests=2)
    given = KvState(16, KvRequest(160, 10, tracks_prefill=False), (rank,), {0: RankMatch(Overlap(4))})
    assert costs(given, decode_active_request_weight=1) == [17 - 4 + 2]
    assert costs(given, overlap_score_credit=0, decode_active_request_weight=1) == [17 + 2]


def test_preferences_scale_the_cost_between_one_e_and_its_inverse() -> None:
    matches = {0: RankMatch(preferred_weight=1.0), 1: RankMatch(preferred_weight=-50.0), 2: RankMatch()}
    given = state(*[(0, 0, 0, 0)] * 3, matches=matches, request={"has_preferences": True})
    assert costs(given) == pytest.approx([20 * math.exp(-math.tanh(1)), 20 * math.e, 20])
    pinned = state((0, 0, 0, 0), matches={0: matches[0]}, request={"has_preferences": True, "is_pinned": True})
    assert costs(pinned) == [20]


def test_a_request_overrides_the_weights() -> None:
    def with_overrides(**values: float) -> list[float]:
        return costs(state((0, 0, 0, 4), request={"overrides": KvOverrides(**values)}), shared_cache_multiplier=1)  # type: ignore[arg-type]

    assert with_overrides() == [16]
    assert with_overrides(overlap_score_credit=0.5) == [18]
    assert with_overrides(prefill_load_scale=2) == [22]
    assert with_overrides(overlap_score_weight=2) == [22]
    assert with_overrides(overlap_score_weight=0) == [10]
    temperature = KvState(
        16, KvRequest(16, 1, overrides=KvOverrides(router_temperature=1.0)), state((0, 0, 0, 0)).ranks
    )
    assert DefaultCost().choose(temperature, 0.5).reason == "sampled"


def test_ties_go_to_each_as_often() -> None:
    given = state((0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0))
    seen = Counter(DefaultCost().choose(given, draw / 300).rank.worker_id for draw in range(300))
    assert seen == {1: 100, 3: 100, 4: 100}
    assert DefaultCost().choose(given, 0.0).tied == 3


def test_temperature_samples_by_softmax_over_the_spread() -> None:
    given = state((0, 0, 0, 0), (0, 10, 0, 0), (0, 5, 0, 0))
    policy = DefaultCost.of({"router_temperature": 0.5})
    seen = Counter(policy.choose(given, (draw + 0.5) / 1000).rank.worker_id for draw in range(1000))
    weights = {1: 1.0, 2: math.exp(-2), 3: math.exp(-1)}
    for worker_id, weight in weights.items():
        assert seen[worker_id] == pytest.approx(1000 * weight / sum(weights.values()), abs=1)
    equal = state((0, 0, 0, 0), (0, 0, 0, 0))
    assert Counter(policy.choose(equal, draw / 10).position for draw in range(10)) == {0: 5, 1: 5}


@pytest.mark.parametrize("name", ["overlap_score_credits", "router_temperature"])
def test_an_unknown_parameter_is_an_error_that_lists_the_known(name: str) -> None:
    if name in DefaultCostParameters.__struct_fields__:
        with pytest.raises(InvalidArgument, match="router_temperature"):
            kv_policy("default", {name: -1})
        with pytest.raises(InvalidArgument, match="router_temperature"):
            kv_policy("default", {name: math.nan})
    else:
        with pytest.raises(InvalidArgument, match=r"unknown parameter.*overlap_score_credit, .*router_temperature"):
            kv_policy("dynamo-default-cost-fn", {name: 1})


def test_an_unknown_type_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(
        InvalidArgument, match="'best' is unknown; known: dynamo-default-cost-fn, dynamo-two-tier-cost-fn"
    ):
        kv_policy("best")
    with pytest.raises(InvalidArgument, match=r"thunderagent.*not built"):
        kv_policy("thunderagent")


COUNTS = st.integers(0, 50)
MATCHES = st.builds(
    RankMatch,
    overlap=st.builds(Overlap, device=COUNTS, host=COUNTS, disk=COUNTS),
    active_blocks=st.integers(0, 8),
    coming_blocks=st.integers(0, 8),
    preferred_weight=st.floats(-3, 3),
)
RANKS = st.builds(
    RankState,
    rank=st.builds(WorkerRank, st.integers(0, 2**64 - 1), st.integers(0, 7)),
    has_load=st.booleans(),
    prefill_tokens=st.integers(0, 100_000),
    decode_blocks=st.floats(0, 5_000),
    requests=COUNTS,
    streams=COUNTS,
    context_tokens=st.integers(0, 100_000),
    pass_started_at=st.none() | st.floats(0, 100),
    pass_tokens=st.integers(0, 20_000),
    waiting_tokens=st.integers(0, 20_000),
    waiting_requests=COUNTS,
    oldest_use_at=st.none() | st.floats(0, 100),
    held_blocks=st.integers(0, 2_000),
    total_kv_blocks=st.none() | st.integers(0, 2_000),
    max_num_batched_tokens=st.none() | st.integers(1, 10_000),
    max_num_seqs=st.none() | st.integers(1, 60),
    trust=st.sampled_from(Trust),
)
OVERRIDES = st.builds(
    KvOverrides,
    overlap_score_credit=st.none() | st.floats(0, 2),
    prefill_load_scale=st.none() | st.floats(0, 2),
    overlap_score_weight=st.none() | st.sampled_from([0.0, 0.5]),
    router_temperature=st.none() | st.sampled_from([0.0, 0.3]),
)
STATES = st.lists(RANKS, min_size=1, max_size=6).flatmap(
    lambda ranks: st.builds(
        KvState,
        block_size=st.sampled_from([1, 16, 64]),
        request=st.builds(
            KvRequest,
            prompt_tokens=st.integers(0, 20_000),
            complete_blocks=st.integers(0, 300),
            expected_output=st.none() | st.integers(0, 1_000),
            is_pinned=st.booleans(),
            has_preferences=st.booleans(),
            tracks_prefill=st.booleans(),
            shared_hits=st.just(()) | st.just(((0, 3), (5, 9))),
            overrides=st.none() | OVERRIDES,
        ),
        ranks=st.just(tuple(ranks)),
        matches=st.dictionaries(st.integers(0, len(ranks) - 1), MATCHES),
        now=st.floats(0, 200),
    )
)
POLICIES = [kv_policy(name) for name in kv_policy_types()]


@given(STATES, st.floats(0, 1, exclude_max=True), st.sampled_from(POLICIES))
@examples(300)
def test_a_state_written_and_read_again_gives_the_same_choice(given: KvState, draw: float, policy: KvPolicy) -> None:
    again = KvState.from_json(given.to_json())
    assert again == given
    choice = policy.choose(given, draw)
    assert policy.choose(again, draw) == choice
    explained = policy.choose(given, draw, with_terms=True)
    assert (explained.rank, explained.cost, explained.tied) == (choice.rank, choice.cost, choice.tied)
    assert math.isfinite(choice.cost)
    for each in explained.candidates:
        assert sum(term.value for term in each.terms) == pytest.approx(each.total, abs=1e-6)
    if choice.reason == "lowest_cost":
        assert choice.cost == min(each.total for each in explained.candidates)
