"""How one of several costs is picked: the lowest, or by a softmax. Pure: chance is a number that is given."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import exp


def pick_lowest(costs: Sequence[float], draw: float) -> tuple[int, int]:
    """Return the position of the lowest cost, and how many share it. Among those `draw` in [0, 1) decides, evenly."""
    lowest = min(costs)
    first = costs.index(lowest)
    tied = costs.count(lowest)
    if tied == 1:
        return first, 1
    skip = min(int(draw * tied), tied - 1)
    return [at for at, cost in enumerate(costs) if cost == lowest][skip], tied


def pick_sampled(costs: Sequence[float], temperature: float, draw: float) -> tuple[int, int]:
    """Return a position drawn with a softmax over the costs in units of their spread, and how many share its cost.

    Where all costs are equal, every position is as likely.
    """
    lowest, highest = min(costs), max(costs)
    spread = (highest - lowest) * temperature
    if spread <= 0.0:
        return pick_lowest(costs, draw)
    weights = [exp((lowest - cost) / spread) for cost in costs]
    sums = list(accumulate(weights))
    at = min(bisect_right(sums, draw * sums[-1]), len(sums) - 1)
    return at, costs.count(costs[at])
