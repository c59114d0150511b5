"""The time of day for what expires: a wall clock that jumps is followed only after it has stayed where it jumped to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

JUMP_SECONDS: Final = 10.0  # smaller corrections of the clock are followed at once
DRIFT: Final = 1e-3  # of the time since the last call: two healthy clocks differ by less
HOLD_SECONDS: Final = 900.0  # then a new time of day is no mistake


class SteadyWall:
    """Returns seconds since the epoch, which advance as the monotonic clock does.

    A jump is logged once, and so is its end: the clock came back, or stayed for `HOLD_SECONDS` and is followed.
    """

    __slots__ = ("_jumped", "_monotonic", "_offset", "_seen_at", "_wall")

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._seen_at = monotonic()
        self._offset = wall() - self._seen_at  # of the wall clock from the monotonic one, as it is followed
        self._jumped: tuple[float, float] | None = None  # the offset after a jump, and when it was seen first

    def __call__(self) -> float:
        now = self._monotonic()
        offset = self._wall() - now
        if abs(offset - self._offset) > JUMP_SECONDS + (now - self._seen_at) * DRIFT:
            return now + self._after_jump(offset, now)
        if self._jumped is not None:
            self._jumped = None
            logger.warning("the wall clock is back from its jump: it is followed again")
        self._offset, self._seen_at = offset, now
        return now + offset

    def _after_jump(self, offset: float, now: float) -> float:
        """Return the offset that counts while the wall clock is elsewhere."""
        jumped = self._jumped
        if jumped is None or abs(offset - jumped[0]) > JUMP_SECONDS:
            self._jumped = offset, now
            logger.warning(
                "the wall clock jumped by %+.0f s: what expires keeps its time, unless the clock stays there for %.0f s",
                offset - self._offset,
                HOLD_SECONDS,
            )
        elif now - jumped[1] >= HOLD_SECONDS:
            logger.warning("the wall clock stayed after its jump by %+.0f s: it is followed now", offset - self._offset)
            self._jumped, self._offset, self._seen_at = None, offset, now
        return self._offset


steady_wall: Final = SteadyWall()
"""The one of this process."""
