"""The decision how many workers there should be."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument
from dynamo.scaling.decide import (
    LONGEST_COOLDOWN_SECONDS,
    Decision,
    LoadSample,
    ScaleReason,
    ScaleRules,
    ScaleState,
    cooldown_seconds,
    decide,
)
from dynamo.scaling.follower import ScaleFollower

RULES = ScaleRules(min_workers=1, max_workers=8)


def samples(*loads: float, end: float = 1000.0, every: float = 1.0) -> tuple[LoadSample, ...]:
    return tuple(LoadSample(end - every * (len(loads) - 1 - number), load) for number, load in enumerate(loads))


def decided(loads: tuple[LoadSample, ...], aimed: int, rules: ScaleRules = RULES, **state: float) -> Decision:
    return decide(ScaleState(aimed, loads, **state), rules, 1000.0)  # type: ignore[arg-type]


class Cluster:
    """Workers that take `start_seconds` to start, under a load that a function of the time gives."""

    def __init__(
        self, rules: ScaleRules, load: Callable[[float], float], *, start_seconds: float, workers: int
    ) -> None:
        self.follower = ScaleFollower(rules, workers)
        self.follower.started(start_seconds)
        self.load, self.start_seconds = load, start_seconds
        self.ready, self.starts = workers, list[float]()
        self.targets: list[tuple[float, int]] = [(0.0, workers)]
        self.now = 0.0

    def run(self, until: float) -> None:
        while self.now < until:
            self.now += 1.0
            while self.starts and self.starts[0] <= self.now:
                self.starts.pop(0)
                self.ready += 1
            self.follower.sample(self.load(self.now), self.now)
            found = self.follower.decide(self.ready, self.now)
            if found.target > self.follower.aimed:
                self.starts += [self.now + self.start_seconds] * (found.target - self.follower.aimed)
            elif found.target < self.follower.aimed:
                assert not self.starts, "down while a start is pending"
                self.ready -= self.follower.aimed - found.target
            if found.target != self.follower.aimed:
                self.targets.append((self.now, found.target))
            self.follower.aim(found.target, self.now)


class TestUp:
    def test_full_for_long_enough(self) -> None:
        found = decided(samples(*[0.5] * 60, *[1.2] * 6), 1)
        assert (found.target, found.reason) == (2, ScaleReason.FULL)

    def test_a_blip_changes_nothing(self) -> None:
        assert decided(samples(*[0.5] * 60, 1.2, 1.2), 1).reason is ScaleReason.HOLD
        assert decided(samples(*[0.5] * 60, 3.0, 3.0, 3.0, 0.5), 1).reason is ScaleReason.HOLD

    def test_much_work_that_waits_is_not_waited_for(self) -> None:
        """Five times what one worker does: after a second more waits than a new one would have done while it started."""
        found = decided(samples(*[0.1] * 60, 5.0, 5.0), 1, start_seconds=3.0)
        assert (found.target, found.reason) == (2, ScaleReason.PILED_UP)

    def test_at_most_twice_as_many(self) -> None:
        assert decided(samples(*[20.0] * 20), 3).target == 6

    def test_by_what_is_needed(self) -> None:
        assert decided(samples(*[4.2] * 20), 4).target == math.ceil(4.2 / 0.7)

    def test_a_load_that_grows_is_met_before_it_is_there(self) -> None:
        growing = [0.4 + 0.008 * second for second in range(60)]  # 0.87 now, 1.11 in 30 s
        found = decided(samples(*growing), 1, start_seconds=30.0)
        assert (found.target, found.reason) == (2, ScaleReason.TREND)
        assert decided(samples(*growing), 1, start_seconds=2.0).reason is ScaleReason.HOLD

    def test_never_beyond_what_a_start_in_progress_covers(self) -> None:
        assert decided(samples(*[1.9] * 20), 2, starting=1).reason is ScaleReason.HOLD
        assert decided(samples(*[2.5] * 20), 2, starting=1).target == 4

    def test_at_the_maximum(self) -> None:
        assert decided(samples(*[20.0] * 20), 8) == (
            8,
            ScaleReason.AT_MAXIMUM,
            decided(samples(*[20.0] * 20), 8).text,
        )

    def test_below_the_minimum(self) -> None:
        assert decided((), 1, ScaleRules(min_workers=3, max_workers=4)).target == 3

    def test_the_first_request_starts_a_worker_at_once(self) -> None:
        rules = ScaleRules(min_workers=0, max_workers=4)
        assert decided(samples(0.0, 0.0), 0, rules).target == 0
        found = decided(samples(0.0, 1.0), 0, rules)
        assert (found.target, found.reason) == (1, ScaleReason.FIRST_REQUEST)


class TestFailedStarts:
    def test_the_next_start_waits_longer_each_time(self) -> None:
        full = samples(*[3.0] * 20)
        for failures in range(1, 12):
            wait = cooldown_seconds(failures)
            assert decided(full, 1, failures=failures, failed_at=1000.0 - wait + 1).reason is ScaleReason.COOLDOWN
            assert decided(full, 1, failures=failures, failed_at=1000.0 - wait).target > 1
        assert cooldown_seconds(12) == cooldown_seconds(10_000) == LONGEST_COOLDOWN_SECONDS

    def test_a_clock_that_was_set_back_does_not_forbid_starts_for_ever(self) -> None:
        assert decided(samples(*[3.0] * 20), 1, failures=1, failed_at=5_000_000.0).target > 1


class TestDown:
    def test_one_at_a_time_after_a_long_spell(self) -> None:
        found = decided(samples(*[0.1] * 125), 4)
        assert (found.target, found.reason) == (3, ScaleReason.SPARE)
        assert decided(samples(*[0.1] * 100), 4).reason is ScaleReason.HOLD
        assert decided(samples(*[0.1] * 125), 4, changed_at=950.0).reason is ScaleReason.HOLD

    def test_not_if_it_would_be_missed(self) -> None:
        """Two workers to one: 0.55 of one worker is below 0.8 x 0.7, 0.57 is not."""
        assert decided(samples(*[0.55] * 125), 2).target == 1
        assert decided(samples(*[0.57] * 125), 2).target == 2

    def test_not_while_one_starts_nor_below_the_minimum(self) -> None:
        assert decided(samples(*[0.1] * 125), 4, starting=1).target == 4
        assert decided(samples(*[0.0] * 125), 1).target == 1

    def test_the_last_one_goes_only_without_any_work(self) -> None:
        rules = ScaleRules(min_workers=0, max_workers=4)
        assert decided(samples(*[0.0] * 125), 1, rules) == (0, ScaleReason.IDLE, "nothing to do for 120 s")
        assert decided(samples(*[0.0] * 60, 0.01, *[0.0] * 64), 1, rules).target == 1

    def test_a_peak_within_the_spell_keeps_them(self) -> None:
        assert decided(samples(*[0.1] * 60, 1.9, *[0.1] * 64), 3).target == 3

    def test_a_gap_in_the_samples_begins_a_new_spell(self) -> None:
        """A machine that slept has seen nothing meanwhile."""
        broken = (*samples(*[0.1] * 100, end=900.0), *samples(*[0.1] * 50))
        assert decided(broken, 4).target == 4

    def test_too_many_workers(self) -> None:
        assert decided((), 12) == (11, ScaleReason.ABOVE_MAXIMUM, "12 workers, at most 8")


class TestOverTime:
    @given(
        load=st.floats(0, 12),
        noise=st.floats(0, 0.3),
        start_seconds=st.floats(0.5, 120),
        workers=st.integers(1, 8),
        seed=st.integers(0, 10_000),
    )
    def test_a_constant_load_settles(
        self, load: float, noise: float, start_seconds: float, workers: int, seed: int
    ) -> None:
        """Within a quarter of an hour, for any noise up to 30 %: then nothing changes for ten minutes."""
        rng = random.Random(seed)
        cluster = Cluster(
            RULES, lambda _: load * rng.uniform(1 - noise, 1 + noise), start_seconds=start_seconds, workers=workers
        )
        cluster.run(900.0)
        settled = cluster.follower.aimed
        assert load <= settled or settled == 8
        before = len(cluster.targets)
        cluster.run(1500.0)
        later = [target for _, target in cluster.targets[before:]]
        assert all(1 <= target <= 8 for _, target in cluster.targets)
        ups = sum(after > earlier for earlier, after in zip([settled, *later], later, strict=False))
        assert ups <= 1, cluster.targets  # a peak of the noise that had not been seen

    @given(after=st.floats(0.5, 7.5), start_seconds=st.floats(0.5, 60))
    def test_a_step_is_met_within_a_bound(self, after: float, start_seconds: float) -> None:
        """From one worker to n takes as many doublings, each with its start and at most the time a blip may last."""
        cluster = Cluster(RULES, lambda now: 0.1 if now < 300 else after, start_seconds=start_seconds, workers=1)
        cluster.run(300.0)
        wanted = max(1, math.ceil(after))
        doublings = math.ceil(math.log2(wanted)) if wanted > 1 else 0
        cluster.run(300.0 + (doublings + 1) * (RULES.up_after_seconds + start_seconds + 2.0))
        assert cluster.ready >= wanted

    @given(st.lists(st.tuples(st.floats(-50, 2000), st.floats(0, 50)), max_size=40), st.integers(0, 12))
    def test_whatever_the_samples_it_stays_within_the_limits(
        self, loads: list[tuple[float, float]], aimed: int
    ) -> None:
        """Also with clocks that jump: samples in any order."""
        found = decide(ScaleState(aimed, tuple(LoadSample(*each) for each in loads)), RULES, 1000.0)
        assert found.target == aimed - 1 if aimed > 8 else 1 <= found.target <= 8
        assert found.target <= max(2 * aimed, 1)

    def test_a_clock_that_goes_back_does_not_confuse_the_follower(self) -> None:
        follower = ScaleFollower(RULES, 1)
        for second in range(100):
            follower.sample(0.2, 5000.0 + second)
        for second in range(10):
            follower.sample(1.5, 100.0 + second)
        assert follower.decide(1, 109.0).target > 1


def test_rules_that_make_no_sense() -> None:
    for least, most, target in ((2, 1, 0.7), (-1, 1, 0.7), (0, 0, 0.7), (1, 2, 0.0), (1, 2, 1.5)):
        with pytest.raises(InvalidArgument):
            ScaleRules(least, most, target)
