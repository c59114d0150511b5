"""Whether and when a process that died is started again. Pure: the caller has the clock."""

from __future__ import annotations

import re
from typing import Final

EXIT_USAGE: Final = 2  # what argparse leaves with; the next one would read the same command line
NOT_STARTED: Final = 126  # the status of a process that the system did not start, as shells have it

FIRST_DELAY_SECONDS: Final = 0.5
LONGEST_DELAY_SECONDS: Final = 30.0
HEALTHY_SECONDS: Final = 60.0  # after so long the next death is a new story, not the same crash loop
EARLY_FAILURES: Final = 3  # a process that never came up so often will not come up the next time either
_NUMBER: Final = re.compile(r"\d+")  # times and ids, in which lines of the same failure differ


class RestartPolicy:
    """The record of one process over its incarnations."""

    def __init__(self, *, early_failures: int = EARLY_FAILURES) -> None:
        """`early_failures`: after so many without ever being ready it is given up."""
        self._early_failures = early_failures
        self._deaths_in_a_row = 0
        self._was_ever_ready = False
        self._last_death: tuple[int, str] | None = None

    def after_death(self, status: int, *, healthy_seconds: float | None, last_line: str = "") -> float | None:
        """Seconds until the next start, or None to give up: also where a process that never was ready ends as it did before.

        `healthy_seconds`: how long this incarnation was ready; None if it never was. `last_line`: of its output.
        """
        death = (status, _NUMBER.sub("", last_line))
        is_repeated, self._last_death = bool(death[1]) and death == self._last_death, death
        self._was_ever_ready |= healthy_seconds is not None
        if not self._was_ever_ready and status == EXIT_USAGE:
            return None
        if healthy_seconds is not None and healthy_seconds >= HEALTHY_SECONDS:
            self._deaths_in_a_row = 0
        self._deaths_in_a_row += 1
        if not self._was_ever_ready and (is_repeated or self._deaths_in_a_row >= self._early_failures):
            return None
        return min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(self._deaths_in_a_row - 1, 16))
