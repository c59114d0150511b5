"""Log lines that a peer can provoke: one for each kind and interval, then how many more there were."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

INTERVAL_SECONDS: Final = 10.0


class LogRate:
    """Limits the lines of one logger. Use it on the event loop.

    The kinds are names in our code and never text of a peer, so their number is bounded.
    """

    def __init__(self, logger: logging.Logger, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._logger = logger
        self._interval = interval_seconds
        self._suppressed: dict[str, int] = {}  # kinds whose interval runs

    def warn(self, kind: str, text: str, *values: object) -> None:
        """Log a warning, unless one of this kind was logged within the interval; then count it."""
        if kind in self._suppressed:
            self._suppressed[kind] += 1
            return
        self._suppressed[kind] = 0
        self._logger.warning(text, *values)
        asyncio.get_running_loop().call_later(self._interval, self._summarize, kind)

    def _summarize(self, kind: str) -> None:
        count = self._suppressed.pop(kind)
        if count:
            self._logger.warning("%d more suppressed within %g s: %s", count, self._interval, kind)
