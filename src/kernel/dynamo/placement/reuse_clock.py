"""How long ago the block was last used that a rank would evict next: a small copy of its cache, by samples. Pure.

A rank evicts what was used longest ago. Every n-th block of each prompt that is sent there stands for n blocks, so a few
hundred entries per rank follow a cache of any size. A rank that would have to give up blocks used a moment ago is a worse
place for a new prompt than one whose oldest blocks were not used in a long time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

ENTRIES: Final = 384  # samples of a full cache; the estimate is off by about one part in twenty


class ReuseClock:
    """The sampled blocks of one rank's cache, in the order of their last use. Bounded by about `ENTRIES`."""

    __slots__ = ("_entries", "_limit", "_stride", "blocks")

    def __init__(self) -> None:
        self.blocks: int | None = None  # of the cache; None: not known, and nothing is followed
        self._stride, self._limit = 1, 0
        self._entries: OrderedDict[int, float] = OrderedDict()  # block to the time of its last use, oldest first

    def set_blocks(self, blocks: int | None) -> None:
        """Take the size of the cache; another size than before begins anew."""
        if blocks == self.blocks:
            return
        self.blocks = blocks
        self._entries.clear()
        self._stride = max(1, (blocks or 0) // ENTRIES)
        self._limit = (blocks or 0) // self._stride

    def touch(self, sequence: Sequence[int], now: float) -> None:
        """Count a use of the blocks of one prompt."""
        if not self._limit:
            return
        entries, stride = self._entries, self._stride
        for block in reversed(sequence[stride // 2 :: stride]):  # the last block of a prompt is evicted first
            entries[block] = now
            entries.move_to_end(block)
        while len(entries) > self._limit:
            entries.popitem(last=False)

    @property
    def oldest_use_at(self) -> float | None:
        """When the block that is evicted next was last used. None: the cache is not full, or its size is not known."""
        entries = self._entries
        if not self._limit or len(entries) < self._limit:
            return None
        return next(iter(entries.values()))
