"""Any worker, by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dynamo.placement.candidates import Candidate, Placement, PlacementRequest


class RandomChoice:
    """Chooses by chance, each worker equally often."""

    __slots__ = ("_rng",)

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: PlacementRequest, candidates: Sequence[Candidate], now: float) -> Placement:
        """Choose any worker."""
        return Placement(self._rng.choice(candidates), "random")
