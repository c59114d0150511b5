"""What reading a text costs, in CPU time: twice for a text twice as long, whatever stands in it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final

from dynamo.text.formats import TextMachine

TRIES: Final = 4
TIMES: Final = 8  # as long is the longer text
FACTOR: Final = 14.0  # of the time for it: 8 where time is linear, 64 where it is quadratic
FAST: Final = 0.4e-6  # seconds per character; below, the clock is too coarse, and a quadratic part too small to matter


def cost(make: Callable[[], TextMachine], text: str, piece: int) -> float:
    """Return the CPU seconds of reading a text in pieces of this many characters; 0: whole."""
    machine = make()
    size = piece or len(text)
    began = time.process_time()
    for at in range(0, len(text), size):
        machine.push(text[at : at + size])
    machine.finish()
    return time.process_time() - began


def growth(make: Callable[[], TextMachine], begin: str, unit: str, size: int, piece: int = 0) -> float:
    """Return how much more a text `TIMES` as long costs; 0 where both cost next to nothing.

    Other processes only make a measurement longer, so the least of a few counts.
    """
    short, long = begin + unit * (size // len(unit)), begin + unit * (TIMES * size // len(unit))
    least_short = least_long = float("inf")
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(TRIES):
            least_long = min(least_long, cost(make, long, piece))
            if least_long < FAST * len(long):
                return 0
            least_short = min(least_short, cost(make, short, piece))
            if least_long <= FACTOR * least_short:
                break
    finally:
        if was_enabled:
            gc.enable()
    return least_long / least_short
