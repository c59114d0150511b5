"""Which ranks hold which block: a flat map from sequence hash to the run of blocks that the block is in.

A run is a stretch of blocks that follow each other and have the same holders, a mask with one bit per rank. A sequence
hash covers everything before its block. So where the last block of a run is in a prompt, all of the run is, and a lookup
takes one step per run and not one per block. Runs are cut where holders begin to differ, and joined where they are equal
again; whatever is cut, each block knows its run, and no tree is walked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Final, NamedTuple, TypeAlias

from dynamo.kv.overlap import Overlap, WorkerRank

RankMask: TypeAlias = int
"""A set of ranks: one bit each, given out by RankBits."""

_LONGEST_RUN: Final = 512  # blocks; a cut in the middle moves what is behind it, so runs have an end
_REMEMBERED_MASKS: Final = 1024  # masks whose ranks are kept as tuples


class RankBits:
    """Gives each rank one bit, and finds the ranks of a mask."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bits: dict[tuple[int, int], RankMask] = {}  # keyed by WorkerRank or the tuple equal to it
        self._ranks: list[WorkerRank | None] = []  # by number of the bit; None: the bit is free
        self._free: list[int] = []
        self._members: dict[RankMask, tuple[WorkerRank, ...]] = {}

    def __len__(self) -> int:
        return len(self._bits)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._bits)

    def get(self, rank: tuple[int, int]) -> RankMask | None:
        """Return the bit of a rank, None for a rank without one."""
        return self._bits.get(rank)

    def take(self, rank: WorkerRank) -> RankMask | None:
        """Return the bit of a rank, a new one for a new rank; None when no rank can be added."""
        bit = self._bits.get(rank)
        if bit is not None:
            return bit
        if self._free:
            number = self._free.pop()
            self._ranks[number] = rank
        elif len(self._ranks) < self._limit:
            number = len(self._ranks)
            self._ranks.append(rank)
        else:
            return None
        bit = self._bits[rank] = 1 << number
        return bit

    def retire(self, rank: WorkerRank) -> None:
        """Take the bit from a rank. Maps that hold the bit no longer show it; `give_back` it when they do not hold it."""
        if self._bits.pop(rank, None) is not None:
            self._members.clear()

    def give_back(self, mask: RankMask) -> None:
        """Free bits that were retired; no map may hold one of them any more."""
        while mask:
            number = (mask & -mask).bit_length() - 1
            self._ranks[number] = None
            self._free.append(number)
            mask &= mask - 1

    def overlaps(self, depths: Iterable[tuple[int, RankMask]]) -> dict[WorkerRank, Overlap]:
        """Return what `BlockHolders.depths` found by rank, as blocks on the device."""
        found: dict[WorkerRank, Overlap] = {}
        for depth, mask in depths:
            overlap = Overlap(depth)
            for rank in self.of(mask):
                found[rank] = overlap
        return found

    def all(self) -> RankMask:
        """Return the mask of every rank."""
        return sum(self._bits.values())

    def of(self, mask: RankMask) -> tuple[WorkerRank, ...]:
        """Return the ranks of a mask."""
        members = self._members.get(mask)
        if members is None:
            found: list[WorkerRank] = []
            rest = mask
            while rest:
                rank = self._ranks[(rest & -rest).bit_length() - 1]
                assert rank is not None, "a map holds the bit of a rank that was given back"
                found.append(rank)
                rest &= rest - 1
            if len(self._members) >= _REMEMBERED_MASKS:
                self._members.clear()
            members = self._members[mask] = tuple(found)
        return members


class _Run:
    """Blocks that follow each other and have the same holders."""

    __slots__ = ("__weakref__", "blocks", "mask", "parent", "tail")

    def __init__(self, mask: RankMask, blocks: list[int], parent: int | None) -> None:
        self.mask = mask
        self.blocks = blocks
        self.parent = parent  # the block before the first one, where the run does not begin a sequence
        self.tail: _Run | None = None  # what was cut off the end last; only a hint


class HeldRun(NamedTuple):
    """A run, as a reader sees it."""

    block: int  # its last one
    blocks: int
    parent: int | None  # the block before the first one
    mask: RankMask


