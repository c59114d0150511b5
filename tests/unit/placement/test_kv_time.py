"""The policy `time`: each part of its cost does what its sentence says."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.errors import InvalidArgument
from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.placement.kv_query import KvOverrides, Trust
from dynamo.placement.kv_state import KvChoice, KvRequest, KvState, RankMatch, RankState
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.placement.policies.kv_time import TimeCost
from dynamo.placement.timing import DEFAULT_TIMING, RankTiming, TimeCurve, pass_ms

BLOCK = 16
TIMING = RankTiming(TimeCurve(20.0, 0.01), TimeCurve(10.0, 0.0), output_tokens=100)


def rank(number: int, **values: Any) -> RankState:
    return RankState(WorkerRank(number), **dict[str, Any](timing=TIMING, total_kv_blocks=10_000) | values)


def choose(*ranks: RankState, held: dict[int, RankMatch] | None = None, tokens: int = 1600, **request: Any) -> KvChoice:
    state = KvState(BLOCK, KvRequest(tokens, tokens // BLOCK, **request), ranks, held or {}, now=100.0)
    return TimeCost().choose(state, 0.0, with_terms=True)


def parts(choice: KvChoice, at: int = 0) -> dict[str, float]:
    return {term.name: term.value for term in choice.candidates[at].terms}


def test_an_idle_rank_costs_the_prefill_and_the_steps_to_come() -> None:
    found = parts(choose(rank(1)))
    assert found["wait"] == 0.0
    assert found["prefill"] == 20 + 16
    assert found["stall"] == found["eviction"] == found["room"] == 0.0


def test_held_tokens_are_not_computed_but_the_last_one_is() -> None:
    assert parts(choose(rank(1), held={0: RankMatch(Overlap(50))}))["prefill"] == 20 + 8
    assert parts(choose(rank(1), held={0: RankMatch(Overlap(100))}))["prefill"] == pytest.approx(20.01)
    tiers = {0: RankMatch(Overlap(20, 20, 20))}
    assert parts(choose(rank(1), held=tiers))["prefill"] == 20 + 0.16 * (100 - 20 - 15 - 5)


def test_a_request_waits_for_the_pass_that_runs_and_shares_the_next_one() -> None:
    found = parts(choose(rank(1, pass_started_at=99.99, pass_tokens=3000, waiting_tokens=400, waiting_requests=2)))
    assert found["wait"] == pytest.approx(20 + 30 - 10)
    assert found["prefill"] == 20 + 20
    assert found["stall"] == pytest.approx(0.05 * 2 * 16)  # two wait with it: 16 ms longer each
    # One that takes longer than expected may end at any moment.
    assert parts(choose(rank(1, pass_started_at=90.0, pass_tokens=3000)))["wait"] == 0.0


def test_the_streams_make_a_step_in_every_pass_that_runs() -> None:
    seen = {"pass_started_at": 99.9, "boundary_at": 99.9, "pass_tokens": 2400, "max_num_batched_tokens": 1000}
    assert parts(choose(rank(1, streams=4, requests=5, **seen)))["wait"] == pytest.approx(3 * 20 + 24 + 3 * 10 - 100)


def test_a_millisecond_counts_for_more_the_later_the_first_token_is() -> None:
    found = parts(choose(rank(1, pass_started_at=99.99, pass_tokens=3000)))
    assert found["tail"] == pytest.approx(0.4e-6 * (found["wait"] + found["prefill"]) ** 3)


def test_a_long_prompt_rather_holds_up_streams_than_waits_as_well() -> None:
    ranks = rank(1, pass_started_at=100.0, pass_tokens=11_000), rank(2, streams=9, requests=9)
    state = KvState(BLOCK, KvRequest(20_000, 1250), ranks, now=100.0)
    assert [kv_policy("time", {"tail_weight": each}).choose(state, 0.0).position for each in (0.0, 0.4)] == [0, 1]


def test_streams_are_stalled_and_their_step_is_in_the_pass() -> None:
    found = parts(choose(rank(1, streams=4, requests=4, context_tokens=4000)))
    assert (found["wait"], found["prefill"]) == (5.0, 20 + 16 + 10)
    assert found["stall"] == pytest.approx(0.05 * 4 * 36)


def test_a_prompt_beyond_the_budget_takes_several_passes() -> None:
    found = parts(choose(rank(1, max_num_batched_tokens=1000), tokens=2400))
    assert found["prefill"] == pytest.approx(3 * 20 + 24)
    assert pass_ms(TIMING.prefill, 2000, 1000) == 2 * 30
    assert pass_ms(TIMING.prefill, 0, 1000) == 0


def test_a_prefix_that_is_being_computed_counts_as_held() -> None:
    busy = rank(1, pass_started_at=100.0, pass_tokens=1600, requests=1)
    choice = choose(busy, rank(2), held={0: RankMatch(active_blocks=100, coming_blocks=100)})
    assert parts(choice)["prefill"] == pytest.approx(20.01)
    assert parts(choice)["wait"] == pytest.approx(36)
    unknown = choose(replace(busy, trust=Trust.NONE), held={0: RankMatch(coming_blocks=100)})
    assert parts(unknown)["prefill"] == 36


def test_a_report_that_is_not_exact_counts_for_less() -> None:
    for trust, share in ((Trust.EXACT, 1.0), (Trust.DEGRADED, 0.8), (Trust.PREDICTED, 0.9), (Trust.NONE, 0.0)):
        choice = choose(rank(1, trust=trust), held={0: RankMatch(Overlap(50))})
        assert parts(choice)["prefill"] == pytest.approx(36 - 8 * share)


def test_a_prompt_that_nobody_holds_goes_where_the_oldest_blocks_lie() -> None:
    ranks = [rank(1, oldest_use_at=95.0), rank(2, oldest_use_at=40.0), rank(3, oldest_use_at=60.0)]
    assert choose(*ranks).rank == WorkerRank(2)
    assert choose(*ranks, rank(4)).rank == WorkerRank(4)  # nothing is lost where there is room
    assert choose(*ranks, held={0: RankMatch(Overlap(100))}).rank == WorkerRank(1)


def test_room_that_blocks_in_the_index_leave_is_free() -> None:
    full, half = rank(1, held_blocks=10_000, oldest_use_at=0.0), rank(2, held_blocks=5_000, oldest_use_at=0.0)
    assert parts(choose(full, half), 0)["eviction"] > 0
    assert parts(choose(full, half), 1)["eviction"] == 0


def test_a_rank_without_room_beside_its_requests_costs_the_time_until_there_is() -> None:
    crowded = rank(1, total_kv_blocks=1000, decode_blocks=990.0, requests=3, streams=3)
    assert choose(crowded, rank(2, total_kv_blocks=1000)).rank == WorkerRank(2)
    assert parts(choose(crowded))["room"] > 0


def test_a_wait_at_the_holder_is_accepted_within_bounds() -> None:
    held = {0: RankMatch(Overlap(90))}
    short = rank(1, pass_started_at=100.0, pass_tokens=100)
    long = rank(1, pass_started_at=100.0, pass_tokens=8000, waiting_tokens=8000)
    assert choose(short, rank(2), held=held, tokens=1600).rank == WorkerRank(2)  # 20 ms to compute it elsewhere
    assert choose(short, rank(2), held={0: RankMatch(Overlap(490))}, tokens=8000).rank == WorkerRank(1)
    assert choose(long, rank(2), held={0: RankMatch(Overlap(490))}, tokens=8000).rank == WorkerRank(2)


def test_a_decode_worker_computes_no_prompt() -> None:
    found = parts(choose(rank(1, streams=2, requests=2), tracks_prefill=False))
    assert found["prefill"] == found["stall"] == found["future"] == 0.0


def test_longer_contexts_make_steps_longer() -> None:
    timing = RankTiming(TIMING.prefill, TimeCurve(5.0, 50.0), 100)
    light, heavy = (rank(at, timing=timing, streams=2, requests=2, context_tokens=at * 40_000) for at in (1, 2))
    choice = choose(light, heavy)
    assert parts(choice, 0)["decode"] < parts(choice, 1)["decode"]
    assert choice.rank == WorkerRank(1)


def test_the_steps_of_a_request_cost_as_much_at_an_idle_rank_where_contexts_cost_nothing() -> None:
    found = choose(rank(1), rank(2, streams=3, requests=3))  # every step takes 10 ms
    assert parts(found, 0)["decode"] == parts(found, 1)["decode"] > 0


def test_every_request_beside_it_pays_for_its_context() -> None:
    timing = RankTiming(TIMING.prefill, TimeCurve(0.0, 50.0), 100)  # steps cost what contexts cost
    found = choose(*(rank(at, timing=timing, streams=at, requests=at) for at in (1, 3)))
    assert parts(found, 1)["decode"] == pytest.approx(2 * parts(found, 0)["decode"])


def test_overrides_and_parameters() -> None:
    held = {0: RankMatch(Overlap(50))}
    assert parts(choose(rank(1), held=held, overrides=KvOverrides(overlap_score_credit=0.0)))["prefill"] == 36
    state = KvState(BLOCK, KvRequest(160, 10), (rank(1), rank(2, streams=9, requests=9)))
    policy = kv_policy("time", {"router_temperature": 1.0})
    assert {policy.choose(state, draw / 50).position for draw in range(50)} == {0, 1}
    assert policy.choose(state, 0.0).reason == "sampled"
    with pytest.raises(InvalidArgument, match=r"unknown parameter 'stall'; known: stall_weight"):
        kv_policy("time", {"stall": 1})


def test_ranks_that_report_nothing_are_placed_by_load() -> None:
    plain = [RankState(WorkerRank(at), timing=DEFAULT_TIMING) for at in (1, 2)]
    assert choose(*plain).tied == 2
    loaded = RankState(WorkerRank(1), requests=3, streams=3, context_tokens=9000, prefill_tokens=500)
    assert choose(loaded, plain[1]).rank == WorkerRank(2)


def test_the_rest_of_a_step_is_counted_from_the_last_pass_that_was_seen_to_end() -> None:
    for before_ms, left_ms in ((0.0, 10.0), (2.5, 7.5), (37.5, 2.5), (155.0, 5.0), (400.0, 5.0)):  # steps of 10 ms
        found = parts(choose(rank(1, streams=2, boundary_at=100.0 - before_ms / 1000)))
        assert found["wait"] == pytest.approx(left_ms, abs=1e-6), before_ms


def test_a_prompt_joins_the_pass_that_begins_with_the_next_step() -> None:
    pending = {"streams": 2, "pass_started_at": 99.999, "pass_tokens": 2000}
    joined = parts(choose(rank(1, boundary_at=99.9975, **pending)))
    assert joined["wait"] == pytest.approx(7.5, abs=1e-6)
    alone = parts(choose(rank(1, streams=2, waiting_tokens=2000)))  # the same pass, with what waits for it
    assert (joined["prefill"], joined["future"]) == (pytest.approx(alone["prefill"]), pytest.approx(alone["future"]))
    begun = parts(choose(rank(1, boundary_at=100.0, **pending)))  # the step was seen to end: the pass runs
    assert begun["wait"] == pytest.approx(20 + 20 + 10)


@pytest.mark.parametrize("later_ms", [0.0, 3.0, 20.0, 300.0])
def test_the_parts_add_up_to_the_cost_in_every_phase(later_ms: float) -> None:
    at = 100.0 - later_ms / 1000  # when everything was seen
    choice = choose(
        rank(1, streams=3, boundary_at=at - 0.004),
        rank(2, streams=3, boundary_at=at - 0.004, pass_started_at=at - 0.001, pass_tokens=900, waiting_tokens=50),
        rank(3, streams=3, boundary_at=at, pass_started_at=at - 0.001, pass_tokens=900),
        rank(4, pass_started_at=at, pass_tokens=900),
    )
    for candidate in choice.candidates:
        assert candidate.total == pytest.approx(sum(term.value for term in candidate.terms))


def test_a_request_waits_for_a_place_where_the_engine_has_none() -> None:
    """16 at once: the 17th waits until one of them has ended, the 20th until four have."""
    for requests, ended in ((0, 0), (15, 0), (16, 1), (19, 4)):
        found = parts(choose(rank(1, requests=requests, streams=requests, max_num_seqs=16)))
        assert found["seats"] == pytest.approx(ended / 16 * 100 * 10.0)
    assert parts(choose(rank(1, requests=400, streams=400)))["seats"] == 0.0  # nobody knows how many it runs


def test_a_crowd_with_one_prefix_does_not_queue_at_its_holder_while_others_are_idle() -> None:
    """What is held is worth 16 ms; a place at the holder comes free in a second."""
    crowd = rank(1, requests=31, streams=16, waiting_requests=15, max_num_seqs=16)
    held = {0: RankMatch(Overlap(100), active_blocks=100)}
    assert choose(crowd, rank(2, max_num_seqs=16), held=held).position == 1
    room = rank(1, requests=12, streams=12, max_num_seqs=16)
    whole = {0: RankMatch(Overlap(1000), active_blocks=1000)}
    assert choose(room, rank(2, max_num_seqs=16), held=whole, tokens=16_000).position == 0
