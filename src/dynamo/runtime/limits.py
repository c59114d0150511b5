"""What listeners share in refusing: how refusals are counted, what half-sent requests may hold, how many files there are."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["PendingBytes", "Refused", "uncounted", "within_descriptors"]

logger = logging.getLogger(__name__)

Refused = Callable[[str], None]
"""Counts one refusal under the name of the limit that was hit."""


def uncounted(limit: str) -> None:
    """A `Refused` for listeners without a metrics registry."""


class PendingBytes:
    """How much the requests that are still arriving may hold together, over all connections of a listener."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def take(self, count: int) -> bool:
        """Whether there was room; nothing is taken otherwise. A negative count gives back."""
        if count > 0 and self.used + count > self.limit:
            return False
        self.used += count
        return True


def within_descriptors(wanted: int, *, spare: int, share: float = 1.0) -> int:
    """`wanted` connections, or as many as fit into this process's share of descriptors; `spare` are kept for the rest."""
    try:
        import resource
    except ImportError:  # not on this system
        return wanted
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return wanted
    room = max(int((descriptors - spare) * share), 16)
    if room < wanted:
        logger.info("at most %d connections at once, as this process may open %d files", room, descriptors)
    return min(wanted, room)
