"""A file of SQLite that the processes of one machine share: opened with its tables, changed one writer at a time."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dynamo.errors import InvalidArgument

NO_UPGRADES: Final[Mapping[int, str]] = {}
BUSY_SECONDS: Final = 5.0  # to wait for another process that writes


def open_database(
    path: Path,
    what: str,
    version: int,
    statements: Sequence[str],
    *,
    upgrades: Mapping[int, str] = NO_UPGRADES,
    survives_power_loss: bool = False,
) -> sqlite3.Connection:
    """Open the file, or make it; `statements` make its tables, `what` names it in errors.

    `upgrades`: by a version, the statement that makes the next one of it.

    It may be used in any thread, in one at a time. `survives_power_loss`: what was committed is on the disk for good; otherwise
    the file survives the death of its processes, which costs no wait for the disk.

    Raises InvalidArgument when the file cannot be opened, or is of another version.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # what clients sent is for no other user to read
        database = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise InvalidArgument(f"{what} {path} cannot be opened: {error}") from error
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {'FULL' if survives_power_loss else 'NORMAL'}")
        database.execute("BEGIN IMMEDIATE")
        (found,) = database.execute("PRAGMA user_version").fetchone()
        while found in upgrades:
            database.execute(upgrades[found])
            found += 1
        if found not in (0, version):
            raise InvalidArgument(f"{what} {path} is of version {found}; this is version {version}")
        for statement in statements:
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {version}")
        database.execute("COMMIT")
    except sqlite3.Error as error:
        database.close()
        raise InvalidArgument(f"{what} {path} cannot be opened: {error}") from error
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def writing(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Hold the file for one change, against other processes as well."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")
