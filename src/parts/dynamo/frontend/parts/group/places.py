"""Counters in memory that the processes of a group share: one row for each process, written only by that process.

A row is a handful of aligned 64-bit numbers, so that a reader sees an old or a new value and never half of one. There is no
lock: a sum over the rows may miss what another process does in this very microsecond, so a limit over the group may be
passed by as many as there are other processes, for a moment.
"""

from __future__ import annotations

import enum
import mmap
import os
import tempfile
from typing import Final, Self

from dynamo.errors import Overloaded
from dynamo.frontend.admission.process import OPEN, Admission, NotReady
from dynamo.frontend.parts.keys.limit_table import LimitTable

ROW: Final = 8  # numbers in a row: one cache line, so that two writers never share one


class Field(enum.IntEnum):
    """What a row holds."""

    IN_FLIGHT = 0  # requests
    OPEN = 1  # connections


class Places:
    """The table. `fd` goes to the children, which `attach` it."""

    def __init__(self, fd: int, rows: int) -> None:
        self.fd, self.rows = fd, rows
        self._map = mmap.mmap(fd, rows * ROW * 8)
        self._numbers = memoryview(self._map).cast("Q")
        self.limits: LimitTable | None = None
        """What the processes share of the limits of keys; None where no route needs a key."""

    @classmethod
    def create(cls, rows: int, *, with_limits: bool = False) -> Self:
        """Create a table of zeros in a file without a name."""
        with tempfile.TemporaryFile() as file:
            file.truncate(rows * ROW * 8)
            made = cls(os.dup(file.fileno()), rows)
        made.limits = LimitTable.create(rows) if with_limits else None
        return made

    def get(self, row: int, field: Field) -> int:
        return self._numbers[row * ROW + field]

    def set(self, row: int, field: Field, value: int) -> None:
        self._numbers[row * ROW + field] = value

    def total(self, field: Field) -> int:
        """Sum a field over all processes."""
        return sum(self._numbers[field::ROW])

    def clear(self, row: int) -> None:
        """Clear the row of a process that has ended."""
        for field in Field:
            self.set(row, field, 0)
        if self.limits is not None:
            self.limits.clear(row)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            self._numbers.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1
            if self.limits is not None:
                self.limits.close()


class SharedAdmission(Admission):
    """The limit is that of the whole group; draining and waiting are this process's own."""

    def __init__(self, limit: int, places: Places, row: int) -> None:
        super().__init__(limit)
        self._places, self._row, self.processes = places, row, places.rows

    def free(self) -> int:
        return self.limit - self._places.total(Field.IN_FLIGHT)

    def enter(self) -> None:
        if self.stage not in OPEN:
            raise NotReady
        if self._places.total(Field.IN_FLIGHT) >= self.limit:
            raise Overloaded
        self.in_flight += 1
        self._places.set(self._row, Field.IN_FLIGHT, self.in_flight)

    def leave(self) -> None:
        super().leave()
        self._places.set(self._row, Field.IN_FLIGHT, self.in_flight)