class BlockHolders:
    """The ranks that hold each block. Its size is the number of different blocks."""

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}  # every block of a run leads to it
        self._each: set[_Run] = set()
        # Bits that were dropped and are still in runs: they count no more, and `sweep` removes them a few runs at a time.
        self.dead: RankMask = 0
        self._sweeping: RankMask = 0  # those that are gone once `_unswept` is empty
        self._unswept: list[_Run] = []

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, bit: RankMask, sequence: Sequence[int], parent: int | None = None) -> int:
        """Book blocks that follow each other, and `parent`, for the rank with this bit; return how many are new to it."""
        if self.add_unheld(bit, sequence, parent):
            return len(sequence)
        runs = list(map(self._runs.get, sequence))
        at = added = 0
        while at < len(runs):
            run, end = runs[at], at + 1
            while end < len(runs) and runs[end] is run:
                end += 1
            if run is None:
                self._add_new(bit, list(sequence[at:end]), sequence[at - 1] if at else parent)
                added += end - at
            elif not run.mask & bit:
                start = run.blocks.index(sequence[at])
                self._change(run, start, start + end - at, run.mask | bit)
                added += end - at
            at = end
        return added

    def add_unheld(self, bit: RankMask, sequence: Sequence[int], parent: int | None = None) -> bool:
        """Book blocks as `add` does, if no rank holds one of them; return whether that was so."""
        if not self._runs.keys().isdisjoint(sequence):
            return False
        if sequence:
            self._add_new(bit, list(sequence), parent)
        return True

    def discard(self, bit: RankMask, blocks: list[int]) -> int:
        """Take blocks, in any order, from the rank with this bit; return how many of them it held."""
        runs = list(map(self._runs.get, blocks))
        first = runs[0] if runs else None
        if first is not None and first.mask & bit and runs.count(first) == len(runs):
            return self._discard(first, bit, blocks)
        gone: dict[_Run, list[int]] = {}
        for block, run in zip(blocks, runs, strict=True):
            if run is not None and run.mask & bit:
                gone.setdefault(run, []).append(block)
        return sum(self._discard(run, bit, leaving) for run, leaving in gone.items())

    def drop(self, bit: RankMask) -> None:
        """Take all blocks from the rank with this bit. The bit is not to be used again while it is in `dead`."""
        self.dead |= bit

    def sweep(self, blocks: int) -> None:
        """Remove dropped bits from runs with so many blocks."""
        if not self.dead:
            return
        if not self._sweeping:
            self._sweeping, self._unswept = self.dead, list(self._each)
        while self._unswept and blocks > 0:
            run = self._unswept.pop()
            blocks -= 1
            if run.blocks and (run.mask & self.dead or not run.mask):
                blocks -= len(run.blocks)
                self._change(run, 0, len(run.blocks), run.mask)
        if not self._unswept:
            self.dead &= ~self._sweeping
            self._sweeping = 0

    def blocks_of(self, bit: RankMask) -> list[int]:
        """Return all blocks of the rank with this bit."""
        return [block for run in self._each if run.mask & bit for block in run.blocks]

    def is_held(self, bit: RankMask, block: int) -> bool:
        """Return whether the rank with this bit holds a block."""
        run = self._runs.get(block)
        return run is not None and bool(run.mask & bit)

    def held_by(self, bit: RankMask, sequence: Sequence[int]) -> list[int]:
        """Return the blocks of `sequence` that the rank with this bit holds."""
        runs = list(map(self._runs.get, sequence))
        if runs.count(None) == len(runs):
            return []
        return [block for block, run in zip(sequence, runs, strict=True) if run is not None and run.mask & bit]

    def masks(self, sequence: Sequence[int]) -> list[RankMask]:
        """Return the holders of each block."""
        live = ~self.dead
        return [0 if run is None else run.mask & live for run in map(self._runs.get, sequence)]

    @property
    def run_count(self) -> int:
        """How many runs there are."""
        return len(self._each)

    def runs(self) -> Iterator[HeldRun]:
        """Yield the runs, in no order. Nothing may change meanwhile."""
        live = ~self.dead
        return (
            HeldRun(run.blocks[-1], len(run.blocks), run.parent, mask)
            for run in self._each
            if (mask := run.mask & live)
        )

    def run_of(self, block: int) -> tuple[HeldRun, int] | None:
        """Return the run that a block is in, and which of its blocks it is, from 1 on; None: no rank holds the block."""
        run = self._runs.get(block)
        if run is None or not (mask := run.mask & ~self.dead):
            return None
        return HeldRun(run.blocks[-1], len(run.blocks), run.parent, mask), run.blocks.index(block) + 1

    def depths(self, sequence: Sequence[int]) -> list[tuple[int, RankMask]]:
        """Return how many blocks from the first one on the ranks hold without a gap, with the ranks of each depth.

        One lookup in the map per run: where a run's last block is in the sequence, all blocks of the run are.
        """
        found: list[tuple[int, RankMask]] = []
        get = self._runs.get
        position, total = 0, len(sequence)
        alive: RankMask = ~self.dead
        while position < total:
            run = get(sequence[position])
            mask = 0 if run is None else run.mask
            if mask != alive:
                gone = alive & ~mask
                if gone and alive > 0:
                    found.append((position, gone))
                alive &= mask
            if run is None or not alive:
                return found
            blocks = run.blocks
            end = position + len(blocks)
            if end <= total and blocks[-1] == sequence[end - 1]:
                position = end
            else:
                position += _common(blocks, sequence, position)
        if alive > 0:
            found.append((position, alive))
        return found

    def _add_new(self, bit: RankMask, blocks: list[int], parent: int | None) -> None:
        """Book blocks that no rank holds."""
        run = None if parent is None else self._runs.get(parent)
        if run is not None and run.mask == bit and run.blocks[-1] == parent and len(run.blocks) < _LONGEST_RUN:
            run.blocks += blocks
        else:
            run = _Run(bit, blocks, parent)
            self._each.add(run)
        self._runs.update(zip(blocks, repeat(run)))

    def _discard(self, run: _Run, bit: RankMask, leaving: list[int]) -> int:
        """Take blocks of one run from a rank that holds the run."""
        mask = run.mask & ~bit
        count, size = len(leaving), len(run.blocks)
        last = run.blocks[-count:]
        if last == leaving or last == leaving[::-1]:  # engines evict the end of a sequence first
            self._change(run, size - count, size, mask)
            return count
        start = run.blocks.index(leaving[0])
        if run.blocks[start : start + count] == leaving:
            self._change(run, start, start + count, mask)
            return count
        distinct = set(leaving)
        for start, end in _stretches(run.blocks, distinct):
            self._change(run, start, end, mask)
        return len(distinct)

    def _change(self, run: _Run, start: int, end: int, mask: RankMask) -> None:
        """Give the blocks from `start` to `end` of a run other holders; 0: no rank holds them any more."""
        if self.dead:
            mask &= ~self.dead
            run.mask &= ~self.dead
        blocks = run.blocks
        piece = blocks[start:end]
        rest = blocks[end:]
        parent = blocks[start - 1] if start else run.parent
        tail = run.tail
        follower = None  # the run right behind the piece, as far as it is known
        if start:
            del blocks[start:]
            run.tail = None
            if rest:
                follower = _Run(run.mask, rest, piece[-1])
                follower.tail = tail
                self._each.add(follower)
                if self._sweeping and not run.mask:
                    self._unswept.append(follower)
                self._runs.update(zip(rest, repeat(follower)))
        elif rest:
            del blocks[:end]
            run.parent = piece[-1]
            follower = run
        else:
            run.blocks, run.tail = [], None  # only a hint leads here now
            self._each.discard(run)
        if not rest and tail is not None and tail.blocks and tail.parent == piece[-1]:
            follower = tail
        if not mask:
            deque(map(self._runs.pop, piece), maxlen=0)
            return
        before = None if parent is None else self._runs.get(parent)
        if before is not None and _goes_on(before, parent, mask, len(piece)):
            before.blocks += piece
            before.tail = follower
            target = before
        elif follower is not None and _fits(follower, mask, len(piece)):
            follower.blocks[:0] = piece
            follower.parent = parent
            target = follower
        else:
            target = _Run(mask, piece, parent)
            target.tail = follower
            self._each.add(target)
        if start:
            run.tail = target
        self._runs.update(zip(piece, repeat(target)))


