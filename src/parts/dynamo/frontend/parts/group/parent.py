"""What the parent of a group does for its members: hands out connections, and passes on what one requests of all the others.

A scrape gathers the metrics of every member, and what a member had counted outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from dynamo.frontend.http.server import close_listeners, port_of
from dynamo.frontend.parts.group.member_process import MemberProcess
from dynamo.frontend.parts.group.messages import (
    Gathered,
    GroupAnswers,
    MemberAnswer,
    MemberQuestion,
    Message,
    Take,
)
from dynamo.frontend.parts.group.places import Field, Places
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


# Accepts the connections of a group, and hands each to the member that has the fewest.

logger = logging.getLogger(__name__)

LISTEN_BACKLOG: Final = 2048
ACCEPTED_AT_ONCE: Final = 64
PAUSE_SECONDS: Final = 0.05  # when no member can take a connection, or no descriptor is left


class ConnectionDealer:
    """Accepts while a member takes connections. Otherwise new ones wait in the kernel's queue."""

    def __init__(self, listeners: Sequence[socket.socket], members: Sequence[MemberProcess], places: Places) -> None:
        """`listeners` are bound and not listening yet; `close` closes them."""
        self._listeners, self._members, self._places = listeners, members, places
        self.port: int = port_of(listeners)
        """The port of the API; 0: it has none."""
        self._is_accepting = self._is_paused = False
        self._held: deque[socket.socket] = deque()  # accepted, and no member could take them

    def add(self, member: MemberProcess) -> None:
        """Deal connections to a member that is ready now."""
        assert member.deliveries is not None
        asyncio.get_running_loop().add_reader(member.deliveries, self._taken, member)
        self._start_accepting()

    def remove(self, member: MemberProcess) -> None:
        """Send no more connections to the process of `member`, and deal those on their way to it again. Idempotent."""
        if member.deliveries is not None:
            asyncio.get_running_loop().remove_reader(member.deliveries)
            member.deliveries.close()
            member.deliveries = None
            orphans = [*member.on_their_way]
            member.on_their_way.clear()
            for connection in orphans:
                if not self._deal(connection):
                    self._held.append(connection)
            if self._held:
                self._pause()
        if not any(each.takes for each in self._members):
            self._stop_accepting()

    def close(self) -> None:
        """Stop accepting, and close the listener and what no member could take."""
        self._stop_accepting()
        for connection in self._held:
            connection.close()
        close_listeners(self._listeners)

    # -- accepting -----------------------------------------------------------------------------------------------

    def _start_accepting(self) -> None:
        if not self._is_accepting:
            self._is_accepting = True
            for listener in self._listeners:
                listener.setblocking(False)
                listener.listen(LISTEN_BACKLOG)
                asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _stop_accepting(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            for listener in self._listeners:
                asyncio.get_running_loop().remove_reader(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("cannot accept a connection: %s", error)
                self._pause()
                return
            if not self._deal(connection):
                self._held.append(connection)
                self._pause()
                return

    def _pause(self) -> None:
        self._stop_accepting()
        if self._is_paused:
            return
        self._is_paused = True
        asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        self._is_paused = False
        if any(each.fileno() < 0 for each in self._listeners):  # it is all over
            return
        while self._held and self._deal(self._held[0]):
            self._held.popleft()
        if self._held:
            self._pause()
        elif any(each.takes for each in self._members):
            self._start_accepting()

    # -- dealing -------------------------------------------------------------------------------------------------

    def _deal(self, connection: socket.socket) -> bool:
        """Hand a connection to the member with the fewest; False when none can take it now."""
        for member in sorted((each for each in self._members if each.takes), key=self._load):
            assert member.deliveries is not None
            try:
                socket.send_fds(member.deliveries, [b"c"], [connection.fileno()])
            except OSError:  # its queue is full, or it has just ended: its control connection will report that
                continue
            member.on_their_way.append(connection)
            return True
        return False

    def _taken(self, member: MemberProcess) -> None:
        """Close our copy of a connection that a member has taken: the copy would keep the connection open."""
        assert member.deliveries is not None
        try:
            count = len(member.deliveries.recv(4096))
        except OSError:
            count = 0
        if not count:  # it has ended, and its control connection reports that, too
            asyncio.get_running_loop().remove_reader(member.deliveries)
        for _ in range(count):
            member.on_their_way.popleft().close()

    def _load(self, member: MemberProcess) -> int:
        """Return how many connections a member has, and has on their way to it."""
        return self._places.get(member.row, Field.OPEN) + len(member.on_their_way)
