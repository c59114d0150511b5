"""From the name in a request to the model that serves it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dynamo.frontend.models.served import ServedModel


class NameIndex:
    """Names and aliases of the models that may get requests, and the names that are only registered."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[ServedModel, ...]] = {}
        self._pending: frozenset[str] = frozenset()  # registered, cannot answer yet
        self._turn = 0

    def set(self, by_name: Mapping[str, Sequence[ServedModel]], registered: Iterable[str]) -> None:
        """Take over the models by name; `registered`: every name that a worker registered."""
        self._by_name = {name: tuple(models) for name, models in by_name.items()}
        self._pending = frozenset(registered) - self._by_name.keys()

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

    def models(self) -> list[ServedModel]:
        """Return one entry per name, sorted."""
        return [
            found[0]
            for name, found in sorted(self._by_name.items())
            if found[0].name == name and any(each.is_reachable or each.is_started_on_demand for each in found)
        ]
