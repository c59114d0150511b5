"""From any thread to the event loop: messages of the event plane on their way out, in order and within a bound."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

logger = logging.getLogger(__name__)

OUTBOX_MESSAGES: Final = 4096
"""Messages that wait while the event loop is busy. An engine that blocks the loop for seconds fills it; what no longer
fits is dropped and counted, and the gap in the event ids makes routers fetch a fresh view."""


class EventChannel(Protocol):
    """One topic of the event plane."""

    def publish(self, payload: object) -> None:
        """Send one message; called on the event loop, and must not wait."""


class Outbox:
    """Carries messages from any thread to the event loop, in order and within a bound."""

    def __init__(
        self,
        channel: EventChannel,
        *,
        capacity: int = OUTBOX_MESSAGES,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Must be created on the event loop that owns the channel. `on_sent` is called there after messages were sent."""
        self._channel, self._on_sent = channel, on_sent
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._capacity = capacity
        self._lock = threading.Lock()
        self._waiting: deque[object] = deque()
        self._is_closed = False
        self.dropped = 0

    def put(self, payload: object) -> None:
        """Send one message soon; any thread. A message that finds the outbox full is dropped and counted."""
        with self._lock:
            if self._is_closed:
                return
            if len(self._waiting) >= self._capacity:
                self.dropped += 1
                is_first = self.dropped == 1
            else:
                is_first = False
                self._waiting.append(payload)
                if len(self._waiting) == 1:  # else the loop is to send it already
                    is_here = threading.get_ident() == self._loop_thread  # then no thread has to be woken
                    try:
                        (self._loop.call_soon if is_here else self._loop.call_soon_threadsafe)(self._flush)
                    except RuntimeError:  # the loop is closed: the process is on its way out
                        self._is_closed = True
                        self._waiting.clear()
        if is_first:
            logger.warning(
                "%d event messages wait for a blocked event loop; further ones are dropped and counted", self._capacity
            )

    def close(self) -> None:
        """Drop what waits and ignore what comes."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()

    def _flush(self) -> None:
        with self._lock:
            batch = list(self._waiting)
            self._waiting.clear()
        for payload in batch:
            try:
                self._channel.publish(payload)
            except Exception:  # at most once: the next message may get through
                logger.exception("an event message could not be published")
        if batch and self._on_sent is not None:
            self._on_sent()
