"""How many lines of batches run at once beside requests of people, by how late the event loop is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

__all__ = ["LinePace"]

QUIET_SECONDS: Final = 0.5  # without a request of a person: then lines take everything
LATE_SECONDS: Final = 0.0005  # a turn of the loop that lasts longer keeps people waiting
KEPT_PART: Final = 0.7  # of the lines, after a late turn
DECREASE_SECONDS: Final = 0.01  # between two decreases: the lines that run need a moment to end
MORE_LINES: Final = 0.02  # after each turn that was not late


class LinePace:
    """Additive increase, multiplicative decrease, while people ask; all lines at once while nobody does.

    The lag of the loop is measured when a line begins or ends, so a frontend without batches measures nothing.
    """

    def __init__(self, most: int, serves_people: Callable[[], bool]) -> None:
        """`serves_people` returns whether this process serves any request that is no line."""
        self._most, self._serves_people = most, serves_people
        self._limit = float(most)
        self._asked_at = -QUIET_SECONDS
        self._decreased_at = 0.0
        self._is_measuring = False

    def limit(self) -> int:
        """Return how many lines may run at once now; at least one."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._serves_people():
            self._asked_at = now
        if now - self._asked_at >= QUIET_SECONDS:
            self._limit = float(self._most)
        elif not self._is_measuring:
            self._is_measuring = True
            loop.call_soon(self._measure, loop)
        return int(self._limit)

    def _measure(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin a measurement at the head of a turn; it ends at the same place of the next one."""
        loop.call_soon(self._measured, loop, loop.time())

    def _measured(self, loop: asyncio.AbstractEventLoop, since: float) -> None:
        """Take over how long a turn of the loop took."""
        self._is_measuring = False
        now = loop.time()
        if now - since <= LATE_SECONDS:
            self._limit = min(float(self._most), self._limit + MORE_LINES)
        elif now - self._decreased_at >= DECREASE_SECONDS:
            self._decreased_at = now
            self._limit = max(1.0, self._limit * KEPT_PART)
