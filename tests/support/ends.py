"""How long an idle worker takes to end, on a machine that others use as well."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from support.leftovers import Belongings
from support.patience import PATIENCE_SECONDS
from support.processes import POLL_SECONDS, Worker

__all__ = ["END_SECONDS", "end_idle"]

END_SECONDS: Final = 3.0
"""From SIGTERM to the end of an idle worker. The teardown of an interpreter with torch in it alone would take 9."""


def end_idle(worker: Worker, temporary: Path) -> None:
    """Send SIGTERM to an idle worker: it ends well and within `END_SECONDS`, and nothing of it is left.

    The time is that of a machine of its own: what its threads waited for a processor is taken out, as far as they ran.
    """
    belongings = Belongings(worker, temporary)
    numbers = [worker.pid, *belongings.processes]
    before, seen, began = _times(numbers), _times(numbers), time.monotonic()
    worker.terminate()
    while not worker.has_ended and time.monotonic() < began + PATIENCE_SECONDS:
        seen |= _times(numbers)
        time.sleep(POLL_SECONDS)
    seconds = time.monotonic() - began
    assert worker.exit_code() == 0, worker.log[-4000:]
    ran, waited = (
        sum(after[at] - before.get(thread, (0, 0))[at] for thread, after in seen.items()) / 1e9 for at in (0, 1)
    )
    alone = seconds * (ran + 1e-3) / (ran + waited + 1e-3)
    print(
        f"{worker.name} ended {seconds:.2f} s after SIGTERM; it ran {ran:.2f} s and waited {waited:.2f} s for its turn"
    )
    assert alone < END_SECONDS, f"{seconds:.2f} s, of which it ran {ran:.2f} and waited {waited:.2f} for its turn"
    belongings.wait_gone()


def _times(numbers: list[int]) -> dict[str, tuple[int, int]]:
    """Return what each thread has run, and waited for a processor, in nanoseconds."""
    found = {}
    for number in numbers:
        for thread in Path(f"/proc/{number}/task").glob("*/schedstat"):
            try:
                ran, waited, _ = map(int, thread.read_text().split())
            except (OSError, ValueError):
                continue  # it has ended
            found[str(thread)] = ran, waited
    return found
