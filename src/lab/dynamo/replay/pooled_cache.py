"""The yardstick of a hit rate: one cache as large as those of all workers together, with every request in front of it. Pure.

No placement can reuse much more than this cache does, for it never holds a block twice and never computes one twice at a
time. Blocks leave it in the order of their last use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["PooledCache"]


class PooledCache:
    """A set of blocks with least-recently-used eviction, and how many prompt tokens it would have spared."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self._capacity = blocks
        self._block_size = block_size
        self._held: OrderedDict[int, None] = OrderedDict()  # the least recently used block first
        self._answers = 0
        self.prompt_tokens = 0
        self.reused_tokens = 0

    def serve(self, sequence: Sequence[int], prompt_tokens: int, output_tokens: int) -> int:
        """Take one request; return how many of its prompt tokens the cache held.

        `sequence`: the sequence hashes of the prompt's whole blocks. The answer's blocks are kept, too, as workers keep them.
        """
        held, size = self._held, self._block_size
        found = 0
        for block in sequence:
            if block not in held:
                break
            found += 1
        reused = min(found, max(0, prompt_tokens - 1) // size)  # the last token is always computed
        for _ in range((prompt_tokens + output_tokens) // size - len(sequence)):
            self._answers -= 1  # no prompt has a negative hash
            held[self._answers] = None
        for block in reversed(sequence):  # so that the end of a prompt is evicted before its beginning
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._capacity:
            held.popitem(last=False)
        self.prompt_tokens += prompt_tokens
        self.reused_tokens += reused * size
        return reused * size

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that was reused."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
