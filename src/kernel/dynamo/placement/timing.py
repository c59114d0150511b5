"""What a worker has shown of its speed: how long a prefill takes, and one step of its running streams. Pure.

Both are curves, `base + linear x + square x²`. The x of a prefill is the uncached tokens that one pass computes; the x of a
decode step is the share of the rank's cache that its streams' contexts fill, and each stream adds the same to it, however
short its context is.
"""

from __future__ import annotations

from typing import Final

import msgspec

DEFAULT_CAPACITY_TOKENS: Final = 262_144  # of the cache of a rank that does not report it

MOST_STEPS: Final = 16.0
"""So many steps are reckoned with after a pass was seen to end. Then their errors, added up, are as long as a step."""


class TimeCurve(msgspec.Struct, frozen=True, gc=False):
    """Milliseconds as a function of some amount x of work."""

    base: float
    linear: float
    square: float = 0.0

    def at(self, x: float) -> float:
        """Return the milliseconds of the amount `x`."""
        return self.base + (self.linear + self.square * x) * x


class RankTiming(msgspec.Struct, frozen=True, gc=False):
    """The speed of one rank as it is believed to be."""

    prefill: TimeCurve  # x: uncached tokens in one pass
    decode: TimeCurve  # x: share of the cache that the contexts of the streams fill
    output_tokens: float = 256.0  # that a request generates where nothing else is known
    stream_ms: float = 0.0  # that each stream adds to a decode step

    def step_ms(self, fill: float, streams: float) -> float:
        """Return how long a decode step of so many streams takes, whose contexts fill this share of the cache."""
        return self.decode.at(fill) + self.stream_ms * streams


def pass_ms(curve: TimeCurve, tokens: float, budget: float) -> float:
    """Return how long the passes take that compute `tokens` tokens, `budget` in each; 0 for none."""
    if tokens <= 0:
        return 0.0
    if tokens <= budget:
        return curve.at(tokens)
    whole, rest = divmod(tokens, budget)
    return whole * curve.at(budget) + (curve.at(rest) if rest else 0.0)


def rest_of_step_ms(at: float, boundary_at: float, step: float) -> float:
    """Return the ms until the step ends that runs at the time `at`, by a pass that ended at `boundary_at`; 0: not known."""
    since = (at - boundary_at) * 1000
    return step - since % step if boundary_at and step and since < MOST_STEPS * step else 0.0


# Before anything has been seen: the shape of a medium accelerator and model. A prefill has a fixed cost, a cost per token,
# and a small one for attention; a decode step reads the weights and all contexts, and computes a little for each stream.
DEFAULT_TIMING: Final = RankTiming(TimeCurve(15.0, 0.015, 4e-7), TimeCurve(6.0, 40.0), stream_ms=0.05)
