"""When a timer of an event loop is due, on every kind of loop."""

from __future__ import annotations

import asyncio
import math


def due_of(timer: asyncio.Handle) -> float:
    """Return when a timer fires, by the loop's clock; minus infinity for one that fires at once.

    `call_at` of uvloop gives a handle without a time where the time has come already.
    """
    return timer.when() if hasattr(timer, "when") else -math.inf
