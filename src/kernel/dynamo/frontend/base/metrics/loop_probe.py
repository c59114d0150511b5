"""Measures once a second how late the event loop runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from dynamo.frontend.base.metrics import EventLoopMetrics

__all__ = ["LoopProbe"]

LOOP_PROBE_SECONDS: Final = 1.0  # how often the loop's delay is measured; one timer a second costs nothing


class LoopProbe:
    """One timer; each of `measures` is called with its time."""

    def __init__(self, metrics: EventLoopMetrics, measures: Sequence[Callable[[float], None]]) -> None:
        self._metrics = metrics
        self._measures = measures
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure now and every second from here on."""
        self._probe(asyncio.get_running_loop().time())

    def stop(self) -> None:
        """Measure no more; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _probe(self, due: float) -> None:
        """Measure how late this very timer runs, and set the next one."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._metrics.observe(max(0.0, now - due))
        for measure in self._measures:
            measure(now)
        due = now + LOOP_PROBE_SECONDS
        self._timer = loop.call_at(due, self._probe, due)
