"""What one member requests of all the others: passed on by the parent, which waits for a short time only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

from dynamo.frontend.parts.group.member_process import MemberProcess
from dynamo.frontend.parts.group.messages import GroupAnswers, MemberAnswer, MemberQuestion
from dynamo.runtime.base.tasks import Background

ANSWER_SECONDS: Final = 0.5  # a member that is busy for longer is left out of the picture, which names it


class _Question:
    """One question: the members that have not answered yet, and the answers."""

    def __init__(self, names: dict[int, str]) -> None:
        self.missing = names
        self.answers: list[bytes] = []
        self.done = asyncio.Event()
        if not names:
            self.done.set()

    def leave(self, row: int) -> None:
        self.missing.pop(row, None)
        if not self.missing:
            self.done.set()


class GroupQuestions:
    """Passes questions on, and their answers back. Bounded in time, and so in number."""

    def __init__(self, members: Sequence[MemberProcess]) -> None:
        self._members = members
        self._open: dict[int, _Question] = {}
        self._number = 0
        self._work = Background()

    def begin(self, asker: MemberProcess, message: MemberQuestion) -> None:
        """MemberQuestion all other members, and answer the requesting one."""
        self._work.start(self._ask(asker, message), "frontend: question")

    def on_answer(self, member: MemberProcess, message: MemberAnswer) -> None:
        """Take the answer of a member. One that comes too late is dropped."""
        question = self._open.get(message.number)
        if question is not None and member.row in question.missing:
            question.answers.append(message.answer)
            question.leave(member.row)

    async def close(self) -> None:
        """End the questions under way."""
        await self._work.close()

    async def _ask(self, asker: MemberProcess, message: MemberQuestion) -> None:
        others = [each for each in self._members if each is not asker and each.takes]
        self._number += 1
        number = self._number
        question = self._open[number] = _Question({each.row: each.name for each in others})
        try:
            for each in others:
                each.send(MemberQuestion(number, message.question))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(question.done.wait(), ANSWER_SECONDS)
        finally:
            del self._open[number]
        asker.send(GroupAnswers(message.number, question.answers, sorted(question.missing.values())))
