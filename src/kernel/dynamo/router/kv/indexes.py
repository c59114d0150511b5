"""The indexes of one router taken together: the deeper answer counts, and bookings are passed to the indexes that learn from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from dynamo.kv.approximate_index import ApproximateIndex
from dynamo.kv.held_prefixes import HeldPrefixes
from dynamo.kv.overlap import Overlap, OverlapIndex, WorkerRank

_NONE: Mapping[WorkerRank, Overlap] = {}


@runtime_checkable
class LearningIndex(Protocol):
    """An index that gets where prompts are sent."""

    def add(self, rank: WorkerRank, sequence: Sequence[int], now: float) -> None:
        """Take a prompt that is sent to a rank."""


@runtime_checkable
class SizedIndex(Protocol):
    """An index that knows how much each rank holds."""

    def blocks(self, rank: WorkerRank | None = None) -> int:
        """Return the blocks of one rank, or of all."""
        ...


@runtime_checkable
class VisibleIndex(Protocol):
    """An index that can be shown."""

    def blocks_by_tier(self, rank: WorkerRank) -> dict[str, int]:
        """Return the blocks of one rank by tier."""
        ...

    def prefixes(self, hits: Mapping[int, int], most: int) -> HeldPrefixes:
        """Return some prefixes, as `held_prefixes` chooses them."""
        ...


class EventlessGuesses:
    """Guesses what those workers hold that publish no KV events, beside the index of the others."""

    __slots__ = ("_guesses", "ranks")

    def __init__(self, ttl_seconds: float) -> None:
        """`ttl_seconds`: how long a guess holds."""
        self._guesses = ApproximateIndex(ttl_seconds=ttl_seconds)
        self.ranks: frozenset[WorkerRank] = frozenset()  # of those workers

    def find(self, sequence: Sequence[int], now: float = 0.0) -> Mapping[WorkerRank, Overlap]:
        """Return what the guesses expect. See `OverlapIndex.find`."""
        return self._guesses.find(sequence, now) if self.ranks else _NONE

    def add(self, rank: WorkerRank, sequence: Sequence[int], now: float) -> None:
        """Take a prompt that is sent to a rank."""
        if rank in self.ranks:
            self._guesses.add(rank, sequence, now)

    def blocks_by_tier(self, rank: WorkerRank) -> dict[str, int]:
        """Return the blocks that a rank is believed to hold, by tier."""
        return self._guesses.blocks_by_tier(rank)

    def prefixes(self, hits: Mapping[int, int], most: int) -> HeldPrefixes:
        """Return some prefixes that are believed to be held."""
        return self._guesses.prefixes(hits, most)

    def forget(self, worker_id: int, dp_rank: int | None = None) -> None:
        """Drop what was guessed of a worker, or of one rank of it."""
        self._guesses.forget(worker_id, dp_rank)


class KvIndexes:
    """None, one or two indexes."""

    __slots__ = ("_learning", "_predicted", "_sized", "index")

    def __init__(self, index: OverlapIndex | None, predicted: OverlapIndex | None) -> None:
        self.index, self._predicted = index, predicted
        both: tuple[object, object] = (index, predicted)
        self._learning = [each for each in both if isinstance(each, LearningIndex)]
        self._sized = index if isinstance(index, SizedIndex) else None

    def find(self, sequence: Sequence[int], now: float) -> Mapping[WorkerRank, Overlap]:
        """Return the overlap of each rank that holds some of the prompt."""
        if not sequence:
            return _NONE
        known = self.index.find(sequence, now) if self.index is not None else _NONE
        if self._predicted is None:
            return known
        guessed = self._predicted.find(sequence, now)
        if not guessed:
            return known
        found = dict(known)
        for rank, overlap in guessed.items():
            exact = found.get(rank)
            found[rank] = overlap if exact is None else _deeper(exact, overlap)
        return found

    def add(self, rank: WorkerRank, sequence: Sequence[int], now: float) -> None:
        """Pass where a prompt is sent to the indexes that learn from it."""
        for index in self._learning:
            index.add(rank, sequence, now)

    def held(self, rank: WorkerRank) -> int:
        """Return how many blocks a rank holds; 0 where no index knows."""
        return 0 if self._sized is None else self._sized.blocks(rank)

    @property
    def visible(self) -> list[VisibleIndex]:
        """The indexes that can be shown."""
        both: tuple[object, object] = (self.index, self._predicted)
        return [each for each in both if isinstance(each, VisibleIndex)]


def _deeper(known: Overlap, guessed: Overlap) -> Overlap:
    """Return the blocks by tier where two indexes answer: as deep as the deeper one on the device."""
    if guessed.device <= known.device:
        return known
    beyond = guessed.device - known.device
    host = max(0, known.host - beyond)
    disk = max(0, known.disk - max(0, beyond - known.host))
    return Overlap(guessed.device, host, disk)
