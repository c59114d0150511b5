"""The rows of files and batches in one SQLite file, which the processes of a machine share.

Every method waits for the disk and may be called in any thread: the service does so in threads of its own.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from dynamo.frontend.base.sqlite_file import open_database, writing
from dynamo.frontend.parts.batches.records import BatchRecord, FileRecord
from dynamo.protocol.batches.requests import PageQuery
from dynamo.protocol.batches.status import BatchStatus

T = TypeVar("T")

VERSION: Final = 1  # of the tables; a file of another version is not touched

_TABLES: Final = (
    """CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, purpose TEXT NOT NULL,
    size INTEGER NOT NULL, expires_at INTEGER, record BLOB NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, status TEXT NOT NULL,
    input_file_id TEXT NOT NULL, record BLOB NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS files_by_expiry ON files (expires_at)",
    "CREATE INDEX IF NOT EXISTS files_by_owner ON files (owner, size)",
    "CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status)",
)
_OPEN: Final = tuple(status.value for status in BatchStatus if not status.is_final)
_OPEN_MARKS: Final = ", ".join("?" * len(_OPEN))

_read_file: Final = msgspec.json.Decoder(FileRecord).decode
_read_batch: Final = msgspec.json.Decoder(BatchRecord).decode
_write: Final = msgspec.json.encode


class FilesOf(Struct, frozen=True):
    """What one owner has."""

    count: int
    bytes: int


