"""Changes of what is served: the index is brought up to date after them, and a task that waits for one is woken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

UPDATE_SECONDS: Final = 0.1  # this long after the first change, for all changes since: where an update takes long


class Changes:
    """Calls for an update after each change: at once, or in a moment where updates take long."""

    def __init__(self, update: Callable[[], None], is_slow: Callable[[], bool]) -> None:
        """`update` brings everything up to date; `is_slow`: whether that takes milliseconds now."""
        self._update, self._is_slow = update, is_slow
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    def note(self) -> None:
        """Take a change."""
        if not self._is_slow():
            self._run()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(UPDATE_SECONDS, self._run)

    async def next(self) -> None:
        """Return after the next update."""
        await self._changed.wait()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` holds; it is checked after every update."""
        while not condition():
            await self.next()

    def close(self) -> None:
        """Drop an update that is due. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self.close()
        self._update()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
