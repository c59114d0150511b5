"""Which event loop a frontend process runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["event_loop_factory"]


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's, where it is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # Windows, or left out on purpose: the plain loop serves as well, only slower
        return asyncio.new_event_loop
    return new_event_loop
