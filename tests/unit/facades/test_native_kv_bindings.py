"""The native module's names for hashes and trees of blocks."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo._core import OverlapScores, RadixTree, compute_block_hash_for_seq
from dynamo.kv.events import BlockUpdate, KvChange, RouterEvent
from dynamo.kv.hashing import sequence_hashes
from dynamo.kv.index import PrefixIndex
from support.properties import examples

TOKENS = list(range(1, 33))


def event(data: Any, dp_rank: int = 0) -> bytes:
    return json.dumps({"event_id": 1, "data": data, "dp_rank": dp_rank}).encode()


def stored(parent: int | None, *blocks: tuple[int, int]) -> dict[str, Any]:
    found = [{"block_hash": name, "tokens_hash": tokens} for name, tokens in blocks]
    return {"stored": {"parent_hash": parent, "blocks": found}}


def removed(*names: int) -> dict[str, Any]:
    return {"removed": {"block_hashes": list(names)}}


def test_block_hashes_with_the_native_keywords() -> None:
    assert compute_block_hash_for_seq(TOKENS, 16) == [16863443419780771464, 2287610619914608821]
    assert compute_block_hash_for_seq(TOKENS, 16, is_eagle=True) == [6752489653130089168]
    both = compute_block_hash_for_seq(TOKENS, 16, lora_name="a", cache_namespace="b")
    assert both == [13282007913120652853, 10936094188308344975]
    media = compute_block_hash_for_seq(TOKENS, 16, [{"mm_objects": [{"mm_hash": 7}]}, None])
    assert media == [5771247725381875071, 2287610619914608821]
    with pytest.raises(ValueError, match="kv_block_size"):
        compute_block_hash_for_seq(TOKENS, 0)
    with pytest.raises(ValueError, match=r"block_mm_infos\[0\]"):
        compute_block_hash_for_seq(TOKENS, 16, [{"other": []}])
    with pytest.raises(OverflowError):
        compute_block_hash_for_seq([-1], 16)


def test_a_tree_scores_each_rank_by_its_depth() -> None:
    tree = RadixTree()
    for worker in (1, 2, 3):
        tree.apply_event(worker, event(stored(None, *[(100 + n, 1 + n) for n in range(worker)]), dp_rank=worker))
    found = tree.find_matches([1, 2, 3, 4])
    assert isinstance(found, OverlapScores)
    assert found.scores == {(1, 1): 1, (2, 2): 2, (3, 3): 3}
    assert found.frequencies == []
    assert tree.find_matches([1, 2], early_exit=True).scores == {(1, 1): 1, (2, 2): 2, (3, 3): 2}
    assert tree.find_matches([]).scores == {}
    tree.remove_worker(3)
    tree.clear_all_blocks(2)
    assert tree.find_matches([1, 2, 3]).scores == {(1, 1): 1}


def test_a_tree_refuses_what_does_not_fit() -> None:
    tree = RadixTree()
    tree.apply_event(1, event(stored(None, (100, 1), (101, 2), (102, 3))))
    for data, reason in (
        (stored(55, (7, 7)), "parent"),
        (stored(100, (7, 7), (100, 8)), "Invalid block sequence"),
        (removed(55, 102), "find block"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            tree.apply_event(1, event(data))
    assert tree.find_matches([1, 2, 3]).scores == {(1, 0): 2}
    tree.apply_event(1, event(removed(100)))
    assert tree.find_matches([1, 2, 3]).scores == {}
    assert tree.dump_tree_as_events() == []
    for rubbish in (b"xx", b"{}", event({}), event({**removed(1), **stored(None)})):
        with pytest.raises(ValueError, match="deserialize"):
            tree.apply_event(1, rubbish)
    with pytest.raises(OverflowError):
        tree.find_matches([-1])


def test_a_dump_makes_an_equal_tree() -> None:
    tree = RadixTree()
    tree.apply_event(1, event(stored(None, (100, 1), (101, 2), (102, 3))))
    tree.apply_event(1, event(stored(101, (110, 7), (111, 8))))
    tree.apply_event(2, event(stored(None, (200, 1)), dp_rank=1))
    again = RadixTree()
    for text in tree.dump_tree_as_events():
        found = json.loads(text)
        again.apply_event(found["worker_id"], json.dumps(found["event"]).encode())
    for probe in ([1, 2, 3], [1, 2, 7, 8]):
        assert again.find_matches(probe).scores == tree.find_matches(probe).scores
    assert sorted(again.dump_tree_as_events()) == sorted(tree.dump_tree_as_events())


@given(st.integers(0, 2**32))
@examples(60, deadline=None)
def test_without_gaps_the_tree_and_the_index_agree(seed: int) -> None:
    rng = random.Random(seed)
    tree, index = RadixTree(), PrefixIndex()
    held: dict[tuple[int, ...], int] = {}
    for _ in range(60):
        worker = rng.randrange(3)
        paths = [path for path in [(), *held] if len(path) < 5]
        path = rng.choice(paths)
        leaves = [one for one in held if not any(other[: len(one)] == one and other != one for other in held)]
        if leaves and rng.random() < 0.3:
            gone = rng.choice(leaves)
            change = removed(held.pop(gone))
        else:
            child = (*path, rng.randrange(1, 4))
            if child in held:
                continue
            held[child] = len(held) + rng.getrandbits(40)
            change = stored(held.get(path), (held[child], child[-1]))
        for worker in range(3):
            tree.apply_event(worker, event(change))
            update = BlockUpdate() if change is None else _update(change)
            assert index.apply(RouterEvent(worker, KvChange(1, update))) == "ok"
        probe = [rng.randrange(1, 4) for _ in range(5)]
        found = index.find(sequence_hashes(probe))
        assert tree.find_matches(probe).scores == {tuple(rank): overlap.device for rank, overlap in found.items()}


def _update(change: dict[str, Any]) -> BlockUpdate:
    import msgspec

    return msgspec.convert(change, BlockUpdate)
