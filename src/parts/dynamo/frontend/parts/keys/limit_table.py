"""The numbers of all limits in one block of memory, which the processes of a group share.

Each limit has a record: a value, the period that it belongs to, and two columns for each process: what that process
holds (requests in flight, or tokens that are reserved), and whether it uses the record at all. Both are forgotten with the
process, but for what it had reserved of a budget: that counts as used, as its requests may have made all of it. A record that no process uses stays, with its value, until the table is nearly full and its place is needed.
Where frontends divide their limits (`cluster_limits.py`) a record also has what this frontend was granted of the limit,
the most units that were refused since the last division, what the other frontends have spent, and what they know of this one:
all of it is in the table, as another process of the group may go on with it at any moment.
Between `lock` and `unlock` a caller reads and writes any record, and no other process does meanwhile.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final, NamedTuple, Self

from dynamo.errors import InvalidArgument
from dynamo.frontend.parts.keys.shared_lock import LOCK_BYTES, SharedLock, create_lock, open_lock

MAX_LIMITS: Final = 65_536  # in use at once, of all keys, projects and pairs of key and model
SLOTS: Final = 2 * MAX_LIMITS  # twice as many, so that a search ends soon
LONG_SEARCH: Final = 64  # steps: a table that is not nearly full has hardly a search as long
RECLAIM_AFTER: Final = 1024  # records that are made between two attempts to free places
UNDIVIDED: Final = float("inf")
"""What is granted of a limit that no other frontend shares."""

_NAME, VALUE, PERIOD, GRANTED, REFUSED, ELSEWHERE, _BASE, _REPORTED, _IS_BUDGET, _COLUMNS = range(10)
"""Where a record has what in `LimitTable.cells`, for code that reads and writes it for each request."""
NOT_REPORTED: Final = -1.0
_FREED: Final = 1.0  # in place of a name; no name has this value, as the lowest bit of each is set
_LEADER_BYTE: Final = 1  # of the file: its lock is held by the process that divides limits with other frontends


class Spent(NamedTuple):
    """What a budget has given in a period."""

    period: int
    units: int


class LimitTable:
    """A table for `members` processes, of which this one is number `member`."""

    def __init__(self, members: int = 1, *, member: int = 0, fd: int = -1) -> None:
        """`fd`: a file that `create` has made, for the processes that share it; -1: this process is alone."""
        self._width, self._members, self._fd = _COLUMNS + 2 * members, members, fd
        self._map = mmap.mmap(fd, self.size_of(members))
        self._own = _COLUMNS + member
        self._made = RECLAIM_AFTER  # records since the last attempt to free places
        lock_at = self.size_of(members) - LOCK_BYTES
        self.cells = memoryview(self._map)[:lock_at].cast("d")
        """The numbers of all records, each from the place that `record` returns."""
        self._lock: SharedLock | None = None if fd < 0 else open_lock(self._map, lock_at, fd)
        self.lock: Callable[[], bool] = _needs_no_lock if self._lock is None else self._lock.acquire
        """Keeps the other processes from the table; returns what `unlock` is to be given."""

    @staticmethod
    def size_of(members: int) -> int:
        """Return the bytes of a table; pages that no limit uses take no memory."""
        return SLOTS * (_COLUMNS + 2 * members) * 8 + LOCK_BYTES

    @classmethod
    def create(cls, members: int) -> Self:
        """Create an empty table in a file without a name; `fd` goes to the children."""
        size = cls.size_of(members)
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            with mmap.mmap(file.fileno(), size) as memory:
                create_lock(memory, size - LOCK_BYTES, file.fileno()).close()
            return cls(members, fd=os.dup(file.fileno()))

    @property
    def fd(self) -> int:
        """The file that the processes share; -1: none."""
        return self._fd

    def unlock(self, is_locked: bool) -> None:
        """Let the other processes in again."""
        if is_locked and self._lock is not None:
            self._lock.release()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock for a block, where that is not hot."""
        is_locked = self.lock()
        try:
            yield
        finally:
            self.unlock(is_locked)

    def leads(self) -> bool:
        """Try to become the one process of the group that divides limits with other frontends; whether it is this one."""
        if self._fd < 0:
            return True
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LEADER_BYTE)
        except OSError:
            return False
        return True

    def record(self, name: str, *, value: float = 0.0, granted: float = UNDIVIDED, budget: Spent | None = None) -> int:
        """Return the place of a limit's record, which is made with these numbers where there is none.

        `budget`: what it has given, where the limit is a budget. This process uses it from now on, until `release`. Raises InvalidArgument when too many limits are in use.
        """
        wanted = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1
        packed = struct.unpack("d", struct.pack("Q", _finite(wanted)))[0]
        with self.locked():
            at, is_there = self._find(packed, wanted % SLOTS)
            if at < 0:  # no place is free or was freed before
                self._reclaim()
                at, is_there = self._find(packed, wanted % SLOTS)
            if at < 0:
                raise InvalidArgument(f"more than {SLOTS} limits are in use")
            cells = self.cells
            if not is_there:
                self._made += 1
                for cell in range(at, at + self._width):
                    cells[cell] = 0.0
                cells[at + _NAME] = packed
                cells[at + VALUE] = value
                if budget is not None:
                    cells[at + VALUE], cells[at + PERIOD], cells[at + _IS_BUDGET] = budget.units, budget.period, 1.0
                cells[at + GRANTED], cells[at + _REPORTED] = granted, NOT_REPORTED
            cells[at + self._own + self._members] = 1.0  # it is in use here
        return at

    def release(self, at: int) -> None:
        """Give up the use of a record by this process. Needs no lock: no other process writes this column."""
        self.cells[at + self._own + self._members] = 0.0

    def _find(self, packed: float, slot: int) -> tuple[int, bool]:
        """Return the place of a name and whether it is there, else where it can be made; -1: nowhere."""
        free = -1
        for step in range(SLOTS):
            if step == LONG_SEARCH and free < 0 and self._made >= RECLAIM_AFTER:
                self._reclaim()
                return self._find(packed, (slot - step) % SLOTS)
            at = slot * self._width
            found = self.cells[at + _NAME]
            if found == packed:
                return at, True
            if found == 0.0:
                return (at if free < 0 else free), False
            if found == _FREED and free < 0:
                free = at
            slot = (slot + 1) % SLOTS
        return free, False

    def _reclaim(self) -> None:
        """Free the records that no process uses. Some 50 ms, once for thousands of new keys."""
        self._made = 0
        width, cells = self._width, self.cells
        names: list[float] = list(cells[_NAME::width])
        columns = [list(cells[_COLUMNS + column :: width]) for column in range(2 * self._members)]
        for slot, used in enumerate(map(any, zip(*columns, strict=True))):
            if not used and names[slot] != 0.0:
                names[slot] = cells[slot * width + _NAME] = _FREED
        # A freed place before an empty one ends a search as well as an empty one.
        for slot in range(2 * SLOTS - 1, -1, -1):  # twice around: the last places go on at the first ones
            if names[slot % SLOTS] == _FREED and names[(slot + 1) % SLOTS] == 0.0:
                names[slot % SLOTS] = cells[slot % SLOTS * width + _NAME] = 0.0

    # -- one record, under the lock --------------------------------------------------------------------------------

    def value(self, at: int) -> float:
        return self.cells[at + VALUE]

    def set_value(self, at: int, value: float) -> None:
        self.cells[at + VALUE] = value

    def period(self, at: int) -> int:
        return int(self.cells[at + PERIOD])

    def set_period(self, at: int, period: int) -> None:
        self.cells[at + PERIOD] = float(period)

    def granted(self, at: int) -> float:
        """Return what this frontend may use of a limit; `UNDIVIDED`: all of it."""
        return self.cells[at + GRANTED]

    def grant(self, at: int, units: float) -> None:
        self.cells[at + GRANTED] = units

    def elsewhere(self, at: int) -> float:
        """Return what the other frontends have spent of a budget in its period."""
        return self.cells[at + ELSEWHERE]

    def set_elsewhere(self, at: int, units: float) -> None:
        self.cells[at + ELSEWHERE] = units

    def base(self, at: int) -> float:
        """Return the value of a budget from which on this frontend reports to the others what it spends."""
        return self.cells[at + _BASE]

    def set_base(self, at: int, value: float) -> None:
        self.cells[at + _BASE] = value

    def reported(self, at: int) -> float:
        """Return the value that the other frontends know; `NOT_REPORTED`: they know none."""
        return self.cells[at + _REPORTED]

    def set_reported(self, at: int, value: float) -> None:
        self.cells[at + _REPORTED] = value

    def note_refused(self, at: int, units: float) -> None:
        """Keep the number of units that a request was refused for, until `take_refused`."""
        if units > self.cells[at + REFUSED]:
            self.cells[at + REFUSED] = units

    def take_refused(self, at: int) -> float:
        """Return the most units that were refused since the last call."""
        units, self.cells[at + REFUSED] = self.cells[at + REFUSED], 0.0
        return units

    def held(self, at: int) -> float:
        """Return what all processes hold."""
        if self._members == 1:
            return self.cells[at + _COLUMNS]
        return sum(self.cells[at + _COLUMNS : at + _COLUMNS + self._members])

    def hold(self, at: int, units: float) -> None:
        """Add to what this process holds; a negative number gives back."""
        self.cells[at + self._own] += units

    # -- life --------------------------------------------------------------------------------------------------------

    def clear(self, member: int) -> None:
        """Forget what a process held and used that has ended, and count as used what it had reserved of budgets."""
        cells = self.cells
        for at in range(0, SLOTS * self._width, self._width):
            if cells[at + _NAME] != 0.0:
                held = at + _COLUMNS + member
                if cells[at + _IS_BUDGET] and cells[held]:
                    with self.locked():
                        cells[at + VALUE] += cells[held]
                        cells[held] = 0.0
                cells[held] = cells[held + self._members] = 0.0  # no other process writes these columns

    def close(self) -> None:
        """Idempotent."""
        if not self._map.closed:
            self.cells.release()
            if self._lock is not None:
                self._lock.close()
            self._map.close()
            if self._fd >= 0:
                os.close(self._fd)


def _needs_no_lock() -> bool:
    return False


def _finite(name: int) -> int:
    """Return the bits of a number that is not NaN, infinite or zero: those do not compare as names have to."""
    return name & ~(1 << 62)  # an exponent that is neither all ones nor, with the lowest bit set, a zero
