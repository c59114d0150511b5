"""How long the event loop is away."""

from __future__ import annotations

import asyncio
import time

__all__ = ["gaps_of_the_loop"]


async def gaps_of_the_loop(stop: asyncio.Event) -> list[float]:
    """Return how long the loop was away each time, beyond a millisecond, until `stop`."""
    found, last = [], time.perf_counter()
    while not stop.is_set():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        found.append(now - last - 0.001)
        last = now
    return found
