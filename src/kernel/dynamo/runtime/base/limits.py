"""What listeners share in refusing: how refusals are counted, what half-sent requests may hold, how many files there are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

Refused = Callable[[str], None]
"""Counts one refusal under the name of the limit that was hit."""


def uncounted(limit: str) -> None:
    """Do nothing: a `Refused` for listeners without a metrics registry."""


class BodyHolder(Protocol):
    """A connection on which requests are still arriving."""

    def shed_body(self) -> None:
        """Decline a request that is still arriving and give its bytes back, because another connection needs the room."""


class PendingBytes:
    """How much the requests that are still arriving may hold, over all connections of a listener and for each of them.

    A connection can use the whole room while it is alone. Once the room is used up, a connection below the average gets
    what it needs from the one that holds most, so no client can exclude others with requests that never end.
    """

    __slots__ = ("_held", "connection_limit", "limit", "used")

    def __init__(self, limit: int, connection_limit: int | None = None) -> None:
        self.limit, self.used = limit, 0
        self.connection_limit = limit if connection_limit is None else connection_limit
        self._held: dict[BodyHolder, int] = {}

    def take(self, holder: BodyHolder, count: int) -> bool:
        """Take `count` bytes if there is room for all; return whether there was. A negative count gives back."""
        held = self._held.get(holder, 0) + count
        if count > 0:
            if held > self.connection_limit:
                return False
            while self.used + count > self.limit:
                if held * (len(self._held) + (holder not in self._held)) > self.limit:
                    return False  # already above the average: this also saves the search below
                largest = max(self._held, key=self._held.__getitem__)
                before = self.used
                largest.shed_body()
                if self.used >= before:
                    return False
        self.used += count
        if held:
            self._held[holder] = held
        else:
            self._held.pop(holder, None)
        return True


def within_descriptors(wanted: int, *, spare: int, share: float = 1.0) -> int:
    """Return `wanted` connections, or as many as fit into this process's share of descriptors; `spare` are kept for
    the rest.
    """
    try:
        import resource
    except ImportError:  # not on this system
        return wanted
    descriptors = _raised_limit()
    if descriptors == resource.RLIM_INFINITY:
        return wanted
    room = max(int((descriptors - spare) * share), 16)
    if room < wanted:
        logger.info("at most %d connections at once, as this process may open %d files", room, descriptors)
    return min(wanted, room)


def _raised_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return it.

    The soft limit is 1,024 on many systems, for the sake of programs that use select(); nothing here does.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:  # a system without such a limit of its own, as macOS
        logger.info("the limit of open files stays at %d: %s", soft, error)
        return soft
    return hard
