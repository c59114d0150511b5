"""How `dynamo serve` ends: what went wrong, the last lines for the terminal, and the exit status."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Final

from dynamo.cli.console import Console
from dynamo.settings.command import EXIT_USAGE
from dynamo.supervise.process import GaveUp, SupervisedProcess, exit_words

__all__ = ["Ending"]

EXIT_KILLED: Final = 1


class Ending:
    """Collects the reasons; the first failure and the first refusal count."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._failure: GaveUp | None = None
        self._refusal: str | None = None
        self._killed_by: signal.Signals | None = None

    def on_failure(self, failure: GaveUp) -> None:
        """Take the failure of a process that cannot be kept running."""
        self._failure = self._failure or failure

    def on_refusal(self, reason: str) -> None:
        """Take what a worker reported as the operator's mistake."""
        self._refusal = self._refusal or reason

    def on_kill(self, number: signal.Signals) -> None:
        """Take the second signal, for which all processes are killed."""
        self._killed_by = number

    def report(self, processes: Iterable[SupervisedProcess]) -> int:
        """Print how it ended and return the exit status of the command."""
        if self._failure is not None:
            return self._report_failure(self._failure)
        self._console.release()
        if self._killed_by is not None:
            return 128 + self._killed_by
        killed = [process.name for process in processes if process.was_killed]
        if killed:
            self._console.complain(f"dynamo serve: {', '.join(killed)} did not end in time and had to be killed")
            return EXIT_KILLED
        self._console.say("stopped")
        return 0

    def _report_failure(self, failure: GaveUp) -> int:
        self._console.release(forget=True)
        if failure.status == EXIT_USAGE and self._refusal is not None:
            self._console.complain(f"dynamo serve: error: {self._refusal}")
            return EXIT_USAGE
        if failure.status != EXIT_USAGE:  # then the child's own line says it all
            self._console.complain(
                f"dynamo serve: {failure.name} {exit_words(failure.status)} and cannot be kept running. Its last lines:"
            )
        for line in failure.last_lines:
            self._console.complain(line)
        return failure.status if failure.status > 0 else 128 - failure.status if failure.status else EXIT_KILLED
