"""What keys have used, in a file of SQLite: a row for each minute, key, project, model and endpoint, and the sums of budgets.

The file is used in one thread of its own. Several processes of a machine may write to it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from msgspec import Struct

from dynamo.errors import InvalidArgument
from dynamo.frontend.base.sqlite_file import open_database, writing
from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.metrics import KeyMetrics
from dynamo.frontend.parts.keys.pledges import Pledges, left_behind
from dynamo.frontend.parts.keys.quotas import Charge, Quotas, Spent, TokenUse
from dynamo.runtime.base.tasks import Background

logger = logging.getLogger(__name__)

WRITE_SECONDS: Final = 1.0  # a crash loses so much
MAX_UNWRITTEN: Final = 100_000  # rows that wait for a file that cannot be written
MINUTES_OF_A_DAY: Final = 1440

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


@dataclass(slots=True)
class _Counted:
    """What was counted and is not written yet."""

    rows: dict[UsageKey, list[float]] = field(default_factory=dict)
    spent: dict[tuple[str, int], int] = field(default_factory=dict)


class UsageMeter:
    """Counts every request that came with a key. Used on the event loop."""

    def __init__(
        self,
        quotas: Quotas,
        metrics: KeyMetrics,
        store: UsageStore | None,
        *,
        keep_days: int,
        identities: Callable[[], Iterable[Identity]],
    ) -> None:
        """`store`: None keeps nothing beyond the metrics. `identities` returns the keys in service."""
        self._quotas, self._metrics, self._store = quotas, metrics, store
        self._keep_days, self._identities = keep_days, identities
        self._counted = _Counted()
        self._work, self._writes = Background(), Background()
        self._is_failing = False
        quotas.on_closed = self.count
        quotas.on_refused = lambda identity, limit: metrics.refused(identity.id, limit)
        if store is not None:
            quotas.on_spent = self._note_spent

    def count(self, charge: Charge, use: TokenUse, seconds: float) -> None:
        """Count a request that is over."""
        record = charge.identity.record
        self._metrics.count(record.id, charge.model, use, is_success=charge.has_succeeded)
        if self._store is None:
            return
        minute = int(self._quotas.wall_clock() // 60)
        key = (minute, record.id, record.project or "", charge.model, charge.endpoint)
        rows = self._counted.rows
        row = rows.get(key)
        if row is None:
            if len(rows) >= MAX_UNWRITTEN:
                return  # the file could not be written for long, which is in the log
            row = rows[key] = [0, 0, 0, 0, 0, 0, 0, 0.0]
        row[0] += 1
        row[1] += not charge.has_succeeded
        row[2] += use.input
        row[3] += use.cached
        row[4] += use.output
        row[5] += use.reasoning
        row[6] += use.images
        row[7] += seconds

    def _note_spent(self, name: str, period: int, units: int) -> None:
        budget = name, period
        spent = self._counted.spent
        spent[budget] = spent.get(budget, 0) + units

    # -- writing -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Write once a second from now on."""
        self._work.keep(self._follow, "frontend: usage of keys")

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            self._metrics.show_budgets(
                (identity.id, ratio)
                for identity in self._identities()
                if (ratio := self._quotas.remaining_ratio(identity)) is not None
            )
            await self.write()

    async def write(self) -> None:
        """Write what was counted since the last time; what cannot be written waits for the next one."""
        counted = self._counted
        if self._store is None or not (counted.rows or counted.spent):
            return
        self._counted = _Counted()
        oldest = int(self._quotas.wall_clock() // 60) - self._keep_days * MINUTES_OF_A_DAY
        # A task of its own: the write goes on where its caller is cancelled, as by `aclose`, which then waits for it.
        task = self._writes.start(self._write(self._store, counted, oldest), "frontend: write usage", is_awaited=True)
        await asyncio.shield(task)

    async def _write(self, store: UsageStore, counted: _Counted, oldest: int) -> None:
        try:
            await store.add(counted.rows, counted.spent, oldest=oldest)
        except UsageUnavailable as error:
            self._put_back(counted)
            if not self._is_failing:
                self._is_failing = True
                logger.error("%s; what keys use is kept in memory until it can be written", error)
        else:
            self._is_failing = False
            for (name, _), units in counted.spent.items():
                self._quotas.book.pledges.wrote(name, units)

    def _put_back(self, counted: _Counted) -> None:
        rows, spent = counted.rows, counted.spent
        for key, counts in self._counted.rows.items():
            before = rows.get(key)
            if before is not None:
                rows[key] = [a + b for a, b in zip(before, counts, strict=True)]
            elif len(rows) < MAX_UNWRITTEN:
                rows[key] = counts
        for budget, units in self._counted.spent.items():
            spent[budget] = spent.get(budget, 0) + units
        self._counted = counted

    async def rows(self, query: UsageQuery) -> list[dict[str, object]]:
        """Return what was used until now. Raises UsageUnavailable, and InvalidArgument for a wrong query."""
        if self._store is None:
            raise UsageUnavailable("the usage of keys is not kept: set DYN_USAGE_DB=FILE for the frontend")
        await self.write()
        return await self._store.rows(query)

    async def aclose(self) -> None:
        """Write the rest, and close the file."""
        await self._work.close()
        await self._writes.wait()
        if self._store is not None:
            await self.write()
            self._quotas.book.pledges.close()
            await self._store.aclose()


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
        self._path = path
        self._database = open_database(path, "the usage of keys", VERSION, _TABLES, upgrades=_UPGRADES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dynamo-usage")

    def spent(self) -> dict[str, Spent]:
        """Return what each budget has given, also to the requests of processes that were killed. Blocks; for the start."""
        with left_behind(self._path) as left, writing(self._database) as database:
            database.executemany(_SPEND, left)
            rows = database.execute("SELECT name, period, units FROM spent").fetchall()
        return {name: Spent(period, units) for name, period, units in rows}

    def pledges(self) -> Pledges:
        """Open the file of what this process takes. Blocks; for the start. Raises InvalidArgument."""
        with writing(self._database):  # meanwhile no other process takes it for one that was left behind
            return Pledges(self._path)

    async def add(
        self, rows: Mapping[UsageKey, Sequence[float]], spent: Mapping[tuple[str, int], int], *, oldest: int
    ) -> None:
        """Add what was used to what is kept, all of it or nothing, and forget minutes before `oldest`.

        `spent`: units by the name and period of a budget. Raises UsageUnavailable.
        """
        await self._run(partial(self._add, rows, spent, oldest))

    async def rows(self, query: UsageQuery) -> list[dict[str, object]]:
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


def usage_rows(database: sqlite3.Connection, query: UsageQuery) -> list[dict[str, object]]:
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
