"""The breaker of an instance: who is left out, who probes, and that neither goes on for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo.errors import WorkerUnavailable
from dynamo.runtime.instances import InstanceSet, RouterMode
from dynamo.runtime.quarantine import LONGEST_FACTOR, Quarantine
from dynamo.runtime.request_plane.base import Instance

BASE = 5.0
MODES = [mode for mode in RouterMode if mode is not RouterMode.DIRECT]


def instances(*ids: int, seed: int = 0) -> InstanceSet:
    found = InstanceSet("ns/c/e", rng=random.Random(seed), inhibit_seconds=BASE)
    for instance_id in ids:
        found.add(
            Instance(
                namespace="ns",
                component="c",
                endpoint="e",
                instance_id=instance_id,
                transport={"mem": str(instance_id)},
            )
        )
    return found


def test_after_the_time_one_request_probes_and_its_answer_ends_the_quarantine() -> None:
    found = Quarantine(BASE)
    assert found.failed(1, 100.0)
    assert found.shut_out(104.9) == {1}
    assert found.shut_out(105.0) == frozenset()
    assert found.sent(1, 105.0)
    assert found.shut_out(105.0) == {1}  # the others still go elsewhere
    assert found.answered(1)
    assert not found


def test_a_probe_that_fails_doubles_the_time_up_to_a_bound() -> None:
    found, now, lengths = Quarantine(BASE), 0.0, []
    found.failed(1, now)
    for _ in range(8):
        start = now
        while found.shut_out(now):
            now += 0.5
        lengths.append(now - start)
        assert found.sent(1, now)
        found.failed(1, now)
    assert lengths == [5, 10, 20, 40, 60, 60, 60, 60]
    assert lengths[-1] == LONGEST_FACTOR * BASE


def test_a_probe_that_never_returns_makes_room_for_another() -> None:
    found = Quarantine(BASE)
    found.failed(1, 0.0)
    assert found.sent(1, 5.0)
    assert found.shut_out(14.9) == {1}
    assert found.sent(1, 15.0)


def test_many_streams_that_break_together_are_one_failure() -> None:
    found = Quarantine(BASE)
    assert [found.failed(1, 10.0 + 0.001 * number) for number in range(100)].count(True) == 1
    assert found.shut_out(15.2) == frozenset()


def test_without_a_time_nobody_is_left_out() -> None:
    found = Quarantine(0.0)
    assert not found.failed(1, 0.0)
    assert not found


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(), down=st.sets(st.integers(1, 4)), exclude=st.sets(st.integers(1, 4)))
def test_routing_never_fails_while_anybody_is_left_to_ask(
    mode: RouterMode, seed: int, down: set[int], exclude: set[int]
) -> None:
    found = instances(1, 2, 3, 4, seed=seed)
    for instance_id in down:
        found.inhibit(instance_id, 0.0)
    allowed = {1, 2, 3, 4} - exclude
    if not allowed:
        with pytest.raises(WorkerUnavailable):
            found.pick(mode, 1.0, exclude)
        return
    assert found.pick(mode, 1.0, exclude).instance_id in (allowed - down or allowed)
    if allowed <= down:
        with pytest.raises(WorkerUnavailable):
            found.pick(mode, 1.0, exclude, only_well=True)


class Breaker(RuleBasedStateMachine):
    """Two instances, any order of failures, probes and answers; the clock only goes forward."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Quarantine(BASE)
        self.now = 0.0
        self.news: dict[int, float] = {}  # who is in quarantine -> when anything last happened to it

    @rule(seconds=st.floats(0.0, 30.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(who=st.integers(1, 2))
    def fail(self, who: int) -> None:
        assert self.found.failed(who, self.now) is (who not in self.news)
        assert who in self.found.shut_out(self.now)
        self.news[who] = self.now

    @rule(who=st.integers(1, 2))
    def send(self, who: int) -> None:
        was_due = who in self.news and who not in self.found.shut_out(self.now)
        assert self.found.sent(who, self.now) is was_due
        if was_due:
            assert not self.found.sent(who, self.now)  # one, and no second one beside it
            self.news[who] = self.now

    @precondition(lambda self: self.news)
    @rule(who=st.integers(1, 2))
    def answer(self, who: int) -> None:
        assert self.found.answered(who) is (self.news.pop(who, None) is not None)
        assert who not in self.found.shut_out(self.now)

    @invariant()
    def nobody_is_left_out_for_ever(self) -> None:
        assert set(self.found) == set(self.news)
        longest = max(self.news.values(), default=0.0) + LONGEST_FACTOR * BASE
        assert self.found.shut_out(longest) == frozenset()
        assert self.found.shut_out(self.now) <= set(self.news)


TestBreaker = Breaker.TestCase
