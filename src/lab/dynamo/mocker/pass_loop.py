"""Passes in real time: begins one as soon as there is work, and ends it at the time of its plan."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from dynamo.scheduling import PassPlan, PassResult, RankGroup, ScheduledRequest, pass_duration

logger = logging.getLogger(__name__)

EARLY_SECONDS: Final = 0.0005  # timers of an event loop have a resolution of 1 ms, so a pass may end this much too soon

Deliver = Callable[[Sequence[tuple[int, PassPlan]], Sequence[tuple[int, PassResult]], float], None]
"""`deliver(plans, results, now)`: what one pass of all ranks brought; `now` is the monotonic time of its planned end."""


class PassLoop:
    """Runs the ranks of one worker. The end of a pass is the planned end of the one before and its duration, so delays
    of the event loop do not add up.
    """

    def __init__(self, group: RankGroup, deliver: Deliver, fail: Callable[[Exception], None]) -> None:
        """Create it on the event loop. `fail` gets what `deliver` or a scheduler raised; no pass runs after that."""
        self._group = group
        self._deliver = deliver
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._plans: list[tuple[int, PassPlan]] = []
        self._ends_at = 0.0
        self._handle: asyncio.Handle | None = None  # the next step; None: idle
        self._is_closed = False

    def submit(self, rank: int, request: ScheduledRequest) -> None:
        """Queue a request; requests that come in one turn of the event loop begin in one pass."""
        self._group.cores[rank].submit(request, time.monotonic() * 1000)
        if self._handle is None and not self._is_closed:
            self._handle = self._loop.call_soon(self._wake)

    def cancel(self, rank: int, request: ScheduledRequest) -> None:
        """End a request; idempotent."""
        self._group.cores[rank].cancel(request)

    def close(self) -> None:
        """Run no further pass; idempotent."""
        self._is_closed = True
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _wake(self) -> None:
        self._guarded(self._begin, time.monotonic())

    def _begin(self, at: float) -> None:
        self._handle = None
        self._plans = self._group.begin_pass(at * 1000)
        if self._plans:
            self._ends_at = at + pass_duration(self._plans) / 1000
            self._wait()

    def _wait(self) -> None:
        left = self._ends_at - time.monotonic()
        if left > EARLY_SECONDS:
            self._handle = self._loop.call_later(left, self._on_time)
        else:
            self._handle = self._loop.call_soon(self._on_time)

    def _on_time(self) -> None:
        if self._ends_at - time.monotonic() > EARLY_SECONDS:
            self._wait()
        else:
            self._guarded(self._end, self._ends_at)

    def _end(self, at: float) -> None:
        self._deliver(self._plans, self._group.end_pass(), at)
        if self._is_closed or not self._group.has_work:
            self._handle = None
        else:
            self._begin(at)

    def _guarded(self, step: Callable[[float], None], at: float) -> None:
        try:
            step(at)
        except Exception as error:  # in a timer it would be lost, and every request would wait for ever
            logger.exception("the mock engine failed; its requests end")
            self.close()
            self._fail(error)
