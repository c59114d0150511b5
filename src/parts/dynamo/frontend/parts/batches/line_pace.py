"""When lines of batches begin beside requests of people: so seldom that these hardly wait for the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

QUIET_SECONDS: Final = 0.5  # without a request of a person: then lines take everything
HALF_SECONDS: Final = 0.1
"""Interactive requests that take so long may wait for lines half of the loop's time. A request waits for the loop several
times, each time for as long as lines keep it, so quick requests bear much less: share / (1 - share) = wait / HALF_SECONDS."""
MAX_SHARE: Final = 0.5  # of the loop's time, for lines
MAX_DEBT_SECONDS: Final = 1.0  # a line that took very long keeps others away no longer
FIRST_LINE_SECONDS: Final = 0.001  # of the loop, before any line was measured
FIRST_WAIT_SECONDS: Final = 0.025  # of a person, before the first was measured
MIN_WAIT_SECONDS: Final = 0.002  # so that lines always have a fiftieth of the loop
NEWEST_PART: Final = 0.1  # of an average


class LinePace:
    """Gives lines a share of the event loop's time beside interactive requests, and all of it without them."""

    def __init__(self, serves_people: Callable[[], bool]) -> None:
        """`serves_people` returns whether this process serves any request that is no line."""
        self._serves_people = serves_people
        self._asked_at = -QUIET_SECONDS
        self._next_at = 0.0  # when the loop's time that lines have used is no more than their share
        self._line_seconds = FIRST_LINE_SECONDS
        self._wait_seconds: float | None = None  # of people, lately

    @property
    def share(self) -> float:
        """The part of the loop's time that lines get beside interactive requests."""
        wait = FIRST_WAIT_SECONDS if self._wait_seconds is None else self._wait_seconds
        return min(MAX_SHARE, wait / (wait + HALF_SECONDS))

    def begin(self) -> float:
        """Count a line that begins, and return 0.0; or return in how many seconds one may."""
        now = asyncio.get_running_loop().time()
        if self._serves_people():
            self._asked_at = now
        if now - self._asked_at >= QUIET_SECONDS:
            self._next_at = now
        elif now < self._next_at:
            return min(self._next_at - now, QUIET_SECONDS)
        self._use(self._line_seconds, now)
        return 0.0

    def end(self, seconds: float) -> None:
        """Count how long a line has kept the loop."""
        self._use(seconds - self._line_seconds, asyncio.get_running_loop().time())
        self._line_seconds += (seconds - self._line_seconds) * NEWEST_PART

    def waited(self, seconds: float) -> None:
        """Count how long a person waited: for the first token of a stream, for the whole of an answer that is none."""
        before = seconds if self._wait_seconds is None else self._wait_seconds
        self._wait_seconds = max(before + (seconds - before) * NEWEST_PART, MIN_WAIT_SECONDS)

    def _use(self, seconds: float, now: float) -> None:
        self._next_at = min(max(self._next_at, now) + seconds / self.share, now + MAX_DEBT_SECONDS)


class Metered(Generic[T]):
    """A coroutine to await, and the time that its steps keep the event loop."""

    __slots__ = ("_coroutine", "seconds")

    def __init__(self, coroutine: Coroutine[object, object, T]) -> None:
        self._coroutine = coroutine
        self.seconds = 0.0

    def __await__(self) -> Generator[object, object, T]:
        coroutine, clock = self._coroutine, asyncio.get_running_loop().time
        step: Callable[[Any], object] = coroutine.send  # or `throw`, which takes an error
        sent: object = None
        while True:
            began = clock()
            try:
                waits_for = step(sent)
            except StopIteration as ended:
                value: T = ended.value
                return value
            finally:
                self.seconds += clock() - began
            try:
                step, sent = coroutine.send, (yield waits_for)
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:  # which is the coroutine's to handle
                step, sent = coroutine.throw, error
