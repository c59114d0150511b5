"""Timers of an event loop: when one is due, and a limit of time that does not count what the loop has slept through."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

_SLICES: Final = 4  # a standstill counts for a quarter of the time


def due_of(timer: asyncio.Handle) -> float:
    """Return when a timer fires, by the loop's clock; minus infinity for one that fires at once.

    `call_at` of uvloop gives a handle without a time where the time has come already.
    """
    return timer.when() if hasattr(timer, "when") else -math.inf


class LoopTimer:
    """Calls back once, after `seconds` in which this loop was running, unless it is cancelled before.

    While the loop stood still (a suspended machine, a long callback) what was waited for may have come, and is yet to be
    read. So the time is counted in slices, each of them once, however late its timer fires, and after a last one that
    was late there is one more.
    """

    __slots__ = ("_callback", "_left", "_loop", "_slice", "_timer")

    def __init__(self, seconds: float, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback: Callable[[], None] | None = callback
        self._slice, self._left = seconds / _SLICES, _SLICES
        self._timer = self._loop.call_later(self._slice, self._tick)

    def cancel(self) -> None:
        """Never call back. Idempotent."""
        self._timer.cancel()
        self._callback = None  # it may hold this timer: no circle is left to the collector

    def _tick(self) -> None:
        self._left -= 1
        is_late = self._loop.time() - due_of(self._timer) > self._slice / 2
        if self._left > 0 or (self._left == 0 and is_late):
            self._timer = self._loop.call_later(self._slice, self._tick)
        elif (callback := self._callback) is not None:
            self._callback = None
            callback()


@asynccontextmanager
async def loop_timeout(seconds: float) -> AsyncGenerator[None]:
    """Raise `TimeoutError` once the block has taken `seconds` by a `LoopTimer`."""
    async with asyncio.timeout(None) as scope:
        timer = LoopTimer(seconds, lambda: scope.reschedule(asyncio.get_running_loop().time()))
        try:
            yield
        finally:
            timer.cancel()
