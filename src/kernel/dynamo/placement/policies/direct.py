"""The worker that the request names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynamo.errors import InvalidArgument
from dynamo.placement.candidates import Candidate, Placement, PlacementReason, PlacementRequest

_ONLY_ONE: Final = (PlacementReason("only_one_left"),)


class Direct:
    """Chooses nothing by itself: a request must be pinned, unless one worker is left."""

    __slots__ = ()

    def choose(self, request: PlacementRequest, candidates: Sequence[Candidate], now: float) -> Placement:
        """Return the only candidate. Raises `InvalidArgument` when there are several."""
        if len(candidates) == 1:
            return Placement(candidates[0], "direct", _ONLY_ONE)
        raise InvalidArgument("router mode direct: the request must name the instance that shall serve it")
