"""Blocks that count for less than one in the account of a rank: those that one request alone holds and will soon give up. Pure.

All such blocks of a request weigh the same, so a request has one record of its weight and of how many blocks have it. A
new weight costs the same for a prompt of any length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class OutputBlocks:
    """The output blocks of one request, and the weight of all blocks that this request alone holds."""

    __slots__ = ("_count", "_joined", "_start", "_weight", "names")

    def __init__(self) -> None:
        self.names: list[int] = []
        self._joined = 0  # output blocks that have the weight
        self._start: int | None = None  # blocks of the prompt from this position on have the weight; None: ignored
        self._count = 0  # blocks that have the weight
        self._weight = 1.0


class BlockWeights:
    """The weights of the blocks of one rank. Bounded by the blocks of its active requests."""

    __slots__ = ("owners", "saved")

    def __init__(self) -> None:
        # Block to the record of the request that holds it alone; empty: every block counts in full.
        self.owners: dict[int, OutputBlocks] = {}
        self.saved = 0.0  # what the weights take off the number of blocks

    def weigh(self, record: OutputBlocks, sequence: Sequence[int], holders: Mapping[int, int], weight: float) -> None:
        """Let the output blocks, and the blocks at the end of `sequence` with one holder, count for `weight` each.

        `holders`: block to the number of requests that hold it.
        """
        names = record.names
        for block in names[record._joined :]:
            self._join(record, block)
        record._joined = len(names)
        at = len(sequence) if record._start is None else record._start
        while at < len(sequence) and self.owners.get(sequence[at]) is not record:  # shared since the last time
            at += 1
        while at and holders[sequence[at - 1]] == 1:
            at -= 1
            self._join(record, sequence[at])
        record._start = at
        self.saved += record._count * (record._weight - weight)
        record._weight = weight

    def reset(self, block: int) -> None:
        """Let a block count in full again: it is shared, or gone."""
        record = self.owners.pop(block, None)
        if record is not None:
            record._count -= 1
            self.saved = self.saved - (1.0 - record._weight) if self.owners else 0.0

    def _join(self, record: OutputBlocks, block: int) -> None:
        if self.owners.get(block) is not record:
            self.reset(block)
            self.owners[block] = record
            record._count += 1
            self.saved += 1.0 - record._weight
