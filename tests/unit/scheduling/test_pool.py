"""The blocks of the simulated cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument
from dynamo.scheduling import PrefixPool
from support.properties import examples


def hold(pool: PrefixPool, identities: list[int]) -> set[int]:
    """Compute the blocks of one request, and name them."""
    assert pool.take(len(identities))
    duplicates: set[int] = set()
    pool.name(identities, 0, len(identities), duplicates)
    return duplicates


def test_a_released_suffix_is_evicted_before_its_prefix() -> None:
    pool = PrefixPool(4)
    pool.release([1, 2, 3, 4], 4, 4, hold(pool, [1, 2, 3, 4]))
    assert pool.take(2)
    assert pool.take_evicted() == [4, 3]
    assert pool.match([1, 2, 3], 3) == (2, 0)


def test_a_block_in_use_is_not_evicted() -> None:
    pool = PrefixPool(3)
    pool.release([1, 2], 2, 2, hold(pool, [1, 2]))
    pool.pin([1], 1)
    assert pool.match([1, 2], 2) == (2, 1)
    assert not pool.take(3)
    assert pool.take(2)
    assert pool.take_evicted() == [2]


def test_a_second_copy_is_not_announced_and_keeps_the_block_alive() -> None:
    pool = PrefixPool(2)
    assert pool.take(2)
    first: set[int] = set()
    second: set[int] = set()
    assert pool.name([9], 0, 1, first) == [(0, 1)]
    assert pool.name([9], 0, 1, second) == []
    assert second == {0}
    pool.release([9], 1, 1, first)
    assert pool.take(1)  # evicts the first copy
    assert pool.take_evicted() == []
    pool.release([9], 1, 1, second)
    assert pool.match([9], 1) == (1, 0)
    assert pool.take(1)
    assert pool.take_evicted() == [9]


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="num_gpu_blocks"):
        PrefixPool(0)


requests = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.booleans()), max_size=40)


@given(requests)
@examples(200)
def test_no_block_is_lost_and_what_was_announced_is_what_is_held(steps: list[tuple[int, int, bool]]) -> None:
    pool = PrefixPool(12)
    running: list[tuple[list[int], set[int]]] = []
    announced: set[int] = set()
    for family, length, ends_oldest in steps:
        identities = [family * 100 + depth for depth in range(length)]
        found, active = pool.match(identities, length - 1)
        if length - active <= pool.available:
            pool.pin(identities, found)
            assert pool.take(length - found)
            announced -= set(pool.take_evicted())
            duplicates: set[int] = set()
            for begin, end in pool.name(identities, found, length, duplicates):
                assert not announced & set(identities[begin:end])
                announced |= set(identities[begin:end])
            running.append((identities, duplicates))
        if ends_oldest and running:
            gone, duplicates = running.pop(0)
            pool.release(gone, len(gone), len(gone), duplicates)
        assert pool.used + pool.available == pool.blocks
        assert announced >= {identity for held, _ in running for identity in held}
    while running:
        gone, duplicates = running.pop()
        pool.release(gone, len(gone), len(gone), duplicates)
    assert pool.available == pool.blocks
    assert pool.cached == len(announced)
