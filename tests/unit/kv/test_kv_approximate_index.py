"""What was routed is believed to lie there: for a time, or while there is room."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv.approximate_index import ApproximateIndex
from dynamo.kv.hashing import sequence_hashes
from dynamo.kv.overlap import Overlap, WorkerRank
from support.properties import examples

A, B = WorkerRank(1), WorkerRank(2, 3)
CHAIN = sequence_hashes([1, 2, 3, 4])


def test_a_prompt_is_found_where_it_was_sent_until_its_time_is_over() -> None:
    index = ApproximateIndex(ttl_seconds=10)
    index.add(A, CHAIN, now=100.0)
    index.add(B, CHAIN[:2], now=104.0)
    assert index.find(CHAIN, now=109.9) == {A: Overlap(4), B: Overlap(2)}
    assert index.find(CHAIN, now=110.0) == {B: Overlap(2)}
    assert index.find(CHAIN, now=114.0) == {}
    assert index.blocks() == 0


def test_use_renews_and_blocks_end_in_steps_of_a_tenth_of_a_second() -> None:
    index = ApproximateIndex(ttl_seconds=1)
    index.add(A, CHAIN, now=0.05)
    index.add(A, CHAIN[:2], now=0.55)
    assert index.find(CHAIN, now=0.99) == {A: Overlap(4)}
    assert index.find(CHAIN, now=1.0) == {A: Overlap(2)}
    assert index.find(CHAIN, now=1.49) == {A: Overlap(2)}
    assert index.find(CHAIN, now=1.5) == {}


def test_the_least_recently_used_blocks_make_room_the_last_of_a_prompt_first() -> None:
    index = ApproximateIndex(ttl_seconds=1, is_lru=True)
    index.set_capacity(A, 5)
    other = sequence_hashes([9, 8, 7])
    index.add(A, CHAIN, now=0.0)
    index.add(A, other, now=50.0)
    assert index.find(CHAIN, now=60.0) == {A: Overlap(2)}
    assert index.find(other, now=60.0) == {A: Overlap(3)}
    index.set_capacity(A, 3)
    assert index.find(CHAIN, now=60.0) == {}
    assert index.blocks(A) == 3
    index.add(A, sequence_hashes(range(50, 60)), now=61.0)
    assert index.find(sequence_hashes(range(50, 60)), now=61.0) == {A: Overlap(3)}


def test_a_rank_of_unknown_capacity_falls_back_to_the_time() -> None:
    index = ApproximateIndex(ttl_seconds=1, is_lru=True)
    index.add(B, CHAIN, now=0.0)
    assert index.find(CHAIN, now=0.9) == {B: Overlap(4)}
    assert index.find(CHAIN, now=1.0) == {}


def test_a_rank_that_learns_its_capacity_keeps_what_is_used_again() -> None:
    index = ApproximateIndex(ttl_seconds=1, is_lru=True)
    index.add(A, CHAIN, now=0.0)
    index.set_capacity(A, 10)
    index.add(A, CHAIN[:2], now=0.5)
    assert index.find(CHAIN, now=5.0) == {A: Overlap(2)}


def test_a_rank_whose_capacity_is_unknown_again_keeps_nothing_for_ever() -> None:
    index = ApproximateIndex(ttl_seconds=1, is_lru=True)
    index.set_capacity(A, 10)
    index.add(A, CHAIN, now=5.0)
    index.set_capacity(A, 0)
    index.add(A, [7], now=5.5)
    assert index.find(CHAIN, now=5.9) == {A: Overlap(4)}
    assert index.find(CHAIN, now=6.0) == {}
    assert index.find([7], now=6.4) == {A: Overlap(1)}
    index.find([], now=6.5)
    assert index.blocks() == 0


def test_forgetting_drops_a_rank_or_all_ranks_of_a_worker() -> None:
    index = ApproximateIndex()
    ranks = [WorkerRank(1, 0), WorkerRank(1, 1), B]
    for rank in ranks:
        index.set_capacity(rank, 10)
        index.add(rank, CHAIN, now=0.0)
    index.forget(1, 1)
    assert set(index.find(CHAIN)) == {ranks[0], B}
    index.forget(1)
    assert set(index.find(CHAIN)) == {B}


def test_wrong_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="ttl_seconds"):
        ApproximateIndex(ttl_seconds=0)
    with pytest.raises(ValueError, match="blocks"):
        ApproximateIndex().set_capacity(A, -1)


def test_ranks_beyond_the_limit_are_not_booked() -> None:
    index = ApproximateIndex(max_ranks=1)
    index.add(A, CHAIN, now=0.0)
    index.add(B, CHAIN, now=0.0)
    assert index.find(CHAIN) == {A: Overlap(4)}


@given(st.integers(0, 2**32), st.booleans())
@examples(100, deadline=None)
def test_it_equals_a_list_of_uses(seed: int, is_lru: bool) -> None:
    rng = random.Random(seed)
    paths = [sequence_hashes([first, second, third]) for first in (1, 2) for second in (3, 4) for third in (5, 6)]
    index = ApproximateIndex(ttl_seconds=1, is_lru=is_lru)
    capacity = 7
    uses: dict[WorkerRank, list[tuple[int, int]]] = {A: [], B: []}  # (block, tick of its use), newest last
    if is_lru:
        index.set_capacity(A, capacity)
    tick = 0
    for _ in range(60):
        tick += rng.choice((0, 0, 1, 4))
        rank, sequence = rng.choice((A, B)), rng.choice(paths)[: rng.randrange(4)]
        now = tick / 10 + 0.05
        index.add(rank, sequence, now)
        kept = [(block, at) for block, at in uses[rank] if block not in sequence]
        uses[rank] = kept + [(block, tick) for block in reversed(sequence)]
        probe = rng.choice(paths)
        expected = {}
        for each, list_of_uses in uses.items():
            held = [block for block, at in list_of_uses if at + 10 > tick]
            if is_lru and each == A:
                uses[A] = list_of_uses[-capacity:]
                held = [block for block, _ in uses[A]]
            depth = next((number for number, block in enumerate(probe) if block not in held), len(probe))
            if depth:
                expected[each] = Overlap(depth)
        assert index.find(probe, now) == expected
