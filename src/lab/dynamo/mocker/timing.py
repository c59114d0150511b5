"""How long a pass takes: polynomials by default, fixed times, or the measurements of a profiler.

prefill(n) = 4.209989e-07 n^2 + 1.518344e-02 n + 16.50142 ms     n: prompt tokens that the pass computes
decode(p)  = max(1, -25.74 p^2 + 54.01 p + 5.74) ms              p: the part of the cache that decoding requests use
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dynamo.errors import InvalidArgument

LEAST_DECODE_MS: Final = 1.0


class PolynomialTiming:
    """The default: what one 8-billion-parameter model takes on one accelerator of its time, as polynomials."""

    def prefill_ms(self, requests: int, mean_input: int, mean_prefix: int) -> float:
        tokens = requests * (mean_input - mean_prefix)
        if tokens <= 0:
            return 0.0
        return 4.209989e-07 * tokens * tokens + 1.518344e-02 * tokens + 16.50142

    def decode_ms(self, active_tokens: int, mean_context: int, total_tokens: int) -> float:
        part = min(1.0, active_tokens / total_tokens)
        return max(LEAST_DECODE_MS, -25.74 * part * part + 54.01 * part + 5.74)


@dataclass(frozen=True, slots=True)
class FixedTiming:
    """The same times whatever the pass does: one for a pass with prompt tokens, and one for a pass that decodes."""

    prefill: float
    decode: float

    def __post_init__(self) -> None:
        for name, value in (("prefill_ms", self.prefill), ("decode_ms", self.decode)):
            if not 0 <= value < float("inf"):
                raise InvalidArgument(f"timing_model.{name} must be a finite number of at least 0, got {value}")

    def prefill_ms(self, requests: int, mean_input: int, mean_prefix: int) -> float:
        return self.prefill

    def decode_ms(self, active_tokens: int, mean_context: int, total_tokens: int) -> float:
        return self.decode
