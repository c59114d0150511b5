"""Shares the dispatches between policy classes by their quanta, counted in uncached tokens: deficit round robin.

The classes stand in a ring. A class that is visited spends the credit it has left; where that does not pay for its next
request it gets one quantum. What it cannot spend on its next request it keeps for its next visit. So a class is served at
most its quantum and one request more before the next class has its turn, and over time each class gets its share.
"""

from __future__ import annotations

from collections.abc import Mapping


class DeficitRoundRobin:
    """The credit of each class and the position in the ring."""

    __slots__ = ("_credit", "_is_visiting", "_names", "_position", "_quanta")

    def __init__(self, quanta: Mapping[str, int]) -> None:
        """`quanta`: the credit that a visit brings to each class, above 0; in the order of the ring."""
        if not quanta or min(quanta.values()) < 1:
            raise ValueError("deficit round robin needs at least one class, and each quantum must be at least 1")
        self._quanta = dict(quanta)
        self._names = tuple(quanta)
        self._credit = dict.fromkeys(quanta, 0)
        self._position = 0
        self._is_visiting = False  # the class at the position has credit left of this visit

    def credit(self, name: str) -> int:
        """Return the uncached tokens that a class may dispatch before it needs another quantum."""
        return self._credit[name]

    def take(self, costs: Mapping[str, int]) -> str | None:
        """Choose the class whose next request is dispatched, and charge the class; None when `costs` is empty.

        `costs`: what the next request costs, for each class that could dispatch one now.
        """
        if not costs:
            return None
        if self._is_visiting:
            name = self._names[self._position]
            if name in costs and self._credit[name] >= costs[name]:
                return self._charge(self._position, costs)
            self._end_visit()
        ring = [(self._position + step) % len(self._names) for step in range(len(self._names))]
        for position in ring:
            name = self._names[position]
            if name not in costs:
                continue
            if self._credit[name] < costs[name]:
                self._credit[name] += self._quanta[name]
            if self._credit[name] >= costs[name]:
                return self._charge(position, costs)
        self._add_rounds(costs)
        affordable = (p for p in ring if (n := self._names[p]) in costs and self._credit[n] >= costs[n])
        return self._charge(next(affordable), costs)

    def drop_credit(self, name: str) -> None:
        """Take all credit from a class that has no request left, so that an idle class cannot save up for a burst."""
        self._credit[name] = 0
        if self._is_visiting and self._names[self._position] == name:
            self._end_visit()

    def _add_rounds(self, costs: Mapping[str, int]) -> None:
        """Do at once the whole rounds after which the first of the next requests is paid for."""
        rounds = min(-(-(cost - self._credit[name]) // self._quanta[name]) for name, cost in costs.items())
        for name in costs:
            self._credit[name] += rounds * self._quanta[name]

    def _charge(self, position: int, costs: Mapping[str, int]) -> str:
        name = self._names[position]
        self._credit[name] -= costs[name]
        self._position = position
        self._is_visiting = True
        if not self._credit[name]:
            self._end_visit()
        return name

    def _end_visit(self) -> None:
        self._is_visiting = False
        self._position = (self._position + 1) % len(self._names)
