"""What was reported to the watchers of one bucket, and which part may be missing only because the store was.

A store that was frozen, restarted or wiped comes back without the records of workers that are alive and well: their
leases ran out while no process could renew them. For one lease period after such a loss nothing that is missing counts as
gone; a process that lives has put its records again by then.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping

from dynamo.runtime.discovery.base import Change, Delete, Put, matches


class LastView:
    """Takes the changes of the store and returns the changes to report to its watchers. No I/O.

    `now` is any monotonic clock, in seconds.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._missing: set[str] = set()  # of `_values`: not in the store, and not yet reported as gone
        self._keep_until = -math.inf

    def read(self, prefix: str) -> dict[str, bytes]:
        """Return what counts as there, sorted by key."""
        start = prefix.rstrip("/")
        found = [key for key in self._values if key.startswith(start) and matches(prefix, key)]
        return {key: self._values[key] for key in sorted(found)}

    def doubt(self, until: float) -> None:
        """Record the loss of the store: before `until` no missing key counts as gone."""
        self._keep_until = max(self._keep_until, until)

    @property
    def settles_at(self) -> float | None:
        """When to call `settle`; None while nothing is missing."""
        return self._keep_until if self._missing else None

    def resync(self, found: Mapping[str, bytes], now: float) -> list[Change]:
        """Take over a reading of the whole store; return the changes."""
        changes = self.apply((Delete(key) for key in list(self._values) if key not in found), now)
        return changes + self.apply((Put(key, value) for key, value in found.items()), now)

    def apply(self, changes: Iterable[Change], now: float) -> list[Change]:
        """Take over changes of the store; return those that are new to its watchers."""
        news: list[Change] = []
        for change in changes:
            key = change.key
            if isinstance(change, Put):
                self._missing.discard(key)
                if self._values.get(key) != change.value:
                    self._values[key] = change.value
                    news.append(change)
            elif key in self._values:
                if now < self._keep_until:
                    self._missing.add(key)
                else:
                    self._missing.discard(key)
                    del self._values[key]
                    news.append(change)
        return news

    def settle(self, now: float) -> list[Change]:
        """Report what was missing for too long."""
        if now < self._keep_until:
            return []
        gone = sorted(self._missing)
        self._missing.clear()
        for key in gone:
            del self._values[key]
        return [Delete(key) for key in gone]


class SettlingView(LastView):
    """A view whose owner is called when what is missing counts as gone. `now` is the time of the loop that it is used on."""

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__()
        self._settle = settle
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def arm(self) -> None:
        """Set the timer for what is missing now. Call it after every change."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self.settles_at) is not None and not self._is_stopped:
            self._timer = asyncio.get_running_loop().call_at(at, self._settle)

    def stop(self) -> None:
        """Set no timer any more."""
        self._is_stopped = True
        self.arm()
