"""Each worker in turn."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from dynamo.placement.candidates import Candidate, CandidateList, Placement, PlacementReason, PlacementRequest

_POSITION: Final = attrgetter("instance_id", "endpoint")
_TURN: Final = (PlacementReason("turn"),)


class RoundRobinCursor:
    """Position of one caller in the round-robin order."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: tuple[int, str] = (-1, "")  # (instance id, endpoint) of the last choice

    def next(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the first candidate after the last choice, or the first of all, and move there.

        The order is that of the ids, so a turn survives workers that come and go.
        """
        if isinstance(candidates, CandidateList):  # in that order already, and of one endpoint
            chosen = candidates[bisect_right(candidates, self.last, key=_POSITION) % len(candidates)]
        else:
            chosen = min([each for each in candidates if _POSITION(each) > self.last] or candidates, key=_POSITION)
        self.last = _POSITION(chosen)
        return chosen


class RoundRobin:
    """Chooses the workers in turn."""

    __slots__ = ("_cursor",)

    def __init__(self, cursor: RoundRobinCursor | None = None) -> None:
        """`cursor`: the caller's position; without one the policy keeps its own."""
        self._cursor = cursor or RoundRobinCursor()

    def choose(self, request: PlacementRequest, candidates: Sequence[Candidate], now: float) -> Placement:
        """Choose the next worker in turn."""
        return Placement(self._cursor.next(candidates), "round-robin", _TURN)
