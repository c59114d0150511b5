"""The block pool: who holds what, what can be found again, and in which order it is forgotten."""

from __future__ import annotations

import pytest

from dynamo.errors import InvalidArgument
from dynamo.reference.blocks import PLAIN, BlockPool, BlocksRemoved, BlocksStored, CacheCleared

TOKENS = (5, 6)


def filled(pool: BlockPool, *hashes: int) -> list[int]:
    """A held table whose blocks have these names, one after the other."""
    table = pool.take((), len(hashes))
    assert table is not None
    parent = None
    for block, block_hash in zip(table, hashes, strict=True):
        pool.name(block, block_hash, parent, TOKENS, PLAIN)
        parent = block_hash
    return table


def test_named_blocks_are_found_again_up_to_the_first_gap() -> None:
    pool = BlockPool(8, 2)
    table = filled(pool, 1, 2, 3)
    pool.release(table)
    assert pool.match([1, 2, 9, 3]) == table[:2]
    assert pool.take(table[:2], 1) is not None
    assert pool.held == 3


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2, 2)
    (block,) = filled(pool, 1)
    assert pool.take([block], 0) == [block]
    pool.release([block])
    assert pool.take((), 2) is None
    pool.release([block])
    assert pool.take((), 2) is not None


def test_the_least_recently_used_block_goes_first_and_the_end_of_a_sequence_before_its_beginning() -> None:
    pool = BlockPool(4, 2)
    first, second = filled(pool, 1, 2), filled(pool, 3, 4)
    pool.release(first)
    pool.release(second)
    again = pool.take(pool.match([1]), 0)  # 1 is used once more, so it is now the youngest
    assert again is not None
    pool.release(again)
    pool.take_events()
    order = []
    for _ in range(4):
        assert pool.take((), 1) is not None
        order += pool.take_events()
    assert order == [BlocksRemoved((name,)) for name in (2, 4, 3, 1)]


def test_taking_is_all_or_nothing_and_counts_the_shared_blocks_it_would_not_evict() -> None:
    pool = BlockPool(3, 2)
    table = filled(pool, 1, 2)
    pool.release(table)
    assert pool.take(table, 2) is None
    assert (pool.held, pool.match([1, 2])) == (0, table)
    assert pool.take(table, 1) is not None


def test_a_second_block_with_the_same_content_stays_without_a_name() -> None:
    pool = BlockPool(2, 2)
    first, second = filled(pool, 1), filled(pool, 1)
    assert [type(event) for event in pool.take_events()] == [BlocksStored]
    pool.release(second)
    pool.release(first)
    assert pool.match([1]) == first


def test_clearing_forgets_every_name_once_and_leaves_tables_alone() -> None:
    pool = BlockPool(4, 2)
    idle, held = filled(pool, 1), filled(pool, 2)
    pool.release(idle)
    pool.take_events()
    assert (pool.clear(), pool.clear()) == (2, 0)
    assert pool.take_events() == [CacheCleared((1, 2))]
    assert (pool.match([1]), pool.held) == ([], 1)
    pool.release(held)
    assert (pool.available, pool.held) == (4, 0)


def test_without_prefix_caching_nothing_has_a_name() -> None:
    pool = BlockPool(2, 2, prefix_caching=False)
    pool.release(filled(pool, 1, 2))
    assert (pool.match([1]), pool.take_events()) == ([], [])


def test_releasing_what_is_not_held_is_an_error() -> None:
    with pytest.raises(ValueError, match="not held"):
        BlockPool(1, 2).release([0])


@pytest.mark.parametrize(("blocks", "size"), [(0, 1), (1, 0)])
def test_a_pool_has_blocks_and_blocks_have_tokens(blocks: int, size: int) -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        BlockPool(blocks, size)
