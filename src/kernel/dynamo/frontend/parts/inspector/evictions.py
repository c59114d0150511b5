"""How many blocks each worker evicted within the last minute, from counters that its KV events keep anyway."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from dynamo.frontend.parts.inspector.figures import MINUTE_SLOTS, SLOT_SECONDS
from dynamo.kv.overlap import WorkerRank
from dynamo.router.kv_events.rank_events import CacheEvents

__all__ = ["Evictions"]


class Evictions:
    """The evicted blocks in slots of time, and those since the last slot. A worker without any takes no room."""

    __slots__ = ("_counted", "_slots")

    def __init__(self) -> None:
        self._slots: deque[Counter[int]] = deque(maxlen=MINUTE_SLOTS - 1)  # by worker; the open slot is the last one
        self._counted: dict[WorkerRank, int] = {}  # the counters at the end of the last slot

    def end_slot(self, events: Mapping[WorkerRank, CacheEvents]) -> None:
        """End a slot of time."""
        self._slots.append(self._open(events))
        self._counted = {rank: counts.evicted_blocks for rank, counts in events.items()}

    def per_minute(self, events: Mapping[WorkerRank, CacheEvents]) -> dict[int, float]:
        """Return the evicted blocks per minute of each worker whose events are followed, by its id."""
        found = self._open(events)
        for slot in self._slots:
            found.update(slot)
        minutes = (len(self._slots) + 1) * SLOT_SECONDS / 60
        return {rank.worker_id: round(found[rank.worker_id] / minutes, 1) for rank in events}

    def _open(self, events: Mapping[WorkerRank, CacheEvents]) -> Counter[int]:
        found: Counter[int] = Counter()
        for rank, counts in events.items():
            blocks, before = counts.evicted_blocks, self._counted.get(rank, 0)
            if blocks != before:  # a rank that was dropped and came back counts from zero
                found[rank.worker_id] += blocks - before if blocks > before else blocks
        return found
