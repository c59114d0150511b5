"""What a process has taken of budgets and not written to the file of what keys use, in a file that outlives `kill -9`.

That is what its requests have reserved, and what they have used since the last write. The process that finds such a file of one
that has ended adds it to what the budgets have given: what the requests of a killed process have made is not known, and is at
most what they had reserved. The numbers are written into memory that is mapped, which costs no call of the system.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from dynamo.errors import InvalidArgument

ROWS: Final = 65_536  # of the budgets of a process; pages that no budget uses take no room on the disk
_ROW_BYTES: Final = 640  # a period, a number of units, and a name of up to 128 characters with what stands around it
_NUMBERS: Final = _ROW_BYTES // 8
_NAME_AT: Final = 16
_SUFFIX: Final = "-pledges-"


class Pledge(NamedTuple):
    """What a process that has ended had taken of a budget."""

    name: str
    period: int
    units: int


class Pledges:
    """The numbers of one process, on their rows. The first row is of no budget, and is never read back."""

    def __init__(self, usage_db: Path | None = None) -> None:
        """Open a file beside `usage_db`; None: memory that is gone with the process. Raises InvalidArgument."""
        self._path = None if usage_db is None else usage_db.with_name(f"{usage_db.name}{_SUFFIX}{secrets.token_hex(8)}")
        self._fd = -1
        if self._path is not None:
            try:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                fcntl.flock(self._fd, fcntl.LOCK_EX)  # it ends with the process, however that ends
                os.truncate(self._fd, ROWS * _ROW_BYTES)
            except OSError as error:
                raise InvalidArgument(f"what keys use cannot be kept beside {usage_db}: {error}") from error
        self._map = mmap.mmap(self._fd, ROWS * _ROW_BYTES if self._path is not None else _ROW_BYTES)
        self.cells = memoryview(self._map).cast("d")
        """The period and the units of all rows, each from the place that `row` returns."""
        self._places: dict[str, int] = {}

    def row(self, name: str) -> int:
        """Return the place of a budget's numbers."""
        if self._path is None:
            return 0
        at = self._places.get(name)
        if at is None:
            number = len(self._places) + 1
            if number >= ROWS:
                return 0  # of so many budgets the further ones are as without a file
            at = self._places[name] = number * _NUMBERS
            begin, encoded = number * _ROW_BYTES + _NAME_AT, name.encode()
            self._map[begin : begin + len(encoded)] = encoded
        return at

    def on(self, name: str) -> Callable[[float, float], None]:
        """Return what adds the units that were taken of a budget in a period; a negative number takes back."""
        cells, at = self.cells, self.row(name)

        def add(period: float, units: float) -> None:
            cells[at] = period
            cells[at + 1] += units

        return add

    def wrote(self, name: str, units: int) -> None:
        """Take back what was written to the file of what keys use."""
        self.cells[self.row(name) + 1] -= units

    def close(self) -> None:
        """Remove the file, unless something of it was never written: then the next process reads it. Idempotent."""
        if self._map.closed:
            return
        is_empty = not any(self.cells[at + 1] for at in self._places.values())
        self.cells.release()
        self._map.close()
        if self._path is not None:
            if is_empty:
                with suppress(FileNotFoundError):
                    self._path.unlink()
            os.close(self._fd)


@contextmanager
def left_behind(usage_db: Path) -> Iterator[list[Pledge]]:
    """Read the files of processes that have ended, and remove them after the block. For one process at a time."""
    held: list[tuple[int, Path]] = []
    try:
        found: list[Pledge] = []
        for path in sorted(usage_db.parent.glob(f"{usage_db.name}{_SUFFIX}*")):
            try:
                fd = os.open(path, os.O_RDWR)
            except FileNotFoundError:  # another process has read it
                continue
            held.append((fd, path))
            if _is_ours(fd):
                found += _read(fd)
            else:
                held.pop()
                os.close(fd)
        yield found
        for _, path in held:
            path.unlink()
    finally:
        for fd, _ in held:
            os.close(fd)


def _is_ours(fd: int) -> bool:
    """Lock a file; False where its process runs, or another one has read it meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return os.fstat(fd).st_nlink > 0


def _read(fd: int) -> Iterator[Pledge]:
    size = os.fstat(fd).st_size
    if size < 2 * _ROW_BYTES:
        return  # its process ended before it was complete
    with mmap.mmap(fd, size) as memory, memoryview(memory).cast("d") as cells:
        for number in range(1, size // _ROW_BYTES):
            begin = number * _ROW_BYTES
            name = memory[begin + _NAME_AT : begin + _ROW_BYTES].rstrip(b"\0").decode(errors="replace")
            if not name:
                return
            period, units = cells[number * _NUMBERS], cells[number * _NUMBERS + 1]
            if units > 0:
                yield Pledge(name, int(period), int(units))
