"""The parked requests of one policy class.

Requests that any worker may serve wait in one lane, where the first blocks those behind it. A request that names its rank
waits in a lane of that rank, so that a busy rank holds up nothing but its own requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.queueing.order import OrderKey

__all__ = ["ClassLanes", "LaneEntry"]

R = TypeVar("R")
SLACK: Final = 64  # removed entries that a lane may hold in its middle before it is built anew


class LaneEntry(Generic[R]):
    """One parked request and its place in the order."""

    __slots__ = ("is_parked", "key", "rank", "request")

    def __init__(self, request: R, key: OrderKey, rank: WorkerRank | None) -> None:
        """`rank`: the rank that the request names; None: any worker may serve it."""
        self.request, self.key, self.rank = request, key, rank
        self.is_parked = True

    def __lt__(self, other: LaneEntry[R]) -> bool:
        return self.key < other.key


class ClassLanes(Generic[R]):
    """The lanes of one class. A lane exists while a request waits in it."""

    __slots__ = ("_lanes", "_parked")

    def __init__(self) -> None:
        self._lanes: dict[WorkerRank | None, list[LaneEntry[R]]] = {}  # heaps; their first entry is parked
        self._parked: dict[WorkerRank | None, int] = {}  # entries of a lane that are still parked

    def __len__(self) -> int:
        return sum(self._parked.values())

    def waiting(self, rank: WorkerRank | None) -> int:
        """Return how many requests wait in one lane; None: in that of the requests that name no rank."""
        return self._parked.get(rank, 0)

    def push(self, entry: LaneEntry[R]) -> None:
        """Park a request."""
        heapq.heappush(self._lanes.setdefault(entry.rank, []), entry)
        self._parked[entry.rank] = self._parked.get(entry.rank, 0) + 1

    def head(self, is_ready: Callable[[R], bool]) -> LaneEntry[R] | None:
        """Return the first of the lanes' first requests that are ready; None when none is ready."""
        found: LaneEntry[R] | None = None
        for lane in self._lanes.values():
            if (found is None or lane[0] < found) and is_ready(lane[0].request):
                found = lane[0]
        return found

    def remove(self, entry: LaneEntry[R]) -> None:
        """Take a request out, wherever it stands."""
        rank = entry.rank
        entry.is_parked = False
        self._parked[rank] -= 1
        left, lane = self._parked[rank], self._lanes[rank]
        if not left:
            del self._lanes[rank], self._parked[rank]
            return
        while not lane[0].is_parked:
            heapq.heappop(lane)
        if len(lane) > 2 * left + SLACK:
            self._lanes[rank] = [each for each in lane if each.is_parked]
            heapq.heapify(self._lanes[rank])
