"""What keys use, as it is counted: added up in memory, written once a second in one transaction, and shown as metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
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
        self._rows: dict[UsageKey, list[float]] = {}
        self._spent: dict[tuple[str, int], int] = {}
        self._work = Background()
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
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= MAX_UNWRITTEN:
                return  # the file could not be written for long, which is in the log
            row = self._rows[key] = [0, 0, 0, 0, 0, 0, 0, 0.0]
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
        self._spent[budget] = self._spent.get(budget, 0) + units

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
        if self._store is None or not (self._rows or self._spent):
            return
        rows, spent = self._rows, self._spent
        self._rows, self._spent = {}, {}
        oldest = int(self._quotas.wall_clock() // 60) - self._keep_days * MINUTES_OF_A_DAY
        try:
            await self._store.add(rows, spent, oldest=oldest)
        except UsageUnavailable as error:
            self._put_back(rows, spent)
            if not self._is_failing:
                self._is_failing = True
                logger.error("%s; what keys use is kept in memory until it can be written", error)
        else:
            self._is_failing = False

    def _put_back(self, rows: dict[UsageKey, list[float]], spent: dict[tuple[str, int], int]) -> None:
        for key, counts in self._rows.items():
            before = rows.get(key)
            if before is not None:
                rows[key] = [a + b for a, b in zip(before, counts, strict=True)]
            elif len(rows) < MAX_UNWRITTEN:
                rows[key] = counts
        for budget, units in self._spent.items():
            spent[budget] = spent.get(budget, 0) + units
        self._rows, self._spent = rows, spent

    async def rows(self, query: UsageQuery) -> list[dict[str, Any]]:
        """Return what was used until now. Raises UsageUnavailable, and InvalidArgument for a wrong query."""
        if self._store is None:
            raise UsageUnavailable("the usage of keys is not kept: set DYN_USAGE_DB=FILE for the frontend")
        await self.write()
        return await self._store.rows(query)

    async def aclose(self) -> None:
        """Write the rest, and close the file."""
        await self._work.close()
        if self._store is not None:
            await self.write()
            await self._store.aclose()
