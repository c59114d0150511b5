"""What a viewer sees of an index: the largest prefixes, who holds them, and which were hit."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv.approximate_index import ApproximateIndex
from dynamo.kv.events import BlocksAdded, BlockUpdate, HeldBlock, KvChange, RouterEvent
from dynamo.kv.hashing import sequence_hashes
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import WorkerRank
from support.properties import examples

SYSTEM = sequence_hashes([100 + n for n in range(8)])
FIRST = sequence_hashes([100 + n for n in range(8)] + [1, 2, 3])
SECOND = sequence_hashes([100 + n for n in range(8)] + [7])
OTHER = sequence_hashes([900])


def index_of(*held: tuple[int, list[int]]) -> ApproximateIndex:
    index = ApproximateIndex()
    for worker, sequence in held:
        index.add(WorkerRank(worker), sequence, 0.0)
    return index


def test_a_shared_beginning_is_a_prefix_of_its_own_and_has_the_hits_of_all_that_follow() -> None:
    index = index_of((1, FIRST), (2, SECOND), (2, OTHER))
    found = index.prefixes({FIRST[-1]: 3, SECOND[-1]: 1, SECOND[4]: 1, 12345: 9}, 10)
    shown = {each.block: each for each in found.shown}
    assert found.total == 4
    system = shown[SYSTEM[-1]]
    assert (system.blocks, system.depth, system.parent, system.hits) == (8, 8, None, 5)
    assert system.ranks == (WorkerRank(1), WorkerRank(2))
    first = shown[FIRST[-1]]
    assert (first.blocks, first.depth, first.parent, first.hits, first.ranks) == (
        3,
        11,
        SYSTEM[-1],
        3,
        (WorkerRank(1),),
    )
    assert shown[OTHER[-1]].hits == 0


def test_an_end_that_leaves_a_stretch_midway_is_as_deep_as_its_prompt() -> None:
    index = index_of((1, FIRST), (1, SECOND))
    depths = {each.block: (each.blocks, each.depth) for each in index.prefixes({}, 10).shown}
    assert depths == {FIRST[-1]: (11, 11), SECOND[-1]: (1, 9)}


def test_the_largest_and_the_hit_ones_are_shown_first() -> None:
    index = index_of((1, FIRST), (2, SECOND), (3, OTHER))
    assert [each.block for each in index.prefixes({}, 1).shown] == [SYSTEM[-1]]
    assert [each.block for each in index.prefixes({OTHER[-1]: 1}, 1).shown] == [OTHER[-1]]


def test_an_index_of_events_tells_its_blocks_by_tier() -> None:
    index, rank = PrefixIndex(), WorkerRank(5, 1)
    for tier, names in (("device", [1, 2, 3]), ("disk", [1, 2])):
        blocks = [HeldBlock(name, name) for name in names]
        assert index.apply(RouterEvent(5, KvChange(1, BlockUpdate(stored=BlocksAdded(blocks)), 1), tier)) == "ok"
    assert index.blocks_by_tier(rank) == {"device": 3, "disk": 2}
    assert index.blocks_by_tier(WorkerRank(6)) == {}
    (shown,) = index.prefixes({}, 10).shown
    assert (shown.blocks, shown.ranks) == (3, (rank,))


@given(st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=8))
@examples(200, deadline=None)
def test_the_prefixes_have_every_block_of_every_rank_once(prompts: list[tuple[int, list[int]]]) -> None:
    index = ApproximateIndex()
    for worker, tokens in prompts:
        index.add(WorkerRank(worker), sequence_hashes(tokens), 0.0)
    shown = index.prefixes({}, 1000).shown
    held: Counter[int] = Counter()
    for each in shown:
        for rank in each.ranks:
            held[rank.worker_id] += each.blocks
    assert held == Counter({worker: index.blocks(WorkerRank(worker)) for worker in {one for one, _ in prompts}})
    ends = {sequence[-1]: len(sequence) for sequence in (sequence_hashes(tokens) for _, tokens in prompts)}
    assert all(each.depth == ends[each.block] for each in shown if each.block in ends)
