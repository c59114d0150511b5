"""Times of the inspector: milliseconds since the epoch, from the time of the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

STEP_SECONDS: Final = 1.0  # a system clock that is this far off was set; less is drift, which would stir every entry


class InspectorClock:
    """Turns loop times into times of the system clock. The difference is kept, so that a time never changes as it is shown."""

    def __init__(self, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self.loop_time: Callable[[], float] | None = None
        self._offset = 0.0

    def now(self) -> float:
        """Return the loop's time."""
        if self.loop_time is None:
            self.loop_time = asyncio.get_running_loop().time
            self._offset = self._wall_clock() - self.loop_time()
        return self.loop_time()

    def settle(self) -> float:
        """Return the loop's time, and follow a system clock that was set."""
        now = self.now()
        offset = self._wall_clock() - now
        if abs(offset - self._offset) >= STEP_SECONDS:
            self._offset = offset
        return now

    def ms(self, at: float) -> int:
        """Return a loop time as milliseconds since the epoch."""
        return int((at + self._offset) * 1000)

    def now_ms(self) -> int:
        """Return now as milliseconds since the epoch."""
        return self.ms(self.now())
