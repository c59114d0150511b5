"""Selections that wait for their reservation, and the reservations that are counted."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from dynamo.bindings.selection.records import ChosenRank, PoolName, SelectionCacheConfig, refusal
from dynamo.placement.session_affinity import SessionLease
from dynamo.router.kv.router import KvRouter

SPARE_BOOKINGS: Final = 1024  # that may be remembered beyond twice those that are booked


class PendingSelections:
    """Selections that wait for their reservation, oldest first; within the bounds of a configuration."""

    def __init__(self, config: SelectionCacheConfig) -> None:
        self._config = config
        self._kept: OrderedDict[tuple[PoolName, str], tuple[ChosenRank, float]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, selection_id: str, chosen: ChosenRank, now: float) -> None:
        """Keep a selection, in place of an earlier one of that id."""
        self.take(chosen.pool, selection_id, now)
        self._kept[chosen.pool, selection_id] = (chosen, now + self._config.ttl_secs)
        self.bytes += chosen.size
        while self._kept:
            expires_at = next(iter(self._kept.values()))[1]
            is_full = len(self._kept) > self._config.max_entries or self.bytes > self._config.max_bytes
            if not is_full and expires_at > now:
                break
            self.bytes -= self._kept.popitem(last=False)[1][0].size

    def take(self, pool: PoolName, selection_id: str, now: float) -> ChosenRank | None:
        """Return a selection, which is kept no longer; None: there is none, or it is too old."""
        found = self._kept.pop((pool, selection_id), None)
        if found is None:
            return None
        self.bytes -= found[0].size
        return found[0] if found[1] > now else None


class Reservations:
    """Which router counts each reservation. A router may end one by itself: a worker left, or it is too old."""

    def __init__(self) -> None:
        self._by_id: dict[str, tuple[KvRouter, SessionLease | None]] = {}
        self._sweep_at = SPARE_BOOKINGS

    def __len__(self) -> int:
        return len(self._by_id)

    def check_new(self, selection_id: str, now: float) -> None:
        """Raise SelectionServiceError for an id that is reserved."""
        if self._find(selection_id, now) is not None:
            raise refusal("conflict", f"selection {selection_id} is already reserved or being reserved")

    def add(self, selection_id: str, router: KvRouter, lease: SessionLease | None, now: float) -> None:
        """Take a reservation that its router has booked."""
        self._by_id[selection_id] = (router, lease)
        if len(self._by_id) > self._sweep_at:
            for each in list(self._by_id):
                self._find(each, now)
            self._sweep_at = 2 * len(self._by_id) + SPARE_BOOKINGS

    def router(self, selection_id: str, now: float) -> KvRouter:
        """Return the router of a reservation. Raises SelectionServiceError for one that does not exist."""
        router = self._find(selection_id, now)
        if router is None:
            raise refusal("not_found", f"reservation {selection_id} not found")
        return router

    def end(self, selection_id: str, now: float) -> None:
        """Forget a reservation, and let go of its session."""
        _, lease = self._by_id.pop(selection_id)
        if lease is not None:
            lease.release(now)

    def _find(self, selection_id: str, now: float) -> KvRouter | None:
        found = self._by_id.get(selection_id)
        if found is None or selection_id in found[0].load:
            return None if found is None else found[0]
        self.end(selection_id, now)
        return None
