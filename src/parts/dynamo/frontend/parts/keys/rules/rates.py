"""One rate as the generic cell rate algorithm counts it: a single time, no window, O(1).

The state of a rate is the time at which it would be whole again if nothing more came (`full_at`, seconds of a clock that
only goes forward). A use of n units moves it n intervals on, and is allowed while it is no further off than the burst.
"""

from __future__ import annotations

import math


class Rate:
    """So many units in so many seconds, `burst` of them at once."""

    __slots__ = ("_room", "burst", "interval", "limit", "period_seconds")

    def __init__(self, limit: float, period_seconds: float, burst: float) -> None:
        self.limit, self.burst, self.period_seconds = limit, burst, period_seconds
        self.interval = period_seconds / limit
        """Seconds after which one more unit is allowed."""
        # Adding and taking away the same interval leaves a rest of some nanoseconds, which must not refuse a request.
        self._room = burst * self.interval + 1e-6

    def wait_seconds(self, full_at: float, units: float, now: float) -> float:
        """Return how long a use of `units` has to wait; 0.0: it may come now.

        A use of more than the burst is allowed once nothing is owed. What it takes beyond is owed, so the rate holds.
        """
        owed = full_at - now
        room = self._room - (units if units < self.burst else self.burst) * self.interval
        return owed - room if owed > room else 0.0

    def after(self, full_at: float, units: float, now: float) -> float:
        """Return the state after a use of `units`."""
        return (full_at if full_at > now else now) + units * self.interval

    def remaining(self, full_at: float, now: float) -> tuple[int, float]:
        """Return how many units may come now, and in how many seconds the whole burst may."""
        owed = full_at - now
        if owed <= 0.0:
            return int(self.burst), 0.0
        left = math.floor((self._room - owed) / self.interval)
        return (left if left > 0 else 0), owed

    # -- parts of a rate -------------------------------------------------------------------------------------------------

    def part(self, limit: float) -> Rate:
        """Return a smaller rate with its part of the burst; one unit always may come."""
        return Rate(limit, self.period_seconds, max(1.0, self.burst * limit / self.limit))

    def level(self, full_at: float, now: float) -> float:
        """Return how many units may come now, with fractions; negative where more is owed than the burst."""
        return self.burst - max(0.0, full_at - now) / self.interval

    def full_at(self, level: float, now: float) -> float:
        """Return the state in which so many units may come now."""
        return now + (self.burst - level) * self.interval
