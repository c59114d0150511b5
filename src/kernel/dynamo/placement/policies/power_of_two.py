"""The less loaded of two workers drawn by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dynamo.placement.candidates import Candidate, Placement, PlacementRequest
from dynamo.placement.policies.least_loaded import fewest_in_flight


class PowerOfTwo:
    """Draws two workers and chooses the one with fewer open streams."""

    __slots__ = ("_rng",)

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: PlacementRequest, candidates: Sequence[Candidate], now: float) -> Placement:
        """Choose the less loaded of two."""
        drawn = candidates if len(candidates) <= 2 else self._rng.sample(candidates, 2)
        return fewest_in_flight(drawn, self._rng, "power-of-two")
