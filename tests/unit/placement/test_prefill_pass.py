"""The passes of a rank, as first tokens show them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.placement.prefill_pass import FinishedPasses, PrefillPass
from support.properties import examples

about: Any = pytest.approx  # stands where a figure does


def sent(budget: int = 8192, **prompts: int) -> PrefillPass:
    """Return the account of a rank to which these prompts were sent at once."""
    rank = PrefillPass()
    rank.budget = budget
    for name, tokens in prompts.items():
        rank.join(name, tokens, 0.0)
    return rank


def test_what_arrives_during_a_pass_waits_for_the_next() -> None:
    rank = sent(a=100)
    rank.join("b", 30, 0.01)
    rank.join("c", 20, 0.02)
    assert (rank.running_tokens, rank.waiting_tokens, rank.started_at) == (100, 50, 0.0)
    rank.complete("a", 0.5)
    assert rank.take_finished() == FinishedPasses(1, 100, 10_000.0, 0.5, True)
    assert rank.take_finished() is None
    assert (rank.running_tokens, rank.waiting_tokens, rank.started_at) == (50, 0, 0.5)
    assert rank.complete("b", 0.75) == FinishedPasses(1, 50, 2_500.0, 0.25, False)
    assert rank.complete("c", 0.75) is None  # its token came in the same moment: the pass was seen to end already
    assert (rank.running, rank.running_tokens) == ({}, 0)


def test_two_first_tokens_in_one_moment_are_of_one_pass() -> None:
    """An engine that is idle for an instant takes what arrives in it into one pass, and a pass that waits for a step too."""
    rank = sent(a=600, b=200)
    rank.join("c", 100, 0.001)
    assert rank.complete("a", 0.030) == FinishedPasses(1, 600, 600.0**2, 0.030, True)
    assert rank.take_finished() == FinishedPasses(1, 600, 600.0**2, 0.030, True)
    assert rank.complete("b", 0.0305) is None  # no pass ended: it is the same one
    assert rank.take_finished() == FinishedPasses(1, 800, 800.0**2, 0.030, True, is_corrected=True)
    assert (dict(rank.running), rank.running_tokens, rank.started_at) == ({"c": 100}, 100, 0.030)
    assert rank.complete("c", 0.052) == FinishedPasses(1, 100, 100.0**2, about(0.022), False)


def test_a_third_prompt_of_one_pass_counts_as_well() -> None:
    rank = sent(a=600, b=200, c=100)
    rank.complete("a", 0.030)
    rank.complete("b", 0.030)
    rank.complete("c", 0.0302)
    assert rank.take_finished() == FinishedPasses(1, 900, 900.0**2, 0.030, True, is_corrected=True)
    rank.join("d", 50, 0.0303)
    assert rank.complete("d", 0.0503) == FinishedPasses(1, 50, 50.0**2, about(0.02), True)


def test_prompts_that_exceed_the_budget_together_were_in_two_passes() -> None:
    rank = sent(700, a=600, b=200)
    rank.complete("a", 0.030)
    assert rank.complete("b", 0.0305) == FinishedPasses(1, 200, 200.0**2, about(0.0005), False)


def test_the_next_pass_of_a_fast_engine_is_one_of_its_own() -> None:
    rank = sent(a=600, b=600)
    rank.complete("a", 0.0005)
    assert rank.complete("b", 0.0010) == FinishedPasses(1, 600, 600.0**2, about(0.0005), False)


def test_what_arrived_after_a_pass_had_ended_was_not_in_it() -> None:
    rank = sent(a=600)
    rank.complete("a", 0.030)
    rank.join("b", 10, 0.0301)
    assert rank.complete("b", 0.0305) == FinishedPasses(1, 10, 100.0, about(0.0004), True)


def test_a_prompt_that_takes_the_place_of_one_given_up_is_of_no_earlier_pass() -> None:
    rank = sent(a=600, b=200)
    rank.complete("a", 0.030)
    rank.join("c", 100, 0.0301)
    rank.drop("b", 0.0302)
    assert rank.complete("c", 0.0303) == FinishedPasses(1, 100, 100.0**2, about(0.0001), False)


def test_a_prompt_beyond_the_budget_goes_on_in_the_next_pass() -> None:
    rank = sent(100, first=10, long=250, last=30)
    rank.complete("first", 1.0)
    assert list(rank.running) == ["long", "last"]
    # 100, 100, 80 with the last one.
    assert rank.complete("long", 4.0) == FinishedPasses(3, 280, 100.0**2 * 2 + 80.0**2, 3.0, False)
    assert rank.running == {}


def test_what_comes_before_the_pass_begins_is_computed_in_it() -> None:
    """A long prompt that came in the same step as a short one is begun with it, and not after it."""
    rank = PrefillPass()
    rank.budget = 100
    rank.join("short", 10, 0.0, begins_at=0.01)
    rank.join("long", 250, 0.005)
    rank.join("late", 30, 0.01)
    assert rank.complete("short", 1.0) == FinishedPasses(1, 100, 100.0**2, 1.0, True)
    assert dict(rank.running) == {"long": 160, "late": 30}


def test_a_prompt_that_waits_is_begun_in_what_the_last_pass_has_left() -> None:
    rank = sent(100, long=250)
    rank.join("next", 200, 0.1)
    rank.join("late", 10, 2.5)  # the last pass has begun at 2.0
    assert rank.complete("long", 3.0) == FinishedPasses(3, 300, 3 * 100.0**2, 3.0, True)
    assert (dict(rank.running), rank.running_tokens) == ({"next": 150, "late": 10}, 160)
    assert rank.complete("next", 5.0) == FinishedPasses(2, 160, 100.0**2 + 60.0**2, 2.0, False)
    assert not rank.running


def test_a_short_prompt_may_end_while_a_long_one_goes_on() -> None:
    rank = sent(100, short=40, next=40, long=200)
    rank.complete("short", 1.0)
    rank.complete("next", 2.0)
    assert rank.running == {"long": 140}


def test_a_request_that_is_given_up_leaves_room() -> None:
    rank = sent(a=100, b=50)
    rank.drop("b", 0.1)
    assert rank.waiting_tokens == 0
    rank.join("c", 10, 0.2)
    rank.drop("a", 0.3)
    assert (rank.running, rank.running_tokens, rank.started_at) == ({"c": 10}, 10, 0.3)
    rank.drop("unknown", 0.4)
    assert rank.running_tokens == 10


@examples(40)
@given(st.lists(st.tuples(st.sampled_from(["join", "complete", "drop"]), st.integers(0, 9), st.integers(0, 30))))
def test_the_sums_are_those_of_the_requests_and_nothing_is_left_at_the_end(steps: list[tuple[str, int, int]]) -> None:
    rank = PrefillPass()
    rank.budget = 10
    known: set[str] = set()
    for now, (step, number, tokens) in enumerate(steps):
        request_id = str(number)
        if step == "join" and request_id not in known:
            known.add(request_id)
            rank.join(request_id, tokens, float(now))
        elif step == "complete" and request_id in known:
            known.remove(request_id)
            rank.complete(request_id, float(now))
        elif step == "drop":
            known.discard(request_id)
            rank.drop(request_id, float(now))
        assert known.issuperset([*rank.running, *rank.waiting])
        assert rank.running_tokens == sum(rank.running.values())
        assert rank.waiting_tokens == sum(tokens for tokens, _ in rank.waiting.values())
        assert rank.running or not rank.waiting
    for request_id in known:
        rank.drop(request_id, 0.0)
    assert (rank.running, rank.waiting, rank.running_tokens, rank.waiting_tokens) == ({}, {}, 0, 0)


def test_a_long_queue_costs_each_first_token_no_more_than_a_short_one() -> None:
    rank = PrefillPass()
    began = time.process_time()
    for number in range(10_000):
        rank.join(str(number), 9_000, 0.0)
    for number in range(10_000):
        rank.complete(str(number), 1.0)
    assert not rank.running
    assert time.process_time() - began < 3.0  # takes 0.02 s; a step for each waiting request takes over a minute
