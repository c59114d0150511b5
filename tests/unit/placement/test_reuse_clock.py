"""The oldest block of a rank's cache, by samples, beside a whole model of that cache."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from dynamo.placement.rank_load import ENTRIES, ReuseClock


def test_nothing_is_evicted_while_there_is_room() -> None:
    clock = ReuseClock()
    clock.touch([1, 2, 3], 1.0)
    assert clock.oldest_use_at is None
    clock.set_blocks(4)
    clock.touch([1, 2, 3], 1.0)
    assert clock.oldest_use_at is None
    clock.touch([1, 2, 3, 4], 2.0)
    assert clock.oldest_use_at == 2.0
    clock.touch([5], 3.0)
    clock.set_blocks(4)
    assert clock.oldest_use_at == 2.0
    clock.set_blocks(8)
    assert clock.oldest_use_at is None


@pytest.mark.parametrize("blocks", [400, 5_000, 40_000])
def test_the_sampled_age_is_near_that_of_the_whole_cache(blocks: int) -> None:
    rng = random.Random(blocks)
    clock, whole = ReuseClock(), OrderedDict[int, float]()
    clock.set_blocks(blocks)
    length = blocks // 20
    errors = []
    for step in range(400):
        start = min(int(rng.expovariate(0.05)), 10_000) * 1_000_000
        prompt = range(start, start + rng.randrange(length // 2, 2 * length))
        clock.touch(prompt, float(step))
        for block in reversed(prompt):
            whole[block] = float(step)
            whole.move_to_end(block)
        while len(whole) > blocks:
            whole.popitem(last=False)
        if step > 200:
            assert clock.oldest_use_at is not None
            errors.append(abs(clock.oldest_use_at - next(iter(whole.values()))))
    assert sum(errors) / len(errors) < 3
    assert len(clock._entries) <= 2 * ENTRIES
