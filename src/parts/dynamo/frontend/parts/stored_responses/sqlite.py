"""Responses in a file of SQLite, which the processes of one machine share and which outlives them.

The database is used in one thread of its own: a call waits for the disk, and the event loop does not.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from dynamo.errors import InvalidArgument
from dynamo.frontend.apis.history import StoredResponse
from dynamo.frontend.base.settings.stored_responses import StoreLimits
from dynamo.frontend.base.shares import largest_owner
from dynamo.frontend.base.sqlite_file import open_database, writing
from dynamo.frontend.parts.stored_responses.base import StoreUnavailable, StoreUsage, stem_of
from dynamo.runtime.base.steady_wall import steady_wall

T = TypeVar("T")

VERSION: Final = 1  # of the table; a file of another version is not touched

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS responses (
    stem TEXT PRIMARY KEY, id TEXT NOT NULL, owner TEXT NOT NULL, previous_id TEXT, used_at REAL NOT NULL,
    size INTEGER NOT NULL, response BLOB NOT NULL, input_items BLOB NOT NULL
) WITHOUT ROWID
"""
_INDEX: Final = "CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used_at, size)"
_PROJECT: Final = "substr(owner, 1, instr(owner, char(10)))"  # with the line feed behind it; as `project_of`
_BY_PROJECT: Final = f"CREATE INDEX IF NOT EXISTS responses_by_project ON responses ({_PROJECT}, used_at, size)"
_OLDEST_OF: Final = f"SELECT stem, size FROM responses WHERE {_PROJECT} = ? ORDER BY used_at"
_FIND: Final = (
    "SELECT id, response, input_items, previous_id, owner FROM responses WHERE stem = ? AND owner = ? AND used_at >= ?"
)


class SqliteResponseStore:
    """One file, opened at once: a mistake in its path ends the start, not a request."""

    def __init__(self, path: Path, limits: StoreLimits, *, now: Callable[[], float] = steady_wall) -> None:
        """Raises InvalidArgument when the file cannot be opened, or is not such a store."""
        self._limits, self._now = limits, now
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dynamo-response-store")
        try:
            self._database = open_database(path, "the store of responses", VERSION, (_TABLE, _INDEX, _BY_PROJECT))
        except InvalidArgument:
            self._thread.shutdown()
            raise

    async def put(self, stored: StoredResponse) -> StoreUsage | None:
        return None if stored.size > self._limits.bytes else await self._run(partial(self._put, stored))

    async def get(self, id: str, owner: str = "") -> StoredResponse | None:
        return await self._run(partial(self._get, id, owner))

    async def delete(self, id: str, owner: str = "") -> bool:
        return await self._run(partial(self._delete, id, owner))

    async def usage(self) -> StoreUsage:
        return await self._run(self._usage)

    async def projects(self) -> Mapping[str, int]:
        found = await self._run(self._projects)
        return {project: size for project, (_, size) in found.items()}

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
            self._thread.shutdown()

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, RuntimeError) as error:  # RuntimeError: the store was closed
            raise StoreUnavailable(f"the store of responses failed: {error}") from error

    # -- in the thread of the store --------------------------------------------------------------------------------------

    def _put(self, stored: StoredResponse) -> StoreUsage:
        row = (stem_of(stored.id), stored.id, stored.owner, stored.previous_id, self._now(), stored.size)
        with writing(self._database) as database:
            database.execute(
                "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, stored.response, stored.input_items),
            )
            return self._sweep(database)

    def _get(self, id: str, owner: str) -> StoredResponse | None:
        with writing(self._database) as database:
            found = self._find(database, id, owner)
            if found is not None:
                database.execute("UPDATE responses SET used_at = ? WHERE stem = ?", (self._now(), stem_of(id)))
        return found

    def _delete(self, id: str, owner: str) -> bool:
        with writing(self._database) as database:
            found = self._find(database, id, owner)
            if found is None or found.id != id:
                return False
            database.execute("DELETE FROM responses WHERE stem = ?", (stem_of(id),))
        return True

    def _usage(self) -> StoreUsage:
        with writing(self._database) as database:
            return self._sweep(database)

    def _find(self, database: sqlite3.Connection, id: str, owner: str) -> StoredResponse | None:
        oldest = self._now() - self._limits.ttl_seconds
        row = database.execute(_FIND, (stem_of(id), owner, oldest)).fetchone()
        if row is None or (id.startswith("resp_") and row[0] != id):
            return None
        return StoredResponse(*row)

    def _sweep(self, database: sqlite3.Connection) -> StoreUsage:
        """Forget what is too old, and what is too much; return what is left."""
        database.execute("DELETE FROM responses WHERE used_at < ?", (self._now() - self._limits.ttl_seconds,))
        projects, limits = self._projects(), self._limits
        entries, size = (sum(column) for column in zip((0, 0), *projects.values(), strict=True))
        oldest_first: dict[str, sqlite3.Cursor] = {}
        gone: list[tuple[object]] = []
        while entries > limits.entries or size > limits.bytes:
            column = 1 if size > limits.bytes else 0
            most = largest_owner({project: has[column] for project, has in projects.items()})
            if most not in oldest_first:
                oldest_first[most] = database.execute(_OLDEST_OF, (most + "\n" if most else "",))
            stem, taken = oldest_first[most].fetchone()
            gone.append((stem,))
            entries, size = entries - 1, size - taken
            projects[most] = projects[most][0] - 1, projects[most][1] - taken
        for cursor in oldest_first.values():
            cursor.close()
        database.executemany("DELETE FROM responses WHERE stem = ?", gone)
        return StoreUsage(entries, size)

    def _projects(self) -> dict[str, tuple[int, int]]:
        """Return how many responses each project has, and their bytes."""
        rows = self._database.execute(f"SELECT {_PROJECT}, COUNT(*), SUM(size) FROM responses GROUP BY {_PROJECT}")
        return {project.removesuffix("\n"): (entries, size) for project, entries, size in rows}
