"""Responses in the memory of one process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from dynamo.frontend.apis.history import StoredResponse, project_of
from dynamo.frontend.base.settings.stored_responses import StoreLimits
from dynamo.frontend.base.shares import largest_owner
from dynamo.frontend.parts.stored_responses.base import StoreUsage, stem_of
from dynamo.runtime.base.steady_wall import steady_wall


class _Project:
    """What one project has, in the order of use."""

    __slots__ = ("bytes", "stems")

    def __init__(self) -> None:
        self.stems: OrderedDict[str, None] = OrderedDict()
        self.bytes = 0


class MemoryResponseStore:
    """A table in the order of use."""

    def __init__(self, limits: StoreLimits, *, now: Callable[[], float] = steady_wall) -> None:
        self._limits, self._now = limits, now
        self._entries: OrderedDict[str, tuple[StoredResponse, float]] = OrderedDict()  # with the time of their last use
        self._projects: dict[str, _Project] = {}
        self._bytes = 0

    async def put(self, stored: StoredResponse) -> StoreUsage | None:
        if stored.size > self._limits.bytes:
            return None
        stem = stem_of(stored.id)
        self._forget(stem)
        self._entries[stem] = stored, self._now()
        self._bytes += stored.size
        project = self._projects.setdefault(project_of(stored.owner), _Project())
        project.stems[stem] = None
        project.bytes += stored.size
        self._sweep()
        return StoreUsage(len(self._entries), self._bytes)

    async def get(self, id: str, owner: str = "") -> StoredResponse | None:
        stored = self._find(id, owner)
        if stored is not None:
            self._entries[stem_of(id)] = stored, self._now()
            self._entries.move_to_end(stem_of(id))
            self._projects[project_of(stored.owner)].stems.move_to_end(stem_of(id))
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

    async def projects(self) -> Mapping[str, int]:
        return {name: project.bytes for name, project in self._projects.items()}

    async def aclose(self) -> None:
        self._entries.clear()
        self._projects.clear()
        self._bytes = 0

    def _find(self, id: str, owner: str) -> StoredResponse | None:
        self._sweep()
        found = self._entries.get(stem_of(id))
        if found is None or found[0].owner != owner or (id.startswith("resp_") and found[0].id != id):
            return None
        return found[0]

    def _sweep(self) -> None:
        """Forget what is too old, and what is too much."""
        oldest, limits = self._now() - self._limits.ttl_seconds, self._limits
        while self._entries and next(iter(self._entries.values()))[1] < oldest:
            self._forget(next(iter(self._entries)))
        while len(self._entries) > limits.entries or self._bytes > limits.bytes:
            if self._bytes > limits.bytes:
                most = largest_owner({name: project.bytes for name, project in self._projects.items()})
            else:
                most = largest_owner({name: len(project.stems) for name, project in self._projects.items()})
            self._forget(next(iter(self._projects[most].stems)))

    def _forget(self, stem: str) -> None:
        found = self._entries.pop(stem, None)
        if found is not None:
            self._bytes -= found[0].size
            name = project_of(found[0].owner)
            project = self._projects[name]
            project.bytes -= found[0].size
            del project.stems[stem]
            if not project.stems:
                del self._projects[name]
