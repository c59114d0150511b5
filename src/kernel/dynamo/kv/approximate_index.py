"""Which worker ranks probably hold which blocks, by where prompts were sent: for engines without KV events.

What was sent somewhere is believed to lie there for a while (`ttl_seconds`), or as long as the rank has room for it
(`capacity`). Both are one order of last use for each rank: the oldest blocks leave first, and of one prompt its last
ones before its first ones, so that what stays is found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import count, takewhile
from typing import Final

from dynamo.kv.events import BlocksAdded, BlockUpdate, HeldBlock, KvChange, RouterEvent
from dynamo.kv.held_prefixes import HeldPrefixes, held_prefixes
from dynamo.kv.holders import BlockHolders, RankBits, RankMask
from dynamo.kv.overlap import Overlap, WorkerRank

DEFAULT_TTL_SECONDS: Final = 120.0
TICKS_PER_SECOND: Final = 10  # blocks expire together every 100 ms
MAX_RANKS: Final = 16_384
# The bound of a rank without a known capacity; what a TTL lets pass in two minutes is far below it.
MAX_BLOCKS_PER_RANK: Final = 1_000_000


class _RankBlocks:
    """What one rank probably holds, oldest use first."""

    __slots__ = ("bit", "blocks", "is_due")

    def __init__(self, bit: RankMask) -> None:
        self.bit = bit
        self.blocks: OrderedDict[int, int] = OrderedDict()  # sequence hash -> tick of its end; 0: stays
        self.is_due = False  # it is among those with a time of their next check


class ApproximateIndex:
    """The index of what was routed. Not thread-safe.

    With `is_lru`, a rank of known capacity keeps its blocks until others take their room; any other rank keeps them for
    `ttl_seconds` after their last use.
    """

    def __init__(
        self, *, ttl_seconds: float = DEFAULT_TTL_SECONDS, is_lru: bool = False, max_ranks: int = MAX_RANKS
    ) -> None:
        if ttl_seconds <= 0:
            raise ValueError(f"ttl_seconds must be positive, got {ttl_seconds}")
        self._ttl_ticks = max(1, round(ttl_seconds * TICKS_PER_SECOND))
        self._is_lru = is_lru
        self._bits = RankBits(max_ranks)
        self._holders = BlockHolders()
        self._ranks: dict[WorkerRank, _RankBlocks] = {}
        self._capacities: dict[WorkerRank, int] = {}
        self._due: list[tuple[int, int, _RankBlocks]] = []  # a heap, by the tick of the next check of each rank
        self._serials = count()
        self._swept = 0  # the tick up to which nothing is left that has ended

    def set_capacity(self, rank: WorkerRank, blocks: int | None) -> None:
        """Set how many blocks a rank can hold, by its worker's word; None or 0: unknown again."""
        held = self._ranks.get(rank)
        if not blocks:
            self._capacities.pop(rank, None)
            if held is not None:
                end = self._swept + self._ttl_ticks  # what had no end gets one
                held.blocks.update({block: end for block, known in held.blocks.items() if not known})
                if held.blocks and not held.is_due:
                    self._check_at(held, self._swept + 1)
            return
        if blocks < 0:
            raise ValueError(f"blocks must be at least 0, got {blocks}")
        self._capacities[rank] = blocks
        if held is not None:
            self._shrink(rank, held)

    def add(self, rank: WorkerRank, sequence: Sequence[int], now: float) -> None:
        """Book a prompt that was sent to a rank at `now` (seconds of any clock that does not go back)."""
        self._sweep(now)
        held = self._ranks.get(rank)
        if held is None:
            bit = self._bits.take(rank)
            if bit is None:  # more ranks than any cluster has: what is not booked is no hit, and no error
                return
            held = self._ranks[rank] = _RankBlocks(bit)
        end = 0 if self._is_lru and rank in self._capacities else self._tick(now) + self._ttl_ticks
        sequence = sequence[: self._limit(rank)]
        blocks = held.blocks
        before = len(blocks)
        for block in reversed(sequence):
            blocks[block] = end
            blocks.move_to_end(block)
        if end and not held.is_due and blocks:
            self._check_at(held, end)
        if len(blocks) > before:
            self._holders.add(held.bit, sequence)
            self._shrink(rank, held)

    def forget(self, worker_id: int, dp_rank: int | None = None) -> None:
        """Drop what a rank, or all ranks of a worker, were believed to hold, with their capacities."""
        every = [*self._ranks, *self._capacities] if dp_rank is None else [WorkerRank(worker_id, dp_rank)]
        for rank in every:
            if rank.worker_id == worker_id:
                self._capacities.pop(rank, None)
                held = self._ranks.pop(rank, None)
                if held is not None:
                    self._holders.discard(held.bit, list(held.blocks))
                    held.blocks.clear()  # as it may be due
                    self._bits.retire(rank)
                    self._bits.give_back(held.bit)

    def find(self, sequence: Sequence[int], now: float = 0.0) -> Mapping[WorkerRank, Overlap]:
        """Return the overlap of each rank with a prompt, as OverlapIndex describes it."""
        self._sweep(now)
        return self._bits.overlaps(self._holders.depths(sequence))

    def blocks(self, rank: WorkerRank | None = None) -> int:
        """Return how many blocks a rank is believed to hold, or all ranks together; those that have ended may count."""
        if rank is None:
            return sum(len(held.blocks) for held in self._ranks.values())
        held = self._ranks.get(rank)
        return 0 if held is None else len(held.blocks)

    def blocks_by_tier(self, rank: WorkerRank) -> dict[str, int]:
        """Return how many blocks a rank is believed to hold, by tier: all are on the device."""
        count = self.blocks(rank)
        return {"device": count} if count else {}

    def prefixes(self, hits: Mapping[int, int], most: int) -> HeldPrefixes:
        """Return the prefixes that are believed to be held, as `held_prefixes` chooses them."""
        return held_prefixes(self._holders, self._bits, hits, most)

    def dump(self) -> list[RouterEvent]:
        """Return what each rank is believed to hold, in the form of `PrefixIndex.dump`."""
        rows = sorted((rank, block) for rank, held in self._ranks.items() for block in held.blocks)
        return [
            RouterEvent(
                rank.worker_id,
                KvChange(number, BlockUpdate(stored=BlocksAdded([HeldBlock(block, block)])), rank.dp_rank),
            )
            for number, (rank, block) in enumerate(rows)
        ]

    def _limit(self, rank: WorkerRank) -> int:
        return self._capacities.get(rank, MAX_BLOCKS_PER_RANK)

    def _tick(self, now: float) -> int:
        return int(now * TICKS_PER_SECOND)

    def _shrink(self, rank: WorkerRank, held: _RankBlocks) -> None:
        """Drop the least recently used blocks beyond the capacity."""
        surplus = len(held.blocks) - self._limit(rank)
        if surplus > 0:
            self._holders.discard(held.bit, [held.blocks.popitem(last=False)[0] for _ in range(surplus)])

    def _sweep(self, now: float) -> None:
        """Drop what has ended, at most once per tick."""
        tick = self._tick(now)
        if tick <= self._swept:
            return
        self._swept = tick
        while self._due and self._due[0][0] <= tick:
            held = heappop(self._due)[2]
            blocks = held.blocks
            ended = [block for block, _ in takewhile(lambda each: 0 < each[1] <= tick, blocks.items())]
            if ended:
                for block in ended:
                    del blocks[block]
                self._holders.discard(held.bit, ended)
            held.is_due = False
            if blocks:  # with `is_lru`, blocks that have ended may stand behind one that stays
                self._check_at(held, tick + 1 if self._is_lru else next(iter(blocks.values())))

    def _check_at(self, held: _RankBlocks, tick: int) -> None:
        held.is_due = True
        heappush(self._due, (tick, next(self._serials), held))
