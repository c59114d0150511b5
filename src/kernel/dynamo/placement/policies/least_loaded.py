"""The worker with the fewest open streams."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dynamo.placement.candidates import Candidate, CandidateList, Placement, PlacementReason, PlacementRequest


class LeastLoaded:
    """Chooses the worker with the fewest open streams."""

    __slots__ = ("_rng",)

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: PlacementRequest, candidates: Sequence[Candidate], now: float) -> Placement:
        """Choose the worker with the fewest open streams."""
        return fewest_in_flight(candidates, self._rng, "least-loaded")


def fewest_in_flight(candidates: Sequence[Candidate], rng: random.Random, policy: str) -> Placement:
    """Return the candidate with the fewest open streams; chance decides between equals.

    Without chance the lowest id would get every burst.
    """
    loads = candidates.in_flight if isinstance(candidates, CandidateList) else [each.in_flight for each in candidates]
    lowest = min(loads)
    equals = loads.count(lowest)
    at = loads.index(lowest)
    for _ in range(rng.randrange(equals) if equals > 1 else 0):
        at = loads.index(lowest, at + 1)
    chosen = candidates[at]
    return Placement(chosen, policy, (PlacementReason("in_flight", lowest),))
