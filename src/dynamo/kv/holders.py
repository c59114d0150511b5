"""Which ranks hold which block: a flat map from sequence hash to a mask with one bit per rank.

A sequence hash covers everything before its block, so a prompt is found by looking up its hashes one after the other; no
tree is walked. Masks are plain integers, shared between the blocks of one change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from dynamo.kv.overlap import WorkerRank

__all__ = ["BlockHolders", "RankBits", "RankMask", "extend_depths"]

RankMask: TypeAlias = int
"""A set of ranks: one bit each, given out by RankBits."""

_FIRST_CHUNK: Final = 32  # blocks that are looked up at once; few, as most prompts leave the cache early
_LARGEST_CHUNK: Final = 256
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

    def give_back(self, rank: WorkerRank) -> None:
        """Free the bit of a rank; no map may hold the bit any more."""
        bit = self._bits.pop(rank, None)
        if bit is not None:
            number = bit.bit_length() - 1
            self._ranks[number] = None
            self._free.append(number)
            self._members.clear()

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


class _Joined(dict[RankMask | None, RankMask]):
    """What each mask becomes with one more rank; filled as it is read, so that equal masks stay one object."""

    __slots__ = ("_bit",)

    def __init__(self, bit: RankMask) -> None:
        self._bit = bit
        self[None] = bit

    def __missing__(self, mask: RankMask | None) -> RankMask:
        joined = self[mask] = (mask or 0) | self._bit
        return joined


class BlockHolders:
    """The ranks that hold each block. Its size is the number of different blocks."""

    def __init__(self) -> None:
        self._masks: dict[int, RankMask] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, bit: RankMask, sequence: Sequence[int]) -> None:
        """Book blocks for the rank with this bit."""
        masks = self._masks
        masks.update(zip(sequence, map(_Joined(bit).__getitem__, map(masks.get, sequence)), strict=True))

    def discard(self, bit: RankMask, sequence: Sequence[int]) -> None:
        """Take blocks from the rank with this bit, which must hold each of them."""
        masks = self._masks
        held = list(map(masks.get, sequence))
        if held.count(bit) == len(held):  # nobody else holds any of them
            deque(map(masks.pop, sequence), maxlen=0)
            return
        left: dict[RankMask, RankMask] = {}
        for block, mask in zip(sequence, held, strict=True):
            if mask is None or mask == bit:
                masks.pop(block, None)
                continue
            rest = left.get(mask)
            if rest is None:
                rest = left[mask] = mask & ~bit
            masks[block] = rest

    def held_by(self, bit: RankMask, sequence: Sequence[int]) -> list[int]:
        """Return the blocks of `sequence` that the rank with this bit holds."""
        held = list(map(self._masks.get, sequence))
        if held.count(None) == len(held):
            return []
        return [block for block, mask in zip(sequence, held, strict=True) if mask is not None and mask & bit]

    def masks(self, sequence: Iterable[int]) -> list[RankMask | None]:
        """Return the mask of each block, None where no rank holds the block."""
        return list(map(self._masks.get, sequence))

    def depths(self, sequence: Sequence[int]) -> list[tuple[int, RankMask]]:
        """Return how many blocks from the first one on the ranks hold without a gap, with the ranks of each depth."""
        found: list[tuple[int, RankMask]] = []
        get = self._masks.get
        start, size, total = 0, _FIRST_CHUNK, len(sequence)
        alive: RankMask | None = None
        while start < total:
            masks = list(map(get, sequence[start : start + size]))
            last = masks[0]
            if alive is None:
                if last is None:
                    break
                alive = last
            if masks.count(last) < len(masks) or last != alive:
                alive = _walk(masks, start, alive, found)
                if not alive:
                    break
            start += len(masks)
            size = min(2 * size, _LARGEST_CHUNK)
        if alive:
            found.append((total, alive))
        return found


def _walk(masks: Sequence[RankMask | None], start: int, alive: RankMask, found: list[tuple[int, RankMask]]) -> RankMask:
    """Follow ranks over the blocks from `start` on: `found` gets those that drop out, the others are returned."""
    last: RankMask | None = alive
    for position, mask in enumerate(masks, start):
        if mask is last:
            continue
        last = mask
        gone = alive & ~(mask or 0)
        if gone:
            found.append((position, gone))
            alive ^= gone
            if not alive:
                break
    return alive


def extend_depths(
    starts: Iterable[tuple[int, RankMask]], masks: Sequence[RankMask | None]
) -> list[tuple[int, RankMask]]:
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
        gone = alive & ~((masks[position] or 0) if position < len(masks) else 0)
        if gone:
            ends.append((position, gone))
            alive ^= gone
        position += 1
    return ends
