"""Runs of blocks against the simplest map, and what must hold of them whatever was cut and joined."""

from __future__ import annotations

import gc
import random
import weakref

from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv.hashing import sequence_hashes
from dynamo.kv.holders import BlockHolders, RankBits
from dynamo.kv.overlap import WorkerRank
from support.properties import examples

BITS = [1 << number for number in range(6)]


def paths_of(rng: random.Random) -> list[list[int]]:
    """Return sequences with common beginnings."""
    trunk = [rng.getrandbits(64) for _ in range(30)]
    forks = [trunk[: rng.randrange(30)] + [rng.getrandbits(64) for _ in range(rng.randrange(1, 20))] for _ in range(4)]
    return [sequence_hashes(path) for path in (trunk, *forks)]


def check_runs(holders: BlockHolders) -> None:
    runs = set(holders._runs.values())
    assert runs == holders._each
    assert sum(len(run.blocks) for run in runs) == len(holders)
    for run in runs:
        assert run.mask > 0 or holders.dead
        assert all(holders._runs[block] is run for block in run.blocks)


@given(st.integers(0, 2**32))
@examples(150, deadline=None)
def test_runs_equal_a_map_of_sets(seed: int) -> None:
    rng = random.Random(seed)
    holders, naive = BlockHolders(), dict[int, set[int]]()
    paths = paths_of(rng)
    for _ in range(40):
        if holders.dead:
            holders.sweep(rng.randrange(40))
        bit, path = rng.choice([bit for bit in BITS if not bit & holders.dead]), rng.choice(paths)
        start = rng.randrange(len(path))
        piece = path[start : start + rng.choice((1, 5, 50))]
        if rng.random() < 0.5:
            holders.add(bit, piece, path[start - 1] if start else None)
            for block in piece:
                naive.setdefault(block, set()).add(bit)
        else:
            gone = [block for block in piece if bit in naive.get(block, ())]
            match rng.randrange(3):
                case 0:
                    gone.reverse()
                case 1:
                    rng.shuffle(gone)
            assert sorted(gone) == sorted(holders.held_by(bit, piece))
            asked = [*gone, rng.getrandbits(64), *gone[:1]] if rng.random() < 0.2 else gone  # rubbish changes nothing
            assert holders.discard(bit, asked) == len(gone)
            for block in gone:
                naive[block].discard(bit)
        check_runs(holders)
        assert sorted(holders.blocks_of(bit)) == sorted(block for block, held in naive.items() if bit in held)
        if rng.random() < 0.1 and (holders.dead | bit).bit_count() < len(BITS):
            holders.drop(bit)
            for held in naive.values():
                held.discard(bit)
        if not holders.dead:
            assert len(holders) == sum(map(bool, naive.values()))
        shown = dict[int, int]()
        for run in holders.runs():
            shown[run.mask] = shown.get(run.mask, 0) + run.blocks
        masks = [sum(held) for held in naive.values() if held]
        assert shown == {mask: masks.count(mask) for mask in masks}
        probe = rng.choice(paths)[: rng.randrange(1, 60)]
        assert holders.masks(probe) == [sum(naive.get(block, ())) for block in probe]
        depths = {bit: depth for depth, mask in holders.depths(probe) for bit in BITS if mask & bit}
        expected = {}
        for bit in BITS:
            depth = next((n for n, block in enumerate(probe) if bit not in naive.get(block, ())), len(probe))
            if depth:
                expected[bit] = depth
        assert depths == expected


def test_ranks_that_store_the_same_share_one_run_again() -> None:
    holders, path = BlockHolders(), sequence_hashes(range(100))
    for bit in BITS:
        for start in range(0, 100, 16):
            holders.add(bit, path[start : start + 16], path[start - 1] if start else None)
    assert len(set(holders._runs.values())) == 1
    for block in reversed(path[50:]):  # one rank evicts one block after the other
        holders.discard(BITS[0], [block])
    assert len(set(holders._runs.values())) == 2
    check_runs(holders)


def test_what_was_cut_off_and_dropped_is_not_kept_alive() -> None:
    holders, path = BlockHolders(), sequence_hashes(range(40))
    holders.add(3, path)
    holders.discard(1, path[20:])
    cut = weakref.ref(holders._runs[path[-1]])
    holders.discard(2, path[20:])
    holders.discard(1, path[10:20])
    gc.collect()
    assert cut() is None
    check_runs(holders)


def test_what_a_rank_held_is_shown_no_more_at_once_and_removed_a_little_at_a_time() -> None:
    holders = BlockHolders()
    own = [sequence_hashes(range(1000 * at, 1000 * at + 10)) for at in range(1, 41)]
    shared = sequence_hashes(range(10))
    for path in (shared, *own):
        holders.add(1, path)
    holders.add(2, shared)
    holders.drop(1)
    assert [holders.depths(path) for path in (shared, own[0])] == [[(10, 2)], []]
    assert (len(list(holders.runs())), len(holders)) == (1, 410)
    turns = 0
    while holders.dead:
        before, turns = len(holders), turns + 1
        holders.sweep(50)
        assert before - len(holders) <= 60
    assert (turns, len(holders)) == (9, 10)
    check_runs(holders)


def test_a_freed_bit_goes_to_the_next_rank() -> None:
    bits = RankBits(2)
    first, second, third = (WorkerRank(number) for number in range(3))
    one, two = bits.take(first), bits.take(second)
    assert bits.take(third) is None
    assert bits.of((one or 0) | (two or 0)) == (first, second)
    bits.retire(first)
    assert bits.take(third) is None
    bits.give_back(one or 0)
    assert bits.take(third) == one
    assert bits.of(bits.all()) == (third, second)
    assert bits.take(second) == two
