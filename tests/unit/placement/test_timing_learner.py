"""What is learned of a rank's speed comes close to the truth, also from few samples, and one odd sample moves little."""

from __future__ import annotations

import random

import pytest

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.active_load import ActiveLoad
from dynamo.placement.timing import DEFAULT_TIMING, TimeCurve
from dynamo.placement.timing_learner import TimingLearner

A, B = WorkerRank(1), WorkerRank(2)
CAPACITY = 100_000


class Engine:
    """Answers one request after another, with the times of two curves, and tells the learner."""

    def __init__(self, prefill: TimeCurve, decode: TimeCurve, seed: int = 1) -> None:
        self.prefill, self.decode = prefill, decode
        self.load, self.learner = ActiveLoad(16), TimingLearner()
        self.learner.change((), {A: CAPACITY, B: CAPACITY})
        self.rng, self.now, self.number = random.Random(seed), 0.0, 0

    def answer(self, rank: WorkerRank = A, factor: float = 1.0) -> None:
        """Serve one request with nothing beside it."""
        tokens, output = self.rng.randrange(50, 8000), self.rng.randrange(20, 200)
        name = f"r{self.number}"
        self.number += 1
        self.load.add(name, rank, (), prompt_tokens=tokens, cached_tokens=0, now=self.now)
        self.now += factor * self.prefill.at(tokens) / 1000
        self.load.prefill_completed(name, self.now)
        account = self.load.of(rank)
        passes = account.prefill_pass.take_finished()
        assert passes is not None
        self.learner.prefilled(rank, account, passes, self.now)
        self.now += factor * (output - 1) * self.decode.at(tokens / CAPACITY) / 1000
        self.load.output(name, output)
        booked = self.load.free(name, self.now)
        assert booked is not None
        self.learner.ended(booked, account, self.now)

    def answer_in_turns(self, count: int, *ranks: tuple[WorkerRank, float]) -> None:
        """Serve so many requests at each rank, which is slower by a factor."""
        for _ in range(count):
            for rank, factor in ranks:
                self.answer(rank, factor)

    def answer_together(self, *prompts: int, ends_first: bool = False) -> None:
        """Compute some prompts in one pass; their first tokens are seen 20 us apart."""
        names = [f"{self.number}.{at}" for at in range(len(prompts))]
        self.number += 1
        for name, tokens in zip(names, prompts, strict=True):
            self.load.add(name, A, (), prompt_tokens=tokens, cached_tokens=0, now=self.now)
        self.now += self.prefill.at(sum(prompts)) / 1000
        account = self.load.of(A)
        for name in names:
            self.now += 2e-5
            self.load.prefill_completed(name, self.now)
            passes = account.prefill_pass.take_finished()
            if passes is not None:
                self.learner.prefilled(A, account, passes, self.now)
            if ends_first:
                self._end(name)
        if not ends_first:
            self.now += 0.1
            for name in names:
                self._end(name)

    def answer_beside(self, count: int, stream_ms: float, output: int = 100) -> None:
        """Serve so many short prompts at once, each stream of which makes the steps longer."""
        names = [f"{self.number}.{at}" for at in range(count)]
        self.number += 1
        for name in names:
            self.load.add(name, A, (), prompt_tokens=18, cached_tokens=0, now=self.now)
        self.now += self.prefill.at(18 * count) / 1000
        for name in names:
            self.load.prefill_completed(name, self.now)
        self.now += (output - 1) * (self.decode.at(0) + stream_ms * count) / 1000
        for name in names:
            self.load.output(name, output)
            self._end(name)

    def _end(self, name: str) -> None:
        booked = self.load.free(name, self.now)
        assert booked is not None
        self.learner.ended(booked, self.load.of(A), self.now)


