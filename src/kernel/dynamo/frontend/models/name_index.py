"""From the name in a request to the model that serves it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from dynamo.frontend.models.served import ServedModel

MAX_GONE: Final = 1024  # names; the one that has been gone longest is forgotten first
GONE_SECONDS: Final = 300.0  # a worker that is restarted has loaded its model again by then, in most cases


class NameIndex:
    """Names and aliases of the models that may get requests, and the names that are or were only registered."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._gone: dict[str, float] = {}  # when the last worker of a name left, oldest first
        self._unloaded: set[str] = set()  # since the last `set`
        self._by_name: dict[str, tuple[ServedModel, ...]] = {}
        self._pending: frozenset[str] = frozenset()  # registered, cannot answer yet
        self._turn = 0

    def set(self, by_name: Mapping[str, Sequence[ServedModel]], registered: Iterable[str]) -> None:
        """Take over the models by name; `registered`: every name that a worker registered."""
        before = self._pending.union(self._by_name)
        self._by_name = {name: tuple(models) for name, models in by_name.items()}
        self._pending = frozenset(registered) - self._by_name.keys()
        for name in before:
            if not self.is_registered(name):
                self._gone.pop(name, None)
                if name not in self._unloaded:
                    self._gone[name] = self._now()
        self._unloaded.clear()
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def unload(self, name: str) -> None:
        """Remember a name that was taken away on purpose: where the next `set` has it no more, nothing brings it back."""
        self._unloaded.add(name)

    def lookup(self, name: str) -> ServedModel | None:
        """Choose the model for one request; where several namespaces serve the name, each gets its share by workers."""
        found = self._by_name.get(name)
        if found is None:
            return None
        if len(found) == 1:
            return found[0]
        self._turn += 1
        turn = self._turn % (sum(model.workers for model in found) or 1)
        for model in found:
            turn -= model.workers
            if turn < 0:
                return model
        return found[0]

    def serving(self, name: str) -> Sequence[ServedModel]:
        """Return the models that serve a name, one for each namespace."""
        return self._by_name.get(name, ())

    def is_registered(self, name: str) -> bool:
        """Return whether a worker registered the name, ready or not."""
        return name in self._by_name or name in self._pending

    def is_expected(self, name: str) -> bool:
        """Return whether a worker registered the name, or had registered it a moment ago and may be restarting."""
        if self.is_registered(name):
            return True
        left_at = self._gone.get(name)
        return left_at is not None and self._now() - left_at < GONE_SECONDS

    def models(self) -> list[ServedModel]:
        """Return one entry per name, sorted."""
        return [
            found[0]
            for name, found in sorted(self._by_name.items())
            if found[0].name == name and any(each.is_reachable or each.is_started_on_demand for each in found)
        ]
