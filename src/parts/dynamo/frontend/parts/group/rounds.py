"""What one member requests of all the others, passed on by the parent: their views of a request, and their metrics.

A scrape gathers the metrics of every member, and what a member had counted outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from dynamo.frontend.parts.group.member_process import MemberProcess
from dynamo.frontend.parts.group.messages import (
    Gathered,
    GroupAnswers,
    MemberAnswer,
    MemberQuestion,
    Message,
    Take,
)
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.observe.metric_snapshots import absorb, snapshot
from dynamo.runtime.observe.metrics import Counter, MetricsRegistry

ANSWER_SECONDS: Final = 0.5  # a member that is busy for longer is left out of the picture, which names it
SNAPSHOT_SECONDS: Final = 1.0  # a member that sends nothing for this long is represented by what it sent last


class _Round:
    """One round: the members that have not answered yet, by their rows, and the answers."""

    def __init__(self, members: Sequence[MemberProcess]) -> None:
        self.missing = {each.row: each.name for each in members}
        self.answers: list[bytes] = []
        self.done = asyncio.Event()
        self.leave(-1)

    def leave(self, row: int) -> None:
        self.missing.pop(row, None)
        if not self.missing:
            self.done.set()


class _Rounds:
    """Rounds through all members but the one that began it. Bounded in time, and so in number."""

    def __init__(self, members: Sequence[MemberProcess], seconds: float) -> None:
        """`seconds`: how long a round waits for its answers."""
        self._members, self._seconds = members, seconds
        self.open: dict[int, _Round] = {}
        self._number = 0
        self.work = Background()

    async def run(self, asker: MemberProcess, message: Callable[[int], Message]) -> _Round:
        """Send all others the message of this round's number; return what has come by the end."""
        others = [each for each in self._members if each is not asker and each.takes]
        self._number += 1
        number = self._number
        found = self.open[number] = _Round(others)
        try:
            for each in others:
                each.send(message(number))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(found.done.wait(), self._seconds)
        finally:
            del self.open[number]
        return found


class GroupQuestions:
    """Passes questions on, and their answers back."""

    def __init__(self, members: Sequence[MemberProcess]) -> None:
        self._rounds = _Rounds(members, ANSWER_SECONDS)

    def begin(self, asker: MemberProcess, message: MemberQuestion) -> None:
        """Pass a question on to all other members, and answer the requesting one."""
        self._rounds.work.start(self._ask(asker, message), "frontend: question")

    def on_answer(self, member: MemberProcess, message: MemberAnswer) -> None:
        """Take the answer of a member. One that comes too late is dropped."""
        question = self._rounds.open.get(message.number)
        if question is not None and member.row in question.missing:
            question.answers.append(message.answer)
            question.leave(member.row)

    async def close(self) -> None:
        """End the questions under way."""
        await self._rounds.work.close()

    async def _ask(self, asker: MemberProcess, message: MemberQuestion) -> None:
        found = await self._rounds.run(asker, lambda number: MemberQuestion(number, message.question))
        asker.send(GroupAnswers(message.number, found.answers, sorted(found.missing.values())))


class GroupScrapes:
    """Answers the scrapes that members pass on."""

    def __init__(self, members: Sequence[MemberProcess], *, metrics_prefix: str) -> None:
        self._members = members
        self._rounds = _Rounds(members, SNAPSHOT_SECONDS)
        self._ended = MetricsRegistry()  # what processes that are no more had counted
        self.restarts: Counter = self._ended.held(
            f"{metrics_prefix}_process_restarts_total",
            "counter",
            "Frontend processes that ended by themselves and were started again",
            "",
            Counter(),
        )

    def begin(self, asker: MemberProcess, number: int, own_snapshot: bytes) -> None:
        """Gather for a member that was scraped, and answer it."""
        asker.last_snapshot = own_snapshot
        self._rounds.work.start(self._gather(asker, number), "frontend: scrape")

    def on_snapshot(self, member: MemberProcess, number: int, encoded: bytes) -> None:
        """Take a member's counts. Each snapshot is kept: the counts have been shown, and may not be lost."""
        member.last_snapshot = encoded
        if number in self._rounds.open:
            self._rounds.open[number].leave(member.row)

    def leave(self, member: MemberProcess) -> None:
        """Wait no longer for a process that is leaving."""
        for gathering in self._rounds.open.values():
            gathering.leave(member.row)

    def keep_counts(self, member: MemberProcess) -> None:
        """Take over what a process that has ended had counted: a counter that falls would appear as a restart of all."""
        if member.last_snapshot:
            absorb(self._ended, member.last_snapshot, is_fact=lambda _: False, gauges=False)
            member.last_snapshot = b""

    async def close(self) -> None:
        """End the scrapes under way."""
        await self._rounds.work.close()

    async def _gather(self, asker: MemberProcess, number: int) -> None:
        await self._rounds.run(asker, Take)
        found = [each.last_snapshot for each in self._members if each is not asker and each.last_snapshot]
        asker.send(Gathered(number, [*found, snapshot(self._ended)]))