@pytest.mark.parametrize("ends_first", [False, True], ids=["streams", "prefill worker"])
def test_two_prompts_of_one_pass_teach_what_one_prompt_of_their_size_teaches(ends_first: bool) -> None:
    prefill = TimeCurve(30, 0.03, 1e-6)
    pairs, singles = (Engine(prefill, TimeCurve(12, 20)) for _ in range(2))
    for _ in range(60):
        first, second = pairs.rng.randrange(50, 4000), pairs.rng.randrange(50, 4000)
        pairs.answer_together(first, second, ends_first=ends_first)
        singles.answer_together(first + second, ends_first=ends_first)
    learned, expected = (engine.learner.timing(A).prefill for engine in (pairs, singles))
    for tokens in (500, 2000, 8000):
        assert learned.at(tokens) == pytest.approx(expected.at(tokens))
        assert learned.at(tokens) == pytest.approx(prefill.at(tokens), rel=0.1)


def test_the_last_pass_before_a_pause_is_learned() -> None:
    engine = Engine(TimeCurve(60, 0.06), TimeCurve(25, 0))
    engine.answer_together(4000)
    assert engine.learner.timing(A).prefill.at(4000) > 1.5 * DEFAULT_TIMING.prefill.at(4000)


@pytest.mark.parametrize("speed", [0.1, 1.0, 10.0])
def test_the_curves_come_close_to_the_truth(speed: float) -> None:
    prefill, decode = TimeCurve(30 / speed, 0.03 / speed, 1e-6 / speed), TimeCurve(12 / speed, 20 / speed)
    engine = Engine(prefill, decode)
    engine.answer_in_turns(60, (A, 1.0))
    learned = engine.learner.timing(A)
    for tokens in (500, 2000, 8000):
        assert learned.prefill.at(tokens) == pytest.approx(prefill.at(tokens), rel=0.1)
    for fill in (0.01, 0.05):
        assert learned.decode.at(fill) == pytest.approx(decode.at(fill), rel=0.15)


def test_a_rank_that_has_shown_nothing_is_taken_for_one_of_its_pool() -> None:
    engine = Engine(TimeCurve(60, 0.06), TimeCurve(25, 0))
    assert engine.learner.timing(B).prefill.at(4000) == pytest.approx(DEFAULT_TIMING.prefill.at(4000))
    engine.answer_in_turns(20, (A, 1.0))
    assert engine.learner.timing(B).prefill.at(4000) == pytest.approx(300, rel=0.1)
    engine.answer(B)
    assert engine.learner.timing(B).prefill.at(4000) == pytest.approx(300, rel=0.3)


def test_ranks_are_named_when_the_pool_moves_that_they_are_compared_with() -> None:
    engine = Engine(TimeCurve(60, 0.06), TimeCurve(25, 0))
    engine.answer(A)
    assert engine.learner.moved == {B}
    alone, believed = engine.learner.timing(A), engine.learner.timing(B)
    # As far from the prior as the only rank that has shown anything: else B would seem faster for no reason.
    assert believed.prefill.at(4000) == pytest.approx(alone.prefill.at(4000))
    engine.answer_in_turns(60, (A, 1.0), (B, 1.0))
    engine.learner.moved.clear()
    engine.answer_in_turns(8, (A, 1.0))
    assert engine.learner.moved == set()  # nothing new was shown


def test_what_chance_may_have_shown_is_not_taken_for_the_speed_of_a_rank() -> None:
    engine = Engine(TimeCurve(20, 0.001), TimeCurve(10, 0))
    for _ in range(8):
        for rank, factor in ((A, engine.rng.uniform(0.7, 1.2)), (B, engine.rng.uniform(0.8, 1.3))):
            engine.answer_in_turns(4, (rank, factor))  # a crowd: its samples err alike
    one, other = engine.learner.timing(A), engine.learner.timing(B)
    assert other.prefill.at(18) == pytest.approx(one.prefill.at(18), rel=0.03)
    assert other.decode.at(0.01) == pytest.approx(one.decode.at(0.01), rel=0.03)