class BatchIndex:
    """One index, opened at once: a mistake in its path ends the start, not a request."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidArgument when the file cannot be opened, or is not such an index."""
        self._database = open_database(path, "the index of files", VERSION, _TABLES, survives_power_loss=True)
        self._lock = threading.RLock()  # a connection has one transaction at a time

    def close(self) -> None:
        with self._lock:
            self._database.close()

    # -- files -------------------------------------------------------------------------------------------------------

    def add_file(self, record: FileRecord, *, check: Callable[[FilesOf], None] = lambda _before: None) -> None:
        """Add a file. `check` is called with what its owner has before; what it raises leaves the index as it was."""
        with self._lock, writing(self._database) as database:
            check(self.files_of(record.owner))
            _insert_file(database, record)

    def files_of(self, owner: str) -> FilesOf:
        """Return how many files an owner has, and their bytes."""
        found = self._database.execute(
            "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM files WHERE owner = ?", (owner,)
        ).fetchone()
        return FilesOf(*found)

    def file(self, id: str, owner: str, now: float) -> FileRecord | None:
        """Return a file of an owner; None where there is none, or it has expired."""
        row = self._database.execute(
            "SELECT record FROM files WHERE id = ? AND owner = ? AND (expires_at IS NULL OR expires_at > ?)",
            (id, owner, now),
        ).fetchone()
        return None if row is None else _read_file(row[0])

    def list_files(self, owner: str, query: PageQuery, now: float) -> tuple[list[FileRecord], bool] | None:
        """Return one page and whether there is more; None when `query.after` names no file."""
        where, given = "owner = ? AND (expires_at IS NULL OR expires_at > ?)", [owner, now]
        if query.purpose is not None:
            where += " AND purpose = ?"
            given.append(query.purpose)
        return self._page("files", where, given, owner, query, _read_file)

    def delete_file(self, id: str, owner: str, now: float) -> bool | None:
        """Delete a file's row. False: a batch that has not ended reads it. None: there is no such file."""
        with self._lock, writing(self._database) as database:
            if self.file(id, owner, now) is None:
                return None
            if self._is_read(database, id):
                return False
            database.execute("DELETE FROM files WHERE id = ?", (id,))
        return True

    def expired_files(self, now: float, limit: int = 100) -> list[str]:
        """Delete the rows of some files whose time is over, and return their ids. A file that a batch reads stays."""
        with self._lock, writing(self._database) as database:
            rows = database.execute(
                "SELECT id FROM files WHERE expires_at <= ? ORDER BY expires_at LIMIT ?", (now, limit)
            ).fetchall()
            gone = [id for (id,) in rows if not self._is_read(database, id)]
            database.executemany("DELETE FROM files WHERE id = ?", [(id,) for id in gone])
        return gone

    def knows_file(self, id: str) -> bool:
        """Return whether a file with this id has a row, of any owner."""
        return self._database.execute("SELECT 1 FROM files WHERE id = ?", (id,)).fetchone() is not None

    def file_bytes(self) -> dict[str, int]:
        """Return the bytes of the files of each owner."""
        return dict(self._database.execute("SELECT owner, SUM(size) FROM files GROUP BY owner").fetchall())

    # -- batches -----------------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord, now: float, admits: Callable[[int, int], bool]) -> str | None:
        """Add a batch; None when it was added, else why not: "missing" (its input file) or "full".

        `admits`: whether an owner may have one more, by how many that have not ended it has, and all owners have.
        """
        batch = record.batch
        with self._lock, writing(self._database) as database:
            if self.file(batch.input_file_id, record.owner, now) is None:
                return "missing"
            running = self.open_batches_of_owners()
            if not admits(running.get(record.owner, 0), sum(running.values())):
                return "full"
            database.execute(
                "INSERT INTO batches (id, owner, status, input_file_id, record) VALUES (?, ?, ?, ?, ?)",
                (batch.id, record.owner, batch.status, batch.input_file_id, _write(record)),
            )
        return None

    def batch(self, id: str, owner: str | None = None) -> BatchRecord | None:
        """Return a batch; `owner`: only if it is theirs."""
        row = self._database.execute("SELECT record, owner FROM batches WHERE id = ?", (id,)).fetchone()
        return None if row is None or owner not in (None, row[1]) else _read_batch(row[0])

    def list_batches(self, owner: str, query: PageQuery) -> tuple[list[BatchRecord], bool] | None:
        """Return one page, the newest first, and whether there is more; None when `query.after` names no batch."""
        return self._page("batches", "owner = ?", [owner], owner, query, _read_batch)

    def open_batches(self) -> list[BatchRecord]:
        """Return the batches that have not ended, the oldest first."""
        rows = self._database.execute(
            f"SELECT record FROM batches WHERE status IN ({_OPEN_MARKS}) ORDER BY seq", _OPEN
        ).fetchall()
        return [_read_batch(row[0]) for row in rows]

    def open_batches_of_owners(self) -> dict[str, int]:
        """Return how many batches that have not ended each owner has."""
        return dict(
            self._database.execute(
                f"SELECT owner, COUNT(*) FROM batches WHERE status IN ({_OPEN_MARKS}) GROUP BY owner", _OPEN
            ).fetchall()
        )

    def status_counts(self) -> dict[str, int]:
        """Return how many batches are in each state."""
        return dict(self._database.execute("SELECT status, COUNT(*) FROM batches GROUP BY status").fetchall())

    def change_batch(
        self, id: str, change: Callable[[BatchRecord], T], *, files: Sequence[FileRecord] = ()
    ) -> T | None:
        """Read a batch, change it and write it back as one step, with result files beside it; None: there is no such batch.

        `change` sees what other processes wrote. What it raises leaves the index as it was.
        """
        with self._lock, writing(self._database) as database:
            record = self.batch(id)
            if record is None:
                return None
            result = change(record)
            database.execute(
                "UPDATE batches SET status = ?, record = ? WHERE id = ?", (record.batch.status, _write(record), id)
            )
            for each in files:
                if not self.knows_file(each.file.id):
                    _insert_file(database, each)
        return result

    # -- both --------------------------------------------------------------------------------------------------------

    def _page(
        self, table: str, where: str, given: list[object], owner: str, query: PageQuery, read: Callable[[bytes], T]
    ) -> tuple[list[T], bool] | None:
        if query.after is not None:
            row = self._database.execute(
                f"SELECT seq FROM {table} WHERE id = ? AND owner = ?", (query.after, owner)
            ).fetchone()
            if row is None:
                return None
            where += " AND seq < ?" if query.is_descending else " AND seq > ?"
            given = [*given, row[0]]
        order = "DESC" if query.is_descending else "ASC"
        rows = self._database.execute(
            f"SELECT record FROM {table} WHERE {where} ORDER BY seq {order} LIMIT ?", (*given, query.limit + 1)
        ).fetchall()
        return [read(row[0]) for row in rows[: query.limit]], len(rows) > query.limit

    def _is_read(self, database: sqlite3.Connection, file_id: str) -> bool:
        found = database.execute(
            f"SELECT 1 FROM batches WHERE input_file_id = ? AND status IN ({_OPEN_MARKS})", (file_id, *_OPEN)
        ).fetchone()
        return found is not None


def _insert_file(database: sqlite3.Connection, record: FileRecord) -> None:
    file = record.file
    expires_at = file.expires_at if isinstance(file.expires_at, int) else None
    database.execute(
        "INSERT INTO files (id, owner, purpose, size, expires_at, record) VALUES (?, ?, ?, ?, ?, ?)",
        (file.id, record.owner, file.purpose, file.bytes, expires_at, _write(record)),
    )
