"""Work that runs for ever: where it fails, that is logged, counted and shown, and the work begins again after a wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic
from typing import Final

from dynamo.errors import DynamoException

logger = logging.getLogger(__name__)

FIRST_DELAY_SECONDS: Final = 0.5
LONGEST_DELAY_SECONDS: Final = 30.0
HEALTHY_SECONDS: Final = 60.0  # after so long the last failure is shown no more, and the next one is a first


class LoopFailures:
    """The failures of all work of this process that runs for ever. Safe in any thread."""

    def __init__(self) -> None:
        self.count = 0
        self._troubles: dict[object, tuple[float, str]] = {}  # until when, and what; bounded by the work that runs
        self._lock = Lock()  # some of this work has a thread of its own

    def note(self, work: object, trouble: str, delay_seconds: float = 0.0) -> None:
        """Count a failure of work that begins again after `delay_seconds`, and show it for as long as it is news."""
        with self._lock:
            self.count += 1
            self._troubles[work] = _now() + delay_seconds + HEALTHY_SECONDS, trouble

    def forget(self, work: object) -> None:
        """Show no failure of this work. Idempotent."""
        with self._lock:
            self._troubles.pop(work, None)

    def troubles(self) -> list[str]:
        """Return what failed lately, a sentence each."""
        now = _now()
        with self._lock:
            return [trouble for until, trouble in self._troubles.values() if now < until]


FAILURES: Final = LoopFailures()
"""Those of this process: its loops belong to no other object that `/health` and the metrics of the process both know."""

Failed = Callable[[Exception, float], None]
"""`failed(error, delay_seconds)`: count a failure of a loop, which goes on after the delay, and show it."""


@contextmanager
def counted(name: str) -> Iterator[Failed]:
    """Yield what counts and shows the failures of a loop that has its own rule of trying again.

    Leaving the block ends the loop: nothing of it is shown any more. The log is the caller's, which knows what was tried.
    """
    token = object()

    def failed(error: Exception, delay_seconds: float) -> None:
        trouble = f"{name} failed ({type(error).__name__}) and begins again; the log has the error"
        FAILURES.note(token, trouble, delay_seconds)

    try:
        yield failed
    finally:
        FAILURES.forget(token)


async def forever(work: Callable[[], Awaitable[None]], name: str, delay_seconds: float | None = None) -> None:
    """Run `work()` until it returns; where it raises, run it again after a wait that doubles.

    `delay_seconds`: a wait that stays the same, for what must soon follow another process again once that is back.
    """
    loop, failures = asyncio.get_running_loop(), 0
    with counted(name) as failed:
        while True:
            began = loop.time()
            try:
                return await work()
            except Exception as error:  # the boundary: one fault must not end this for as long as the process lives
                failures = failures + 1 if loop.time() - began < HEALTHY_SECONDS else 1
                delay = delay_seconds
                if delay is None:
                    delay = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(failures - 1, 16))
                failed(error, delay)
                if isinstance(error, DynamoException):  # of the tree of errors: its text is the whole reason
                    logger.warning("%s failed; it begins again in %g s: %s", name, delay, error)
                else:
                    logger.exception("%s failed; it begins again in %g s", name, delay)
            await asyncio.sleep(delay)


def _now() -> float:
    """Return the time of the event loop that runs, which may be a virtual one; in a thread without one, the clock's."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return monotonic()
