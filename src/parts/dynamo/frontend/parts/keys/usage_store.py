"""What keys have used, in a file of SQLite: a row for each minute, key, project, model and endpoint, and the sums of budgets.

The file is used in one thread of its own. Several processes of a machine may write to it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import Struct

from dynamo.errors import InvalidArgument
from dynamo.frontend.base.sqlite_file import open_database, writing
from dynamo.frontend.parts.keys.quotas import Spent

T = TypeVar("T")

VERSION: Final = 2  # of the tables; a file of another version is not touched
MAX_ROWS: Final = 10_000  # of an answer

GROUPS: Final = ("key", "project", "model", "endpoint", "minute", "hour", "day")
COUNTS: Final = ("requests", "errors", "input", "cached", "output", "reasoning", "images", "seconds")

UsageKey = tuple[int, str, str, str, str]
"""Minute (since the epoch), key, project, model, endpoint."""

_TABLES: Final = (
    """
    CREATE TABLE IF NOT EXISTS usage (
        minute INTEGER NOT NULL, key TEXT NOT NULL, project TEXT NOT NULL, model TEXT NOT NULL, endpoint TEXT NOT NULL,
        requests INTEGER NOT NULL, errors INTEGER NOT NULL, input INTEGER NOT NULL, cached INTEGER NOT NULL,
        output INTEGER NOT NULL, reasoning INTEGER NOT NULL, images INTEGER NOT NULL DEFAULT 0, seconds REAL NOT NULL,
        PRIMARY KEY (minute, key, project, model, endpoint)
    ) WITHOUT ROWID
    """,
    "CREATE TABLE IF NOT EXISTS spent (name TEXT PRIMARY KEY, period INTEGER NOT NULL, units INTEGER NOT NULL) WITHOUT ROWID",
)
_UPGRADES: Final = {1: "ALTER TABLE usage ADD COLUMN images INTEGER NOT NULL DEFAULT 0"}
_COLUMNS: Final = ("minute", "key", "project", "model", "endpoint", *COUNTS)
_ADD: Final = (
    f"INSERT INTO usage ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) ON CONFLICT DO UPDATE SET "
    + ", ".join([f"{name} = {name} + excluded.{name}" for name in COUNTS])
)
_SPEND: Final = """
INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET
    units = CASE WHEN excluded.period > period THEN excluded.units
                 WHEN excluded.period = period THEN units + excluded.units ELSE units END,
    period = MAX(period, excluded.period)
"""
_GROUP: Final = {"hour": "minute - minute % 60", "day": "minute - minute % 1440"}  # of minutes


class UsageUnavailable(Exception):
    """The file cannot be read or written now; its text has the reason."""


class UsageQuery(Struct, frozen=True):
    """Which rows are added up, and by what. Times are minutes since the epoch."""

    groups: tuple[str, ...] = ("key",)
    since: int = 0
    until: int = 2**62


class UsageStore:
    """One file, opened at once: a mistake in its path ends the start, not a request."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidArgument when the file cannot be opened, or is not such a store."""
        self._database = open_database(path, "the usage of keys", VERSION, _TABLES, upgrades=_UPGRADES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dynamo-usage")

    def spent(self) -> dict[str, Spent]:
        """Return what each budget has given. Blocks; for the start."""
        rows = self._database.execute("SELECT name, period, units FROM spent").fetchall()
        return {name: Spent(period, units) for name, period, units in rows}

    async def add(
        self, rows: Mapping[UsageKey, Sequence[float]], spent: Mapping[tuple[str, int], int], *, oldest: int
    ) -> None:
        """Add what was used to what is kept, all of it or nothing, and forget minutes before `oldest`.

        `spent`: units by the name and period of a budget. Raises UsageUnavailable.
        """
        await self._run(partial(self._add, rows, spent, oldest))

    async def rows(self, query: UsageQuery) -> list[dict[str, Any]]:
        """Return the sums of each group, the largest number of tokens first. Raises UsageUnavailable."""
        return await self._run(partial(usage_rows, self._database, query))

    async def aclose(self) -> None:
        """Close the file; idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)
        self._database.close()

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, RuntimeError) as error:  # RuntimeError: the store was closed
            raise UsageUnavailable(f"the usage of keys: {error}") from error

    def _add(self, rows: Mapping[UsageKey, Sequence[float]], spent: Mapping[tuple[str, int], int], oldest: int) -> None:
        with writing(self._database) as database:
            database.executemany(_ADD, [(*key, *counts) for key, counts in rows.items()])
            database.executemany(_SPEND, [(*budget, units) for budget, units in spent.items()])
            database.execute("DELETE FROM usage WHERE minute < ?", (oldest,))


def usage_rows(database: sqlite3.Connection, query: UsageQuery) -> list[dict[str, Any]]:
    """Return the sums of each group. Raises InvalidArgument for a group that there is none of."""
    for group in query.groups:
        if group not in GROUPS:
            raise InvalidArgument(f"usage is grouped by {', '.join(GROUPS)}, not by {group!r}")
    groups = [_GROUP.get(group, group) for group in query.groups]
    sums = ", ".join([f"SUM({name})" for name in COUNTS])
    by = ", ".join(map(str, range(1, len(groups) + 1)))
    found = database.execute(
        f"SELECT {', '.join([*groups, sums])} FROM usage WHERE minute >= ? AND minute < ? "
        f"GROUP BY {by} ORDER BY SUM(input) + SUM(output) DESC, {by} LIMIT {MAX_ROWS}",
        (query.since, query.until),
    )
    names = (*query.groups, *COUNTS)
    return [
        {
            name: value * 60 if name in ("minute", "hour", "day") else value
            for name, value in zip(names, row, strict=True)
        }
        for row in found
    ]
