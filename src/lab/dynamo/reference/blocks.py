"""The holders of each block of the KV cache: reference counts, prefixes shared by name, and eviction. Plain numbers.

A block is free (holds nothing), held (by one or more sequences), or idle: held by none, but named after the tokens
it was filled for, so that a later sequence with the same beginning may take it. A named block is full, and a full
block is never written again: sharing needs no copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dynamo.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """What a block is named after, beside its tokens: blocks of other adapters and tenants are never shared."""

    cache_salt: str | None = None
    lora_name: str | None = None


PLAIN: Final = PrefixKey()


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """One block can now be shared."""

    block_hash: int  # of the sequence up to and including this block
    parent_hash: int | None  # None: the first block of a sequence
    token_ids: tuple[int, ...]  # of this block only
    key: PrefixKey


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These names can no longer be found."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All names were forgotten at once; these are what there was."""

    block_hashes: tuple[int, ...]


BlockEvent = BlocksStored | BlocksRemoved | CacheCleared


class BlockPool:
    """All blocks of one cache. Ids are 0..blocks-1."""

    def __init__(self, blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if blocks < 1 or block_size < 1:
            raise InvalidArgument(f"blocks and block_size must be at least 1, got {blocks} and {block_size}")
        self.blocks, self.block_size, self.prefix_caching = blocks, block_size, prefix_caching
        self._free = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = [0] * blocks
        self._name_of: dict[int, int] = {}  # block id -> hash
        self._named: dict[int, int] = {}  # hash -> block id
        self._events: list[BlockEvent] = []

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give, some of them by eviction."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Blocks that sequences hold."""
        return self.blocks - self.available

    def match(self, hashes: Sequence[int]) -> list[int]:
        """Return the blocks of the longest cached prefix; takes no block yet."""
        found: list[int] = []
        for block_hash in hashes if self.prefix_caching else ():
            block = self._named.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, shared: Sequence[int], fresh: int) -> list[int] | None:
        """Hold `shared` (from `match`, just now) and `fresh` new blocks: the ids in that order, or None, all or nothing.

        New blocks are evicted from the idle ones, the least recently used first, when none is free.
        """
        idle_shared = sum(self._references[block] == 0 for block in shared)
        if fresh > self.available - idle_shared:
            return None
        for block in shared:
            self._idle.pop(block, None)
            self._references[block] += 1
        return [*shared, *self._allocate(fresh)]

    def name(
        self, block: int, block_hash: int, parent_hash: int | None, token_ids: Sequence[int], key: PrefixKey
    ) -> None:
        """Name a held block, which is full, so that it may be shared. A second block with the same content stays
        without a name.
        """
        if not self.prefix_caching or block_hash in self._named or block in self._name_of:
            return
        self._named[block_hash] = block
        self._name_of[block] = block_hash
        self._events.append(BlocksStored(block_hash, parent_hash, tuple(token_ids), key))

    def release(self, blocks: Sequence[int]) -> None:
        """Release the blocks of a sequence's table. A named block stays findable until its room is needed."""
        for block in reversed(blocks):  # so that the end of a sequence is evicted before its beginning
            if self._references[block] < 1:
                raise ValueError(f"block {block} is not held")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._name_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def clear(self) -> int:
        """Forget all names; returns how many there were. Held blocks stay with their sequences."""
        names = tuple(self._named)
        self._free.extend(self._idle)
        self._idle.clear()
        self._named.clear()
        self._name_of.clear()
        if names:
            self._events.append(CacheCleared(names))
        return len(names)

    def take_events(self) -> list[BlockEvent]:
        """Return the changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _allocate(self, count: int) -> list[int]:
        evicted: list[int] = []
        taken: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                block_hash = self._name_of.pop(block)
                del self._named[block_hash]
                evicted.append(block_hash)
            self._references[block] = 1
            taken.append(block)
        if evicted:
            self._events.append(BlocksRemoved(tuple(evicted)))
        return taken