def _fits(run: _Run, mask: RankMask, count: int) -> bool:
    return run.mask == mask and len(run.blocks) + count <= _LONGEST_RUN


def _goes_on(run: _Run, parent: int | None, mask: RankMask, count: int) -> bool:
    """Return whether blocks behind `parent` can lengthen the run that holds `parent`."""
    return run.blocks[-1] == parent and _fits(run, mask, count)


def _common(blocks: list[int], sequence: Sequence[int], position: int) -> int:
    """Return how many blocks of a run, from the one at `position` of the sequence on, are in the sequence."""
    offset = 0 if blocks[0] == sequence[position] else blocks.index(sequence[position])
    shift = position - offset
    high = min(len(blocks), len(sequence) - shift)
    if blocks[high - 1] == sequence[high - 1 + shift]:
        return high - offset
    low = offset + 1  # the blocks below are common, the one at `high` - 1 is not
    high -= 1
    while low < high:
        middle = (low + high) // 2
        if blocks[middle] == sequence[middle + shift]:
            low = middle + 1
        else:
            high = middle
    return low - offset


def _stretches(blocks: Sequence[int], leaving: set[int]) -> list[tuple[int, int]]:
    """Return the stretches of neighbours among the leaving blocks, the last one first."""
    places = [place for place, block in enumerate(blocks) if block in leaving]
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1] = found[-1][0], place + 1
        else:
            found.append((place, place + 1))
    return found[::-1]


def extend_depths(starts: Iterable[tuple[int, RankMask]], masks: Sequence[RankMask]) -> list[tuple[int, RankMask]]:
    """Return where the ranks end that begin at `starts` and hold the blocks of `masks` from there on without a gap."""
    waiting = sorted(starts, reverse=True)
    ends: list[tuple[int, RankMask]] = []
    alive = 0
    position = 0
    while waiting or alive:
        if not alive:
            position = waiting[-1][0]
        while waiting and waiting[-1][0] == position:
            alive |= waiting.pop()[1]
        gone = alive & ~(masks[position] if position < len(masks) else 0)
        if gone:
            ends.append((position, gone))
            alive ^= gone
        position += 1
    return ends
