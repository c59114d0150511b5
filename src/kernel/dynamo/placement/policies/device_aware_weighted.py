"""By load, where one accelerator counts as several CPUs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from dynamo.placement.candidates import Candidate, Placement, PlacementRequest
from dynamo.placement.policies.least_loaded import fewest_in_flight

CPU: Final = "cpu"


class DeviceAwareWeighted:
    """Chooses the device group that carries less for its weight, and there the worker with the fewest open streams."""

    __slots__ = ("_ratio", "_rng")

    def __init__(self, rng: random.Random, cuda_to_cpu_ratio: float) -> None:
        """`cuda_to_cpu_ratio`: how many streams another device takes for each one of a CPU."""
        self._rng = rng
        self._ratio = cuda_to_cpu_ratio

    def choose(self, request: PlacementRequest, candidates: Sequence[Candidate], now: float) -> Placement:
        """Choose the least loaded worker of the lighter group; the faster devices when both are equal."""
        groups = (
            ([each for each in candidates if each.device != CPU], self._ratio),
            ([each for each in candidates if each.device == CPU], 1.0),
        )
        present = [
            (sum([each.in_flight for each in group]) / (len(group) * weight), group)
            for group, weight in groups
            if group
        ]
        lightest = min(present, key=lambda entry: entry[0])[1]
        return fewest_in_flight(lightest, self._rng, "device-aware-weighted")
