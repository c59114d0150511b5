"""The life of a runtime as a table, and the holders that keep it from ending.

    OPEN ──SHUTDOWN──> DRAINING ──DISCONNECT──> CLOSING ──DISCONNECTED──> CLOSED
      └────────────────DISCONNECT──────────────────^

A shutdown may be requested at any time and by several callers at once: an event without a row is ignored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final

logger = logging.getLogger(__name__)


class RuntimeState(Enum):
    """Where a runtime is in its life."""

    OPEN = "open"
    DRAINING = "draining"  # streams in flight may end, nothing new is served
    CLOSING = "closing"  # it leaves its planes
    CLOSED = "closed"


class RuntimeEvent(Enum):
    """What moves a runtime."""

    SHUTDOWN = "shutdown"  # a graceful end was requested
    DISCONNECT = "disconnect"  # about to leave the planes
    DISCONNECTED = "disconnected"


TRANSITIONS: Final[Mapping[RuntimeState, Mapping[RuntimeEvent, RuntimeState]]] = {
    RuntimeState.OPEN: {
        RuntimeEvent.SHUTDOWN: RuntimeState.DRAINING,
        RuntimeEvent.DISCONNECT: RuntimeState.CLOSING,
    },
    RuntimeState.DRAINING: {RuntimeEvent.DISCONNECT: RuntimeState.CLOSING},
    RuntimeState.CLOSING: {RuntimeEvent.DISCONNECTED: RuntimeState.CLOSED},
    RuntimeState.CLOSED: {},
}


class RuntimeLife:
    """One runtime's place in the table, and its holders: workers whose clean-up still needs discovery and the planes."""

    def __init__(self) -> None:
        self.state = RuntimeState.OPEN
        self.is_connected = False  # discovery was reached, at least once
        self._closed = asyncio.Event()
        self._holders = 0
        self._released = asyncio.Event()
        self._released.set()

    def apply(self, event: RuntimeEvent) -> bool:
        """Move, and return whether the event has a place in this state."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            return False
        self.state = following
        if following is RuntimeState.CLOSED:
            self._closed.set()
        return True

    @property
    def is_open(self) -> bool:
        """Whether neither a shutdown nor a disconnect was begun."""
        return self.state is RuntimeState.OPEN

    @property
    def is_ending(self) -> bool:
        """Whether the planes are left, or were."""
        return self.state in (RuntimeState.CLOSING, RuntimeState.CLOSED)

    async def wait_closed(self) -> None:
        """Return when the runtime is closed."""
        await self._closed.wait()

    def hold(self) -> Callable[[], None]:
        """Add a holder; the returned function removes it, once."""
        self._holders += 1
        self._released.clear()

        def release() -> None:
            self._holders -= 1
            if self._holders == 0:
                self._released.set()

        return release

    async def wait_released(self, seconds: float) -> None:
        """Return when there is no holder, or after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._released.wait()
        except TimeoutError:
            logger.warning("%d workers still hold the runtime; disconnecting all the same", self._holders)
