"""The circuit breaker of a worker: when it is left out, which request probes it, and that neither goes on for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo.errors import WorkerUnavailable
from dynamo.placement import Candidate, CircuitBreaker, PlacementRequest, RouterMode, place, policy_for
from dynamo.placement.circuit_breaker import LONGEST_FACTOR

BASE = 5.0
MODES = [mode for mode in RouterMode if mode not in (RouterMode.DIRECT, RouterMode.KV)]


def test_after_the_time_one_request_probes_and_its_answer_ends_the_quarantine() -> None:
    found = CircuitBreaker(BASE)
    assert found.record_failure(1, 100.0)
    assert found.open_circuits(104.9) == {1}
    assert found.open_circuits(105.0) == frozenset()
    assert found.record_request(1, 105.0)
    assert found.open_circuits(105.0) == {1}  # the others still go elsewhere
    assert found.record_answer(1)
    assert not found


def test_a_probe_that_fails_doubles_the_time_up_to_a_bound() -> None:
    found, now, lengths = CircuitBreaker(BASE), 0.0, []
    found.record_failure(1, now)
    for _ in range(8):
        start = now
        while found.open_circuits(now):
            now += 0.5
        lengths.append(now - start)
        assert found.record_request(1, now)
        found.record_failure(1, now)
    assert lengths == [5, 10, 20, 40, 60, 60, 60, 60]
    assert lengths[-1] == LONGEST_FACTOR * BASE


def test_a_probe_that_never_returns_makes_room_for_another() -> None:
    found = CircuitBreaker(BASE)
    found.record_failure(1, 0.0)
    assert found.record_request(1, 5.0)
    assert found.open_circuits(14.9) == {1}
    assert found.record_request(1, 15.0)


def test_many_streams_that_break_together_are_one_failure() -> None:
    found = CircuitBreaker(BASE)
    assert [found.record_failure(1, 10.0 + 0.001 * number) for number in range(100)].count(True) == 1
    assert found.open_circuits(15.2) == frozenset()


def test_without_a_time_nobody_is_left_out() -> None:
    found = CircuitBreaker(0.0)
    assert not found.record_failure(1, 0.0)
    assert not found


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(), down=st.sets(st.integers(1, 4)), exclude=st.sets(st.integers(1, 4)))
def test_routing_never_fails_while_any_worker_is_left(
    mode: RouterMode, seed: int, down: set[int], exclude: set[int]
) -> None:
    policy = policy_for(mode, rng=random.Random(seed))
    candidates = [Candidate(number, is_circuit_open=number in down) for number in (1, 2, 3, 4)]
    request = PlacementRequest(excluded=[("", number) for number in exclude])
    careful = PlacementRequest(excluded=request.excluded, healthy_only=True)
    allowed = {1, 2, 3, 4} - exclude
    if not allowed:
        with pytest.raises(WorkerUnavailable):
            place(policy, request, candidates, 1.0, scope="m")
        return
    chosen = place(policy, request, candidates, 1.0, scope="m").candidate.instance_id
    assert chosen in (allowed - down or allowed)
    if allowed <= down:
        with pytest.raises(WorkerUnavailable):
            place(policy, careful, candidates, 1.0, scope="m")


class Breaker(RuleBasedStateMachine):
    """Two instances, any order of failures, probes and answers; the clock only goes forward."""

    def __init__(self) -> None:
        super().__init__()
        self.found = CircuitBreaker(BASE)
        self.now = 0.0
        self.news: dict[int, float] = {}  # who is in quarantine -> when anything last happened to it

    @rule(seconds=st.floats(0.0, 30.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(who=st.integers(1, 2))
    def fail(self, who: int) -> None:
        assert self.found.record_failure(who, self.now) is (who not in self.news)
        assert who in self.found.open_circuits(self.now)
        self.news[who] = self.now

    @rule(who=st.integers(1, 2))
    def send(self, who: int) -> None:
        was_due = who in self.news and who not in self.found.open_circuits(self.now)
        assert self.found.record_request(who, self.now) is was_due
        if was_due:
            assert not self.found.record_request(who, self.now)  # one, and no second one beside it
            self.news[who] = self.now

    @precondition(lambda self: self.news)
    @rule(who=st.integers(1, 2))
    def answer(self, who: int) -> None:
        assert self.found.record_answer(who) is (self.news.pop(who, None) is not None)
        assert who not in self.found.open_circuits(self.now)

    @invariant()
    def nobody_is_left_out_for_ever(self) -> None:
        assert set(self.found) == set(self.news)
        longest = max(self.news.values(), default=0.0) + LONGEST_FACTOR * BASE
        assert self.found.open_circuits(longest) == frozenset()
        assert self.found.open_circuits(self.now) <= set(self.news)


TestBreaker = Breaker.TestCase
