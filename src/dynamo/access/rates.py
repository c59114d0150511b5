"""One rate as the generic cell rate algorithm counts it: a single time, no window, O(1).

The state of a rate is the time at which it would be whole again if nothing more came (`full_at`, seconds of a clock that
only goes forward). A use of n units moves it n intervals on, and is allowed while it is no further off than the burst.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Rate"]


@dataclass(frozen=True, slots=True)
class Rate:
    """So many units in so many seconds, `burst` of them at once."""

    limit: int
    period_seconds: float
    burst: int

    @property
    def interval(self) -> float:
        """Seconds after which one more unit is allowed."""
        return self.period_seconds / self.limit

    def wait_seconds(self, full_at: float, units: float, now: float) -> float:
        """Return how long a use of `units` has to wait; 0.0: it may come now.

        A use of more than the burst is allowed once nothing is owed. What it takes beyond is owed, so the rate holds.
        """
        owed = max(0.0, full_at - now)
        room = (self.burst - min(units, self.burst)) * self.interval
        # Adding and taking away the same interval leaves a rest of some nanoseconds, which must not refuse anybody.
        wait = owed - room
        return wait if wait > 1e-6 else 0.0

    def after(self, full_at: float, units: float, now: float) -> float:
        """Return the state after a use of `units`."""
        return max(full_at, now) + units * self.interval

    def remaining(self, full_at: float, now: float) -> int:
        """Return how many units may come now."""
        owed = max(0.0, full_at - now)
        return max(0, min(self.burst, math.floor(self.burst - owed / self.interval + 1e-6)))

    def reset_seconds(self, full_at: float, now: float) -> float:
        """Return how long it takes until the whole burst may come."""
        return max(0.0, full_at - now)
