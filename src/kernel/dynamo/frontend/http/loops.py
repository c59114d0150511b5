"""Which event loop a frontend process runs on, and when its memory is collected."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final

COLLECTIONS: Final = (8_000, 2, 100)
"""When the collector searches for circles: after so many new containers; every fourth time also those that outlived the last
three; and all of them after so many of the latter. A request leaves no circle (the soak holds that), so Python's 700 only
cost time, 6 % of a one-token request. A search holds up every stream, and takes as long as there are containers in it: with
20,000 and every twelfth time, the middle one went through 240,000 as workers joined, 126 ms on a slow machine; these are 32,000.
"""


def spare_the_collector() -> None:
    """Freeze all present objects, so that the garbage collector skips them. Call it once, after all imports, in a
    process that is only a frontend.
    """
    gc.collect()
    gc.freeze()  # what the imports made stays for good
    gc.set_threshold(*COLLECTIONS)


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's loop factory, where uvloop is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # Windows, or left out on purpose: the plain loop serves as well, only slower
        return asyncio.new_event_loop
    return new_event_loop
