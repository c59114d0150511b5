"""The worker with the fewest open streams."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dynamo.placement.candidates import (
    MOST_LOAD,
    Candidate,
    CandidateList,
    Placement,
    PlacementReason,
    PlacementRequest,
)


class LeastLoaded:
    """Chooses the worker with the fewest open streams."""

    __slots__ = ("_rng",)

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: PlacementRequest, candidates: Sequence[Candidate], now: float) -> Placement:
        """Choose the worker with the fewest open streams."""
        return fewest_in_flight(candidates, self._rng, "least-loaded")


def lowest_load(loads: Sequence[int]) -> int:
    """Return the lowest of some loads, of `MOST_LOAD` at most: a search among a thousand bytes takes less than a step of a loop."""
    return next(load for load in range(MOST_LOAD + 1) if load in loads)


def highest_load(loads: bytearray) -> int:
    """Return the highest of some loads: what is left without those up to one of them, until none is left."""
    highest = 0
    while loads:
        highest = loads[len(loads) // 2]
        loads = loads.translate(None, bytes(range(highest + 1)))
    return highest


def nth(loads: Sequence[int], load: int, skip: int) -> int:
    """Return where a load is that comes after `skip` others of the same number."""
    low, high = 0, len(loads)
    while skip:
        middle = (low + high) // 2
        before = loads[low:middle].count(load)
        if skip < before:
            high = middle
        else:
            low, skip = middle, skip - before
    return low + loads[low:high].index(load)


def fewest_in_flight(candidates: Sequence[Candidate], rng: random.Random, policy: str) -> Placement:
    """Return the candidate with the fewest open streams; chance decides between equals.

    Without chance the lowest id would get every burst.
    """
    loads: Sequence[int] = candidates.loads if isinstance(candidates, CandidateList) else ()
    lowest = lowest_load(loads) if loads else MOST_LOAD
    if lowest == MOST_LOAD:
        loads = [each.in_flight for each in candidates]
        lowest = min(loads)
    equals = loads.count(lowest)
    chosen = candidates[nth(loads, lowest, rng.randrange(equals) if equals > 1 else 0)]
    return Placement(chosen, policy, (PlacementReason("in_flight", lowest),))
