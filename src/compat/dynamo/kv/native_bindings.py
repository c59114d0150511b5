"""The native module's names for block hashes and for a tree of blocks, with the behaviour of those.

For code that was written against them. New code uses `dynamo.kv.hashing` and `dynamo.kv.index`, which also know what this
tree does not: where a block was dropped in the middle, it forgets what follows (the native tree does so within one of its
compressed edges).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from dynamo.kv.events import BlocksAdded, BlockUpdate, HeldBlock, KvChange, RouterEvent
from dynamo.kv.hashing import block_hashes
from dynamo.kv.media_routing import media_of_blocks
from dynamo.kv.overlap import WorkerRank

_HASHES: Final = 2**64
_DECODER: Final = msgspec.json.Decoder(KvChange)


def compute_block_hash_for_seq(
    tokens: Sequence[int],
    kv_block_size: int,
    block_mm_infos: Sequence[Mapping[str, Sequence[Mapping[str, int]]] | None] | None = None,
    lora_name: str | None = None,
    is_eagle: bool | None = None,
    cache_namespace: str | None = None,
) -> list[int]:
    """Return one hash per whole block.

    `block_mm_infos` names the media of each block: None or `{"mm_objects": [{"mm_hash": int}, ...]}`.
    Raises ValueError for a block size of 0 or media of another form, OverflowError for a token that is not an unsigned
    32-bit integer.
    """
    if kv_block_size < 1:
        raise ValueError(f"kv_block_size must be at least 1, got {kv_block_size}")
    return block_hashes(
        tokens,
        kv_block_size,
        lora_name=lora_name,
        cache_salt=cache_namespace,
        eagle=bool(is_eagle),
        mm_hashes=media_of_blocks(block_mm_infos),
    )


class OverlapScores:
    """How many blocks of a prompt each rank holds."""

    __slots__ = ("_scores",)

    def __init__(self, scores: Mapping[WorkerRank, int]) -> None:
        self._scores = scores

    @property
    def scores(self) -> dict[tuple[int, int], int]:
        """Blocks by (worker id, data-parallel rank)."""
        return {(worker_id, dp_rank): depth for (worker_id, dp_rank), depth in self._scores.items()}

    @property
    def frequencies(self) -> list[int]:
        """Always empty, as in the native system."""
        return []


class _Node:
    """One block behind the blocks on its way from the root."""

    __slots__ = ("children", "names", "parent", "tokens_hash")

    def __init__(self, parent: _Node | None, tokens_hash: int) -> None:
        self.parent = parent
        self.tokens_hash = tokens_hash
        self.children: dict[int, _Node] = {}  # by the hash of their tokens
        self.names: dict[WorkerRank, int] = {}  # the ranks that hold the block, and their engine's name for it


class RadixTree:
    """Blocks of workers by the hashes of their tokens. Not thread-safe."""

    def __init__(self) -> None:
        self._root = _Node(None, 0)
        self._named: dict[WorkerRank, dict[int, _Node]] = {}

    def apply_event(self, worker_id: int, kv_cache_event_bytes: bytes) -> None:
        """Apply an event, `{event_id, data, dp_rank}` as JSON.

        Raises ValueError for bytes that are no such event, RuntimeError for an event that does not fit what is held: an
        unknown parent or block, or a block that follows itself. Known blocks of a removal are removed all the same.
        """
        try:
            event = _DECODER.decode(kv_cache_event_bytes)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"Failed to deserialize KvCacheEvent: {error}") from error
        rank = WorkerRank(worker_id, event.dp_rank)
        data = event.data
        if data == "cleared":
            self._forget(rank)
        elif data.stored is not None and data.removed is None:
            self._store(rank, data.stored)
        elif data.removed is not None and data.stored is None:
            self._remove(rank, data.removed.block_hashes)
        else:
            raise ValueError("Failed to deserialize KvCacheEvent: data must have one member, stored or removed")

    def find_matches(self, sequence: Sequence[int], early_exit: bool = False) -> OverlapScores:
        """Return how many blocks each rank holds of a prompt, given by block hashes (not chained).

        `early_exit`: stop at the block where one rank is left; its score is then a lower bound, which may be lower than
        the native one, because that tree matches further within a compressed edge.
        """
        scores: dict[WorkerRank, int] = {}
        node: _Node | None = self._root
        alive: set[WorkerRank] | None = None
        for depth, tokens_hash in enumerate(_checked(sequence), 1):
            node = node.children.get(tokens_hash) if node is not None else None
            if node is None:
                break
            alive = set(node.names) if alive is None else alive.intersection(node.names)
            scores.update(dict.fromkeys(alive, depth))
            if not alive or (early_exit and len(alive) == 1):
                break
        return OverlapScores(scores)

    def remove_worker(self, worker_id: int) -> None:
        """Drop all blocks of all ranks of a worker."""
        for rank in [rank for rank in self._named if rank.worker_id == worker_id]:
            self._forget(rank)

    def clear_all_blocks(self, worker_id: int) -> None:
        """Drop all blocks of all ranks of a worker."""
        self.remove_worker(worker_id)

    def dump_tree_as_events(self) -> list[str]:
        """Return router events as JSON that store what is held: for each rank its runs without a branch, parents first."""
        return [
            msgspec.json.encode(
                RouterEvent(
                    rank.worker_id, KvChange(number, BlockUpdate(stored=stored), rank.dp_rank), "device", "worker"
                )
            ).decode()
            for number, (rank, stored) in enumerate(self._runs())
        ]

    def _runs(self) -> Iterator[tuple[WorkerRank, BlocksAdded]]:
        for rank in sorted(self._named):
            waiting: list[tuple[int | None, _Node]] = [(None, node) for node in _ordered(self._root, rank)]
            while waiting:
                parent, node = waiting.pop()
                run = [HeldBlock(node.names[rank], node.tokens_hash)]
                after = _held(node, rank)
                while len(after) == 1:
                    node = after[0]
                    run.append(HeldBlock(node.names[rank], node.tokens_hash))
                    after = _held(node, rank)
                yield rank, BlocksAdded(run, parent)
                waiting.extend((run[-1].block_hash, child) for child in _ordered(node, rank))

    def _store(self, rank: WorkerRank, stored: BlocksAdded) -> None:
        parent = stored.parent_hash
        if any(block.block_hash == parent for block in stored.blocks):
            raise RuntimeError("Failed to apply event: Invalid block sequence")
        named = self._named.get(rank, {})
        node = self._root if parent is None else named.get(parent)
        if node is None:
            raise RuntimeError("Failed to apply event: Failed to find parent block")
        for block in stored.blocks:
            child = node.children.get(block.tokens_hash)
            if child is None:
                child = node.children[block.tokens_hash] = _Node(node, block.tokens_hash)
            if rank not in child.names:
                child.names[rank] = block.block_hash
                self._named.setdefault(rank, named)[block.block_hash] = child
            node = child

    def _remove(self, rank: WorkerRank, names: Sequence[int]) -> None:
        named = self._named.get(rank, {})
        gone: set[int] = set()  # with blocks of this event, so that naming them too is no mistake
        is_complete = True
        for name in names:
            node = named.get(name)
            if node is not None:
                gone |= self._drop(rank, node)
            elif name not in gone:
                is_complete = False
        if not is_complete:
            raise RuntimeError("Failed to apply event: Failed to find block")

    def _drop(self, rank: WorkerRank, node: _Node) -> set[int]:
        """Take a block, and what follows it, from a rank; return their names."""
        named = self._named[rank]
        waiting = [node]
        dropped: list[_Node] = []
        names: set[int] = set()
        while waiting:
            each = waiting.pop()
            name = each.names.pop(rank)
            names.add(name)
            if named.get(name) is each:
                del named[name]
            dropped.append(each)
            waiting.extend(_held(each, rank))
        for each in reversed(dropped):  # children before parents
            empty: _Node | None = each
            while empty is not None and empty.parent is not None and not empty.names and not empty.children:
                empty.parent.children.pop(empty.tokens_hash, None)
                empty = empty.parent
        return names

    def _forget(self, rank: WorkerRank) -> None:
        for node in _held(self._root, rank):
            self._drop(rank, node)
        self._named.pop(rank, None)


def _held(node: _Node, rank: WorkerRank) -> list[_Node]:
    return [child for child in node.children.values() if rank in child.names]


def _ordered(node: _Node, rank: WorkerRank) -> list[_Node]:
    return sorted(_held(node, rank), key=lambda child: child.tokens_hash)


def _checked(sequence: Sequence[int]) -> Sequence[int]:
    for value in sequence:
        if not 0 <= value < _HASHES:
            raise OverflowError(f"a block hash is an unsigned 64-bit integer, got {value}")
    return sequence
