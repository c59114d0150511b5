"""Responses in the memory of one process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from dynamo.frontend.apis.history import StoredResponse
from dynamo.frontend.base.settings.stored_responses import StoreLimits
from dynamo.frontend.parts.stored_responses.base import StoreUsage, stem_of


class MemoryResponseStore:
    """A table in the order of use."""

    def __init__(self, limits: StoreLimits, *, now: Callable[[], float] = time.time) -> None:
        self._limits, self._now = limits, now
        self._entries: OrderedDict[str, tuple[StoredResponse, float]] = OrderedDict()  # with the time of their last use
        self._bytes = 0

    async def put(self, stored: StoredResponse) -> StoreUsage | None:
        if stored.size > self._limits.bytes:
            return None
        self._forget(stem_of(stored.id))
        self._entries[stem_of(stored.id)] = stored, self._now()
        self._bytes += stored.size
        self._sweep()
        return StoreUsage(len(self._entries), self._bytes)

    async def get(self, id: str, owner: str = "") -> StoredResponse | None:
        stored = self._find(id, owner)
        if stored is not None:
            self._entries[stem_of(id)] = stored, self._now()
            self._entries.move_to_end(stem_of(id))
        return stored

    async def delete(self, id: str, owner: str = "") -> bool:
        stored = self._find(id, owner)
        if stored is None or stored.id != id:
            return False
        self._forget(stem_of(id))
        return True

    async def usage(self) -> StoreUsage:
        self._sweep()
        return StoreUsage(len(self._entries), self._bytes)

    async def aclose(self) -> None:
        self._entries.clear()
        self._bytes = 0

    def _find(self, id: str, owner: str) -> StoredResponse | None:
        self._sweep()
        found = self._entries.get(stem_of(id))
        if found is None or found[0].owner != owner or (id.startswith("resp_") and found[0].id != id):
            return None
        return found[0]

    def _sweep(self) -> None:
        """Forget what is too old, and what is too much."""
        oldest = self._now() - self._limits.ttl_seconds
        while self._entries:
            stem, (_, used_at) = next(iter(self._entries.items()))
            is_full = len(self._entries) > self._limits.entries or self._bytes > self._limits.bytes
            if used_at >= oldest and not is_full:
                return
            self._forget(stem)

    def _forget(self, stem: str) -> None:
        found = self._entries.pop(stem, None)
        if found is not None:
            self._bytes -= found[0].size
