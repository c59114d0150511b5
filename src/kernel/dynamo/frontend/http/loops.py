"""Which event loop a frontend process runs on, and when its memory is collected."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final

COLLECT_AFTER: Final = 20_000
"""Containers that may come into being before the collector searches them for circles. A request leaves none (the soak
holds that), so Python's default of 700 only costs time: 6 % of a one-token request."""


def spare_the_collector() -> None:
    """Freeze all present objects, so that the garbage collector skips them. Call it once, after all imports, in a
    process that is only a frontend.
    """
    gc.collect()
    gc.freeze()  # what the imports made stays for good
    gc.set_threshold(COLLECT_AFTER, 10, 10)


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's loop factory, where uvloop is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # Windows, or left out on purpose: the plain loop serves as well, only slower
        return asyncio.new_event_loop
    return new_event_loop
