"""How much this process computes while its event loop is away."""

from __future__ import annotations

import asyncio
import time

__all__ = ["gaps_of_the_loop"]


async def gaps_of_the_loop(stop: asyncio.Event) -> list[float]:
    """Return the CPU seconds of this process, all its threads, between two turns of the loop, each time until `stop`.

    A callback that computes for a second makes a gap of a second, and so does a thread that holds the interpreter's lock
    for one; what other programs on the machine take is in no gap.
    """
    found, last = [], time.process_time()
    while not stop.is_set():
        await asyncio.sleep(0.001)
        now = time.process_time()
        found.append(now - last)
        last = now
    return found