def test_what_each_stream_adds_to_a_step_is_learned() -> None:
    engine = Engine(TimeCurve(20, 0.001), TimeCurve(8, 0))
    for count in (1, 8, 3, 6, 2, 8, 1, 4) * 4:
        engine.answer_beside(count, stream_ms=0.8)
    learned = engine.learner.timing(A)
    assert learned.stream_ms > 0.5  # some of it looks like the contexts that the streams have
    for streams in (1, 4, 8):
        assert learned.step_ms(118 * streams / CAPACITY, streams) == pytest.approx(8 + 0.8 * streams, rel=0.1)


def test_a_rank_four_times_slower_than_all_others_is_known_after_a_dozen_requests() -> None:
    engine = Engine(TimeCurve(16, 0.015), TimeCurve(8, 20))
    engine.answer_in_turns(30, (A, 1.0))
    for _ in range(12):
        engine.answer(B, factor=4.0)
        engine.answer_in_turns(6, (A, 1.0))
    learned = engine.learner.timing(B)
    assert learned.prefill.at(2000) == pytest.approx(4 * 46, rel=0.25)  # it was 1.4 times that of the others
    assert learned.decode.at(0.05) == pytest.approx(4 * 9, rel=0.25)


def test_a_rank_that_becomes_slower_is_known_to_within_a_dozen_requests() -> None:
    engine = Engine(TimeCurve(16, 0.015), TimeCurve(8, 20))
    engine.answer_in_turns(60, (A, 1.0), (B, 1.0))
    engine.answer_in_turns(12, (A, 1.0), (B, 3.0))
    learned = engine.learner.timing(B)
    assert learned.prefill.at(2000) == pytest.approx(3 * 46, rel=0.25)
    assert learned.decode.at(0.05) == pytest.approx(3 * 9, rel=0.25)
    assert engine.learner.timing(A).prefill.at(2000) == pytest.approx(46, rel=0.1)


def test_a_slower_rank_is_told_from_the_others() -> None:
    engine = Engine(TimeCurve(20, 0.02), TimeCurve(10, 0))
    engine.answer_in_turns(40, (A, 1.0), (B, 3.0))
    fast, slow = (engine.learner.timing(each).prefill.at(4000) for each in (A, B))
    assert slow / fast == pytest.approx(3.0, rel=0.3)


def test_one_odd_sample_moves_little() -> None:
    engine = Engine(TimeCurve(20, 0.02), TimeCurve(10, 0))
    engine.answer_in_turns(40, (A, 1.0))
    before = engine.learner.timing(A).prefill.at(4000)
    engine.answer(factor=100.0)
    assert engine.learner.timing(A).prefill.at(4000) == pytest.approx(before, rel=0.5)


def test_the_length_of_answers_is_learned() -> None:
    engine = Engine(TimeCurve(20, 0.02), TimeCurve(10, 0))
    assert engine.learner.timing(A).output_tokens == DEFAULT_TIMING.output_tokens
    engine.answer_in_turns(100, (A, 1.0))
    assert engine.learner.timing(B).output_tokens == pytest.approx(110, rel=0.25)


def test_ranks_that_are_gone_are_forgotten() -> None:
    engine = Engine(TimeCurve(20, 0.02), TimeCurve(10, 0))
    engine.answer_in_turns(40, (A, 1.0), (B, 3.0))
    slow = engine.learner.timing(B).prefill.at(4000)
    engine.learner.change((B,), {})
    engine.learner.change((), {A: CAPACITY, B: CAPACITY})
    assert engine.learner.timing(B).prefill.at(4000) < 0.8 * slow


def test_times_that_cannot_be_are_left_out() -> None:
    engine = Engine(TimeCurve(0, 0), TimeCurve(0, 0))
    engine.answer()
    assert engine.learner.timing(A).prefill.at(4000) == pytest.approx(DEFAULT_TIMING.prefill.at(4000))
    assert engine.learner.timing(A).decode == DEFAULT_TIMING.decode
