"""The rule that tells a stalled stream from a slow one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo.router.dispatch.stall_detector import (
    ALONE_FACTOR,
    LAST_FACTOR,
    LONGEST_FLOORS,
    PROMPT_FACTOR,
    SETTLED_TICKS,
    StallKind,
    StallPolicy,
    TokenCadence,
    judge,
)
from support.properties import examples

PATIENCE = StallPolicy(10.0, 20.0)
FLOOR = PATIENCE.ticks(10.0)
NOT_ONE = StallPolicy(0.0)


class Engine:
    """Streams of one worker, looked at in ticks."""

    def __init__(self, count: int) -> None:
        self.cadences = [TokenCadence() for _ in range(count)]
        self.tokens = [0] * count

    def tick(self, *speakers: int, is_reading: bool = True) -> None:
        for number, cadence in enumerate(self.cadences):
            self.tokens[number] += number in speakers
            cadence.tick(self.tokens[number], 1, is_reading)

    def settle(self) -> None:
        for _ in range(SETTLED_TICKS + 1):
            self.tick(*range(len(self.cadences)))

    def findings(self, policy: StallPolicy = PATIENCE, **more: bool) -> dict[int, StallKind]:
        return {self.cadences.index(cadence): kind for cadence, kind, _ in judge(self.cadences, policy, **more)}

    def silent_until_found(self, *speakers: int) -> int:
        """Ticks of silence of all but `speakers` until anything is found."""
        for ticks in range(1, LONGEST_FLOORS * FLOOR * LAST_FACTOR):
            self.tick(*speakers)
            if self.findings():
                return ticks
        raise AssertionError("never")


def test_the_floor_is_as_many_beats_as_it_says() -> None:
    assert PATIENCE.tick_seconds == 0.5
    assert FLOOR == 20
    assert not NOT_ONE.is_on
    assert StallPolicy(0.0, first_token_seconds=1.0).tick_seconds == 0.05


@examples(50)
@given(gaps=st.lists(st.integers(1, 12), min_size=SETTLED_TICKS + 1, max_size=20), data=st.data())
def test_a_stream_that_stays_below_twenty_times_its_own_longest_gap_is_never_stalled(
    gaps: list[int], data: st.DataObject
) -> None:
    engine = Engine(1)
    pause = data.draw(st.integers(1, max(FLOOR, 20 * max(gaps[1:]))))  # the longest that its past allows
    for gap in [*gaps, pause]:
        for _ in range(gap - 1):
            engine.tick()
            assert engine.findings() == {}
        engine.tick(0)


@examples(25)
@given(gap=st.integers(1, 80), streams=st.integers(1, 4))
def test_a_worker_that_falls_silent_is_found_frozen_within_the_limit(gap: int, streams: int) -> None:
    engine = Engine(streams)
    everybody = range(streams)
    for _ in range(SETTLED_TICKS + 2):
        for _ in range(gap - 1):
            engine.tick()
        engine.tick(*everybody)
    limit = min(max(FLOOR, 20 * gap), LONGEST_FLOORS * FLOOR)
    assert engine.silent_until_found() == max(limit, 2 * gap)
    assert engine.findings() == dict.fromkeys(everybody, StallKind.FROZEN)


def test_an_engine_that_needs_long_for_its_first_token_is_given_as_long_for_the_second() -> None:
    engine = Engine(1)
    for _ in range(29):
        engine.tick()
    engine.tick(0)
    assert engine.silent_until_found() == 30 * 20


def test_the_time_to_a_first_token_counts_no_more_once_the_pace_is_known() -> None:
    engine = Engine(1)
    for _ in range(29):
        engine.tick()
    engine.settle()
    assert engine.silent_until_found() == FLOOR


def test_one_silent_stream_among_others_is_given_longer_and_is_not_its_workers_fault() -> None:
    engine = Engine(3)
    engine.settle()
    assert engine.silent_until_found(0, 2) == ALONE_FACTOR * FLOOR
    assert engine.findings() == {1: StallKind.STUCK}
    assert not StallKind.STUCK.is_worker_fault


def test_a_prompt_that_was_there_when_the_others_fell_silent_gives_them_longer() -> None:
    engine = Engine(3)
    for _ in range(SETTLED_TICKS + 2):
        engine.tick(0, 1)
    assert engine.silent_until_found() == PROMPT_FACTOR * FLOOR
    assert set(engine.findings().values()) == {StallKind.FROZEN}


def test_a_request_that_came_later_explains_nothing_and_is_moved_too() -> None:
    engine = Engine(2)
    engine.settle()
    for _ in range(5):
        engine.tick()
    engine.cadences.append(TokenCadence())
    engine.tokens.append(0)
    assert engine.silent_until_found() == FLOOR - 5
    assert engine.findings() == dict.fromkeys(range(3), StallKind.FROZEN)


def test_a_slow_neighbour_is_no_sign_of_life_of_a_frozen_worker() -> None:
    engine = Engine(2)
    for number in range(40):
        engine.tick(0, *([1] if number % 6 == 0 else []))
    assert engine.silent_until_found() <= FLOOR
    assert engine.findings() == {0: StallKind.FROZEN, 1: StallKind.FROZEN}


def test_waiting_alone_is_no_stall_unless_the_worker_was_found_frozen() -> None:
    engine = Engine(1)
    for _ in range(FLOOR):
        engine.tick()
    assert engine.findings() == {}
    assert engine.findings(was_frozen=True) == {0: StallKind.FROZEN}


def test_a_client_that_does_not_read_is_no_stall() -> None:
    engine = Engine(1)
    engine.settle()
    for _ in range(100 * FLOOR):
        engine.tick(is_reading=False)
    assert engine.findings() == {}
    assert engine.silent_until_found() == FLOOR  # from when it reads again


def test_the_last_word_comes_much_later() -> None:
    engine = Engine(1)
    engine.settle()
    words = []
    for _ in range(LAST_FACTOR * FLOOR + 1):
        engine.tick()
        words += [is_last for _, _, is_last in judge(engine.cadences, PATIENCE)]
    assert words == [False] * ((LAST_FACTOR - 1) * FLOOR) + [True, True]


def test_a_new_worker_begins_anew_but_the_streams_own_gaps_stay_known() -> None:
    cadence = TokenCadence()
    for tokens in (0, 1, 2, 2, 2, 3):
        cadence.tick(tokens, 1, True)
    assert (cadence.ticks_with_tokens, cadence.longest) == (3, 3)
    assert not cadence.tick(3, 2, True)
    assert (cadence.ticks_with_tokens, cadence.silence, cadence.longest) == (0, 1, 3)


@examples(25)
@given(first=st.floats(0.05, 60.0), inter=st.floats(0.05, 60.0))
def test_deadlines_are_kept_to_the_beat(first: float, inter: float) -> None:
    policy = StallPolicy(0.0, first_token_seconds=first, inter_token_seconds=inter)
    for has_begun, seconds, kind in ((False, first, StallKind.FIRST_TOKEN), (True, inter, StallKind.INTER_TOKEN)):
        engine = Engine(1)
        if has_begun:
            engine.tick(0)
        ticks = 0
        while not engine.findings(policy):
            engine.tick()
            ticks += 1
        assert engine.findings(policy) == {0: kind}
        assert seconds - 1e-6 <= ticks * policy.tick_seconds <= max(seconds, 0.02) + policy.tick_seconds + 1e-6
