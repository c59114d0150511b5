"""What keys use, as it is counted: added up in memory, written once a second in one transaction, and shown as metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.metrics import KeyMetrics
from dynamo.frontend.parts.keys.quotas import Charge, Quotas, TokenUse
from dynamo.frontend.parts.keys.usage_store import UsageKey, UsageQuery, UsageStore, UsageUnavailable
from dynamo.runtime.base.tasks import Background

logger = logging.getLogger(__name__)

WRITE_SECONDS: Final = 1.0  # a crash loses so much
MAX_UNWRITTEN: Final = 100_000  # rows that wait for a file that cannot be written
MINUTES_OF_A_DAY: Final = 1440


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

    async def rows(self, query: UsageQuery) -> list[dict[str, Any]]:
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
            await self._store.aclose()
