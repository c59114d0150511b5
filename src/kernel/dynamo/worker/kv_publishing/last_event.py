"""The last KV event, published again after a silence: a router that lost it, and all before it, notices within a second.

Routers find a loss by the next event id. Behind the last event there is no next one, so the last one is published again. A router
that has it ignores it, native ones as well: its id is an old one. Nothing is published before the first event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dynamo.runtime.base.timers import due_of

REPEAT_SECONDS: Final = (0.2, 0.3, 0.4, 10.0)
"""The pauses before each repetition; the last one again and again, for routers that could not be reached meanwhile."""


class LastEventRepeats:
    """Publishes again when nothing new was published for a while. Use it on one event loop."""

    __slots__ = ("_is_closed", "_loop", "_publish", "_sent_at", "_step", "_timer")

    def __init__(self, publish: Callable[[], None]) -> None:
        """`publish`: publishes the last event once more."""
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = 0.0
        self._step = 0
        self._is_closed = False

    def sent(self) -> None:
        """Begin the silence behind events that were published just now."""
        self._sent_at, self._step = self._loop.time(), 0
        if self._timer is None or due_of(self._timer) > self._sent_at + REPEAT_SECONDS[0]:
            self._set_timer()

    def close(self) -> None:
        """Publish nothing more. Idempotent."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_closed:
            self._timer = self._loop.call_at(self._sent_at + REPEAT_SECONDS[self._step], self._due)

    def _due(self) -> None:
        if self._loop.time() >= self._sent_at + REPEAT_SECONDS[self._step]:  # else there was something new meanwhile
            self._publish()
            self._sent_at = self._loop.time()
            self._step = min(self._step + 1, len(REPEAT_SECONDS) - 1)
        self._timer = None
        self._set_timer()
