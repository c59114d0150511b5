"""The highest load that a fleet serves in time. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.replay.figures import ReplayFigures


class LoadTarget(msgspec.Struct, frozen=True):
    """What so many of the requests must keep."""

    ttft_ms: float  # to the first token
    token_ms: float  # between two tokens of a request, in the mean
    share: float  # of the requests, 0 to 1

    def __str__(self) -> str:
        return f"{self.share:.0%} of the requests: first token in {self.ttft_ms:g} ms, {self.token_ms:g} ms per token"


def share_in_time(figures: ReplayFigures, target: LoadTarget) -> float:
    """Return the share of the requests that kept the target; one that was not served did not."""
    kept = sum(
        request.ttft_ms is not None
        and request.ttft_ms <= target.ttft_ms
        and (request.itl_ms is None or request.itl_ms <= target.token_ms)
        for request in figures.requests
    )
    return kept / len(figures.requests) if figures.requests else 0.0


def highest_load(holds: Callable[[float], bool], low: float, high: float, *, steps: int) -> float:
    """Return the highest load between two at which something holds, halving their ratio `steps` times; 0: not even at `low`.

    Raises InvalidArgument unless 0 < low < high.
    """
    if not 0 < low < high:
        raise InvalidArgument(f"the lower load must be above 0 and below the higher one, got {low} and {high}")
    if not holds(low):
        return 0.0
    if holds(high):
        return high
    for _ in range(steps):
        middle = math.sqrt(low * high)
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
