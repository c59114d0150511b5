"""Work that runs for ever: where it raises, that is logged, counted and shown, and the work begins again after a wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

logger = logging.getLogger(__name__)

FIRST_DELAY_SECONDS: Final = 0.5
LONGEST_DELAY_SECONDS: Final = 30.0
HEALTHY_SECONDS: Final = (
    60.0  # after so long without a failure the last one is shown no more, and the next one is a first
)


class LoopFailures:
    """The failures of all work of this process that runs for ever. Reading is safe in any thread."""

    def __init__(self) -> None:
        self.count = 0
        self._troubles: dict[object, str] = {}  # of work that failed lately; bounded by the work that runs

    def note(self, work: object, trouble: str) -> None:
        """Count a failure, and show it until `forget`."""
        self.count += 1
        self._troubles[work] = trouble

    def forget(self, work: object) -> None:
        """Show no failure of this work. Idempotent."""
        self._troubles.pop(work, None)

    def troubles(self) -> list[str]:
        """Return what failed lately, a sentence each."""
        return [*self._troubles.values()]


FAILURES: Final = LoopFailures()
"""Those of this process: its loops belong to no other object that `/health` and the metrics of the process both know."""


async def forever(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Run `work()` until it returns; where it raises, run it again after a wait that doubles."""
    loop, token, failures = asyncio.get_running_loop(), object(), 0
    try:
        while True:
            began = loop.time()
            well = loop.call_later(HEALTHY_SECONDS, FAILURES.forget, token)
            try:
                return await work()
            except Exception as error:  # the boundary: one fault must not end this for as long as the process lives
                failures = failures + 1 if loop.time() - began < HEALTHY_SECONDS else 1
                delay = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(failures - 1, 16))
                FAILURES.note(token, f"{name} failed ({type(error).__name__}) and begins again; the log has the error")
                logger.exception("%s failed; it begins again in %g s", name, delay)
            finally:
                well.cancel()
            await asyncio.sleep(delay)
    finally:
        FAILURES.forget(token)
