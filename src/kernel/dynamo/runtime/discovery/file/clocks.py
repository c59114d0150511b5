"""When a file of the file store counts as dead, by clocks that may jump and a process that may be frozen."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Final

CLOCK_JUMP_SECONDS: Final = 1.0  # wall and monotonic clock may drift apart this far between two polls


class LeaseClocks:
    """The wall clock, which files are stamped with, beside the monotonic one, which no one sets back."""

    def __init__(self, ttl_seconds: float, *, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self.ttl_seconds = max(ttl_seconds, 1.0)
        # The native store renews every max(TTL/3, 1 s); for a TTL below 3 s that would let one miss kill the file.
        self.renew_seconds = self.ttl_seconds / 3
        self.wall, self.monotonic = wall, monotonic
        self._compared_at = monotonic()
        self._offset = wall() - self._compared_at
        self._distrust_until = -math.inf

    def start(self) -> None:
        """Begin to count what `unseen_seconds` returns."""
        self._compared_at = self.monotonic()

    def compare(self) -> bool:
        """Return whether all files may appear old because the clock jumped, the machine was suspended or this process
        frozen. Their owners then get time to renew them.
        """
        now = self.monotonic()
        offset = self.wall() - now
        has_jumped = abs(offset - self._offset) > CLOCK_JUMP_SECONDS or now - self._compared_at > self.renew_seconds
        if has_jumped:
            self._distrust_until = now + 2 * self.renew_seconds
        self._offset = offset
        self._compared_at = now
        return has_jumped

    def unseen_seconds(self) -> float:
        """Return how long ago the clocks were last compared: at every poll, so this is how long none has come about."""
        return self.monotonic() - self._compared_at

    def is_dead(self, found: os.stat_result) -> bool:
        """Return whether a file was not renewed within the TTL. A time far in the future is from before the clock
        was set back.
        """
        if self.monotonic() < self._distrust_until:
            return False
        return abs(self.wall() - found.st_mtime) > self.ttl_seconds
