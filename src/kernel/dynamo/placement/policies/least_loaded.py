"""The worker with the fewest open streams."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dynamo.placement.candidates import MOST_LOAD, Candidate, CandidateList, Placement, PlacementReason, PlacementRequest


class LeastLoaded:
    """Chooses the worker with the fewest open streams."""

    __slots__ = ("_rng",)

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: PlacementRequest, candidates: Sequence[Candidate], now: float) -> Placement:
        """Choose the worker with the fewest open streams."""
        return fewest_in_flight(candidates, self._rng, "least-loaded")


def lowest_load(loads: bytes | bytearray) -> int:
    """Return the lowest of some loads: by searches for 0, 1 and so on, as a search among a thousand takes less than a look at ten."""
    return next(load for load in range(MOST_LOAD + 1) if load in loads)


def nth(loads: bytes | bytearray, load: int, skip: int) -> int:
    """Return where a load is that comes after `skip` others of the same number."""
    low, high = 0, len(loads)
    while skip:
        middle = (low + high) // 2
        before = loads.count(load, low, middle)
        if skip < before:
            high = middle
        else:
            low, skip = middle, skip - before
    return loads.index(load, low)


def fewest_in_flight(candidates: Sequence[Candidate], rng: random.Random, policy: str) -> Placement:
    """Return the candidate with the fewest open streams; chance decides between equals.

    Without chance the lowest id would get every burst.
    """
    loads = candidates.loads if isinstance(candidates, CandidateList) else None
    if loads is not None and (lowest := lowest_load(loads)) < MOST_LOAD:
        equals = loads.count(lowest)
        at = nth(loads, lowest, rng.randrange(equals) if equals > 1 else 0)
    else:
        exact = [each.in_flight for each in candidates]
        lowest, equals = min(exact), exact.count(min(exact))
        at = [each for each, load in enumerate(exact) if load == lowest][rng.randrange(equals) if equals > 1 else 0]
    chosen = candidates[at]
    return Placement(chosen, policy, (PlacementReason("in_flight", lowest),))
