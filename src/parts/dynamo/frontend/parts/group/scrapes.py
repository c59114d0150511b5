"""The metrics of a group: one scrape gathers those of every member, and what a member had counted outlives it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

from dynamo.frontend.parts.group.member_process import MemberProcess
from dynamo.frontend.parts.group.messages import Gathered, Take
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.observe.metric_snapshots import absorb, snapshot
from dynamo.runtime.observe.metrics import Counter, MetricsRegistry

SNAPSHOT_SECONDS: Final = 1.0  # a member that sends nothing for this long is represented by what it sent last


class _Gathering:
    """One scrape: the members that have not answered yet."""

    def __init__(self, rows: set[int]) -> None:
        self.missing = rows
        self.done = asyncio.Event()
        if not rows:
            self.done.set()

    def answered(self, row: int) -> None:
        self.missing.discard(row)
        if not self.missing:
            self.done.set()


class GroupScrapes:
    """Answers the scrapes that members pass on."""

    def __init__(self, members: Sequence[MemberProcess], *, metrics_prefix: str) -> None:
        self._members = members
        self._ended = MetricsRegistry()  # what processes that are no more had counted
        self.restarts: Counter = self._ended.held(
            f"{metrics_prefix}_process_restarts_total",
            "counter",
            "Frontend processes that ended by themselves and were started again",
            "",
            Counter(),
        )
        self._gatherings: dict[int, _Gathering] = {}
        self._number = 0
        self._answers = Background()

    def begin(self, asker: MemberProcess, number: int, own_snapshot: bytes) -> None:
        """Gather for a member that was scraped, and answer it."""
        asker.last_snapshot = own_snapshot
        self._answers.start(self._gather(asker, number), "frontend: scrape")  # bounded in time

    def on_snapshot(self, member: MemberProcess, number: int, encoded: bytes) -> None:
        """Take a member's counts. Each snapshot is kept: the counts have been shown, and may not be lost."""
        member.last_snapshot = encoded
        if number in self._gatherings:
            self._gatherings[number].answered(member.row)

    def leave(self, member: MemberProcess) -> None:
        """Wait no longer for a process that is leaving."""
        for gathering in self._gatherings.values():
            gathering.answered(member.row)

    def keep_counts(self, member: MemberProcess) -> None:
        """Take over what a process that has ended had counted: a counter that falls would appear as a restart of all."""
        if member.last_snapshot:
            absorb(self._ended, member.last_snapshot, is_fact=lambda _: False, gauges=False)
            member.last_snapshot = b""

    async def close(self) -> None:
        """End the scrapes under way."""
        await self._answers.close()

    async def _gather(self, asker: MemberProcess, number: int) -> None:
        others = [each for each in self._members if each is not asker and each.takes]
        self._number += 1
        own_number = self._number
        gathering = self._gatherings[own_number] = _Gathering({each.row for each in others})
        try:
            for other in others:
                other.send(Take(own_number))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gathering.done.wait(), SNAPSHOT_SECONDS)
        finally:
            del self._gatherings[own_number]
        found = [each.last_snapshot for each in self._members if each is not asker and each.last_snapshot]
        asker.send(Gathered(number, [*found, snapshot(self._ended)]))
