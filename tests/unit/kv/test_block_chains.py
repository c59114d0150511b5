"""What an index holds, as events that make any router hold the same."""

from __future__ import annotations

import json
import random
from typing import Any

from dynamo._core import RadixTree
from dynamo.kv.block_chains import SPARE_BLOCKS, BlockChains, DumpedIndex
from dynamo.kv.events import BlocksAdded, BlocksDropped, BlockUpdate, HeldBlock, KvChange, RouterEvent
from dynamo.kv.hashing import sequence_hashes
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import WorkerRank


def stored(worker: int, parent: int | None, names: list[int], tokens: list[int], tier: str = "device") -> RouterEvent:
    blocks = [HeldBlock(*pair) for pair in zip(names, tokens, strict=True)]
    return RouterEvent(worker, KvChange(1, BlockUpdate(stored=BlocksAdded(blocks, parent)), 0), tier)


def again(index: DumpedIndex) -> DumpedIndex:
    """Return an index that was told the dump of another one."""
    told = DumpedIndex(PrefixIndex())
    for event in index.chains.events():
        data: Any = event["event"]["data"]
        blocks = data["stored"]
        names = [block["block_hash"] for block in blocks["blocks"]]
        tokens = [block["tokens_hash"] for block in blocks["blocks"]]
        assert (
            told.apply(stored(event["worker_id"], blocks["parent_hash"], names, tokens, event["storage_tier"])) == "ok"
        )
    return told


def test_random_indexes_come_out_of_their_dumps_and_a_native_tree_takes_them() -> None:
    rng = random.Random(3)
    for _ in range(30):
        index = DumpedIndex(PrefixIndex())
        for _ in range(40):
            worker, path = rng.randrange(3), [rng.randrange(1, 4) for _ in range(rng.randrange(1, 6))]
            names = [100 + worker + 7 * each for each in sequence_hashes(path)]
            names = [each % 2**64 for each in names]
            if rng.random() < 0.8:
                index.apply(stored(worker, None, names, path))
            else:
                data = BlockUpdate(removed=BlocksDropped([names[-1]]))
                index.apply(RouterEvent(worker, KvChange(1, data, 0)))
        told, tree = again(index), RadixTree()
        for event in index.chains.events():
            tree.apply_event(event["worker_id"], json.dumps(event["event"]).encode())
        for _ in range(30):
            path = [rng.randrange(1, 4) for _ in range(5)]
            found = index.index.find(sequence_hashes(path))
            assert told.index.find(sequence_hashes(path)) == found
            assert tree.find_matches(path).scores == {rank: overlap.device for rank, overlap in found.items()}


def test_a_block_of_a_lower_tier_follows_one_of_a_higher_tier() -> None:
    index = DumpedIndex(PrefixIndex())
    index.apply(stored(1, None, [10, 11], [1, 2]))
    index.apply(stored(1, 11, [12], [3], "host_pinned"))
    overlap = again(index).index.find(sequence_hashes([1, 2, 3]))[WorkerRank(1)]
    assert (overlap.device, overlap.host) == (2, 1)


def test_what_was_given_up_is_forgotten() -> None:
    index = DumpedIndex(PrefixIndex())
    for start in range(0, 10 * SPARE_BLOCKS, 100):
        names = list(range(start + 1, start + 101))
        index.apply(stored(1, None, names, names))
        index.apply(RouterEvent(1, KvChange(1, BlockUpdate(removed=BlocksDropped(names)), 0)))
        assert len(index.chains) <= SPARE_BLOCKS + 3 * 100
    index.apply(stored(1, None, [1, 2], [1, 2]))
    index.forget(1, 0)
    assert index.chains.events() == []


def test_a_block_without_the_one_before_it_is_left_out() -> None:
    index = DumpedIndex(PrefixIndex())
    index.apply(stored(1, None, [10, 11, 12], [1, 2, 3]))
    index.apply(RouterEvent(1, KvChange(1, BlockUpdate(removed=BlocksDropped([11])), 0)))
    (event,) = index.chains.events()
    data: Any = event["event"]["data"]
    assert [block["block_hash"] for block in data["stored"]["blocks"]] == [10]
    assert BlockChains(lambda: ()).events() == []
