"""The worker with the fewest open streams."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dynamo.placement.candidates import Candidate, Placement, PlacementReason, PlacementRequest


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
    lowest = min([candidate.in_flight for candidate in candidates])
    equals = [candidate for candidate in candidates if candidate.in_flight == lowest]
    chosen = equals[0] if len(equals) == 1 else rng.choice(equals)
    return Placement(chosen, policy, (PlacementReason("in_flight", lowest),))
