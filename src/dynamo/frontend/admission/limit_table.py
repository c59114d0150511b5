"""The numbers of all limits in one block of memory, which the processes of a group share.

Each limit has a record: a value, the period that it belongs to, and one column for each process with what that process
holds: requests in flight, or tokens that are reserved. What a process holds is forgotten with it; a value never is.
Where frontends divide their limits (`cluster_limits.py`) a record also has what this frontend was granted of the limit,
the most units that were refused since somebody looked, and what the other frontends have spent.
Between `lock` and `unlock` a caller reads and writes any record, and no other process does meanwhile.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final, Self

from dynamo.errors import InvalidArgument

__all__ = ["UNDIVIDED", "LimitTable"]

logger = logging.getLogger(__name__)

MAX_LIMITS: Final = 65_536  # of all keys, projects and pairs of key and model
SLOTS: Final = 2 * MAX_LIMITS  # twice as many, so that a search ends soon
LOCK_SECONDS: Final = 0.05
"""How long to wait for another process of the group. It holds the lock for microseconds; one that was stopped there must
not stop the others, who then may pass a limit by one request."""

UNDIVIDED: Final = float("inf")
"""What is granted of a limit that no other frontend shares."""

_NAME, _VALUE, _PERIOD, _GRANTED, _REFUSED, _ELSEWHERE, _COLUMNS = range(7)
_LEADER_BYTE: Final = 1  # of the file: its lock is held by the process that divides limits with other frontends


class LimitTable:
    """A table for `members` processes, of which this one is number `member`."""

    def __init__(self, members: int = 1, *, member: int = 0, fd: int = -1) -> None:
        """`fd`: a file of `size_of(members)` bytes that the processes share; -1: this process is alone."""
        self._width, self._fd = _COLUMNS + members, fd
        size = self.size_of(members)
        self._map = mmap.mmap(fd, size)
        self._cells = memoryview(self._map).cast("d")
        self._own = _COLUMNS + member

    @staticmethod
    def size_of(members: int) -> int:
        """Return the bytes of a table; pages that no limit uses take no memory."""
        return SLOTS * (_COLUMNS + members) * 8

    @classmethod
    def create(cls, members: int) -> Self:
        """Create an empty table in a file without a name; `fd` goes to the children."""
        with tempfile.TemporaryFile() as file:
            file.truncate(cls.size_of(members))
            return cls(members, fd=os.dup(file.fileno()))

    @property
    def fd(self) -> int:
        """The file that the processes share; -1: none."""
        return self._fd

    def lock(self) -> bool:
        """Keep the other processes from the table; return what `unlock` is to be given."""
        return self._fd >= 0 and self._lock()

    def unlock(self, is_locked: bool) -> None:
        """Let the other processes in again."""
        if is_locked:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock for a block, where that is not hot."""
        is_locked = self.lock()
        try:
            yield
        finally:
            self.unlock(is_locked)

    def _lock(self) -> bool:
        give_up_at = 0.0
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            except OSError:
                now = time.monotonic()
                give_up_at = give_up_at or now + LOCK_SECONDS
                if now > give_up_at:
                    logger.warning(
                        "another process of the group holds the limits for too long; going on without a lock"
                    )
                    return False
                time.sleep(0)  # the holder may need this processor
            else:
                return True

    def leads(self) -> bool:
        """Try to become the one process of the group that divides limits with other frontends; whether it is this one."""
        if self._fd < 0:
            return True
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LEADER_BYTE)
        except OSError:
            return False
        return True

    def record(self, name: str, *, value: float = 0.0, period: int = 0, granted: float = UNDIVIDED) -> int:
        """Return the place of a limit's record, which is made with these numbers where there is none.

        Raises InvalidArgument when there are too many limits.
        """
        wanted = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1
        packed = struct.unpack("d", struct.pack("Q", _finite(wanted)))[0]
        slot = wanted % SLOTS
        with self.locked():
            for _ in range(SLOTS // 2):
                at = slot * self._width
                found = self._cells[at + _NAME]
                if found == packed:
                    return at
                if found == 0.0:
                    self._cells[at + _NAME] = packed
                    self._cells[at + _VALUE], self._cells[at + _PERIOD] = value, float(period)
                    self._cells[at + _GRANTED] = granted
                    return at
                slot = (slot + 1) % SLOTS
        raise InvalidArgument(f"there are more than {MAX_LIMITS} limits")

    # -- one record, under the lock --------------------------------------------------------------------------------

    def value(self, at: int) -> float:
        return self._cells[at + _VALUE]

    def set_value(self, at: int, value: float) -> None:
        self._cells[at + _VALUE] = value

    def period(self, at: int) -> int:
        return int(self._cells[at + _PERIOD])

    def set_period(self, at: int, period: int) -> None:
        self._cells[at + _PERIOD] = float(period)

    def granted(self, at: int) -> float:
        """Return what this frontend may use of a limit; `UNDIVIDED`: all of it."""
        return self._cells[at + _GRANTED]

    def grant(self, at: int, units: float) -> None:
        self._cells[at + _GRANTED] = units

    def elsewhere(self, at: int) -> float:
        """Return what the other frontends have spent of a budget in its period."""
        return self._cells[at + _ELSEWHERE]

    def set_elsewhere(self, at: int, units: float) -> None:
        self._cells[at + _ELSEWHERE] = units

    def note_refused(self, at: int, units: float) -> None:
        """Keep the number of units that a request was refused for, until `take_refused`."""
        if units > self._cells[at + _REFUSED]:
            self._cells[at + _REFUSED] = units

    def take_refused(self, at: int) -> float:
        """Return the most units that were refused since the last call."""
        units, self._cells[at + _REFUSED] = self._cells[at + _REFUSED], 0.0
        return units

    def held(self, at: int) -> float:
        """Return what all processes hold."""
        if self._width == _COLUMNS + 1:
            return self._cells[at + _COLUMNS]
        return sum(self._cells[at + _COLUMNS : at + self._width])

    def hold(self, at: int, units: float) -> None:
        """Add to what this process holds; a negative number gives back."""
        self._cells[at + self._own] += units

    # -- life --------------------------------------------------------------------------------------------------------

    def clear(self, member: int) -> None:
        """Forget what a process held that has ended."""
        with self.locked():
            for slot in range(SLOTS):
                at = slot * self._width
                if self._cells[at + _NAME] != 0.0:
                    self._cells[at + _COLUMNS + member] = 0.0

    def close(self) -> None:
        """Idempotent."""
        if not self._map.closed:
            self._cells.release()
            self._map.close()
            if self._fd >= 0:
                os.close(self._fd)


def _finite(name: int) -> int:
    """Return the bits of a number that is not NaN, infinite or zero: those do not compare as names have to."""
    return name & ~(1 << 62)  # an exponent that is neither all ones nor, with the lowest bit set, a zero
