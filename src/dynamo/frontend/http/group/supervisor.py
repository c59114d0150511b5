"""The parent of a group: it owns the socket, deals connections out, and keeps its members running.

It reads no HTTP. A connection goes to the member that has the fewest, and stays there. Metrics pass through here, because
what a member had counted must outlive it: a counter that falls would look like a restart of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from typing import Final

from dynamo.frontend.http.group.messages import (
    Gather,
    Gathered,
    Ready,
    Share,
    Shared,
    Snapshot,
    Standing,
    Take,
    read,
    write,
)
from dynamo.frontend.http.group.places import Field, Places
from dynamo.frontend.settings import FrontendSettings
from dynamo.runtime.metric_snapshots import absorb, snapshot
from dynamo.runtime.metrics import Counter, MetricsRegistry
from dynamo.runtime.tasks import Background
from dynamo.supervise.backoff import RestartPolicy

__all__ = ["Supervisor"]

logger = logging.getLogger(__name__)

LISTEN_BACKLOG: Final = 2048
ACCEPTED_AT_ONCE: Final = 64
PAUSE_SECONDS: Final = 0.05  # when no member can take a connection, or no descriptor is left
SNAPSHOT_SECONDS: Final = 1.0  # a member that says nothing for this long is represented by what it said last
MAX_SHARED: Final = 4096  # values that hold for all; the oldest goes first
KILL_RESERVE_SECONDS: Final = 4.0  # for a member that cannot keep its own limit; `dynamo serve` kills after 5


class _Member:
    """One place of the group, over the incarnations of its process."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.name = f"frontend process {row + 1}"
        self.policy = RestartPolicy()
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.deliveries: socket.socket | None = None
        self.on_their_way: deque[socket.socket] = deque()  # connections dealt and not yet taken; bounded by the socket
        self.ready_since: float | None = None
        self.last_snapshot = b""  # of the running incarnation

    @property
    def takes(self) -> bool:
        return self.ready_since is not None and self.deliveries is not None


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


class Supervisor:
    """`await Supervisor(settings, argv, listener).run()` serves until a signal; its result is the exit status."""

    def __init__(
        self,
        settings: FrontendSettings,
        argv: Sequence[str],
        listener: socket.socket,
        *,
        admin: socket.socket | None = None,
    ) -> None:
        """`listener` is bound and not listening yet; it is closed at the end. `argv`: the command line, for the members.

        `admin` is bound for the admin routes. All members accept from it themselves: any of them answers for all, and this
        process keeps the port while members come and go.
        """
        self._settings, self._argv, self._listener = settings, tuple(argv), listener
        self._admin = admin
        self._places = Places.create(settings.workers)
        self._members = [_Member(row) for row in range(settings.workers)]
        self._ended = MetricsRegistry()  # what processes that are no more had counted
        self._restarts = self._ended.held(
            f"{settings.metrics_prefix}_process_restarts_total",
            "counter",
            "Frontend processes that ended by themselves and were started again",
            "",
            Counter(),
        )
        self._shared: dict[str, bytes] = {}
        self._gatherings: dict[int, _Gathering] = {}
        self._number = 0
        self._stopping = asyncio.Event()
        self._was_serving = False
        self._is_accepting = self._is_paused = False
        self._held: deque[socket.socket] = deque()  # accepted, and no member could take them
        self._failure = 0
        self._signal: signal.Signals | None = None
        self._answers = Background()

    async def run(self) -> int:
        """Run the group; return 0 after a clean end, else the status of the member without which the group cannot
        run.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._hear, number)
        try:
            async with asyncio.TaskGroup() as group:
                for member in self._members:
                    group.create_task(self._keep(member), name=member.name)
        finally:
            self._stop_accepting()
            for connection in self._held:
                connection.close()
            self._listener.close()
            if self._admin is not None:
                self._admin.close()
            await self._answers.close()
            self._places.close()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        if self._signal is not None:
            signal.signal(self._signal, signal.SIG_DFL)
            os.kill(os.getpid(), self._signal)  # it was asked twice: end as a process without handlers would
        return self._failure

    # -- signals -----------------------------------------------------------------------------------------------------

    def _hear(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            self._signal = number
            self._each(lambda process: process.kill())
            return
        logger.info("%s: draining, no new requests (again to leave at once)", number.name)
        self._stop()

    def _stop(self) -> None:
        """Members drain side by side; connections are dealt to them until the last one has ended, and answered 503."""
        self._stopping.set()
        self._each(lambda process: process.terminate())
        settings = self._settings
        limit = settings.grace_period_seconds + settings.graceful_shutdown_seconds + KILL_RESERVE_SECONDS
        asyncio.get_running_loop().call_later(limit, self._each, lambda process: process.kill())

    def _each(self, do: object) -> None:
        assert callable(do)
        for member in self._members:
            if member.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    do(member.process)

    # -- members -----------------------------------------------------------------------------------------------------

    async def _keep(self, member: _Member) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            status = await self._live(member)
            since, member.ready_since = member.ready_since, None
            self._places.clear(member.row)
            if member.last_snapshot:
                absorb(self._ended, member.last_snapshot, is_fact=lambda _: False, gauges=False)
                member.last_snapshot = b""
            self._tell_standing()
            if self._stopping.is_set():
                return
            delay = member.policy.after_death(status, healthy_seconds=None if since is None else loop.time() - since)
            if delay is None or (not self._was_serving and status > 0):  # it has said why, and would say it again
                logger.error("%s ended with status %d and cannot be kept running", member.name, status)
                self._failure = self._failure or (status if status > 0 else 1)
                self._stop()
                return
            logger.error("%s ended with status %d; starting it again in %g s", member.name, status, delay)
            self._restarts.inc()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _live(self, member: _Member) -> int:
        """Run one incarnation; return its status as `subprocess` gives it (-9: SIGKILL)."""
        ours, control = socket.socketpair()
        member.deliveries, deliveries = socket.socketpair()
        with control, deliveries:
            inherited = {"control": control.fileno(), "deliveries": deliveries.fileno(), "places": self._places.fd}
            if self._admin is not None:
                inherited["admin"] = self._admin.fileno()
            flags = [f"--{name}={fd}" for name, fd in inherited.items()]
            process = member.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "dynamo.frontend.http.group.member"),
                *(*flags, f"--row={member.row}", f"--rows={len(self._members)}", "--", *self._argv),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=tuple(inherited.values()),
                preexec_fn=_ignore_interrupts,
            )
        if self._stopping.is_set():  # asked while it was being started
            process.terminate()
        reader, member.writer = await asyncio.open_unix_connection(sock=ours)
        member.deliveries.setblocking(False)
        for key, value in self._shared.items():
            write(member.writer, Share(0, key, value))
        try:
            while (message := await read(reader)) is not None:
                self._take(member, message)
            self._leave(member)
            return await process.wait()
        finally:
            self._leave(member)
            member.writer.close()
            member.writer = member.process = None

    def _leave(self, member: _Member) -> None:
        """Send no more connections to this process."""
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
        for gathering in self._gatherings.values():
            gathering.answered(member.row)
        if not any(each.takes for each in self._members):
            self._stop_accepting()

    def _take(self, member: _Member, message: object) -> None:
        match message:
            case Ready():
                loop = asyncio.get_running_loop()
                member.ready_since = loop.time()
                assert member.deliveries is not None
                loop.add_reader(member.deliveries, self._taken, member)
                self._start_accepting()
                self._tell_standing()
                if not self._was_serving:
                    self._was_serving = True
                    where = self._listener.getsockname()
                    logger.info("serving HTTP on %s:%d", self._settings.http_host, where[1])
                logger.info("%s (pid %d) serves", member.name, member.process.pid if member.process else 0)
            case Snapshot(number, encoded):
                member.last_snapshot = encoded
                if number in self._gatherings:
                    self._gatherings[number].answered(member.row)
            case Gather(number, encoded):
                member.last_snapshot = encoded
                self._answers.start(self._gather(member, number), "frontend: scrape")  # bounded in time
            case Share(number, key, value):
                self._share(member, number, key, value)
            case _:
                raise RuntimeError(f"a member does not say {message!r}")

    def _share(self, teller: _Member, number: int, key: str, value: bytes) -> None:
        """Pass on what holds for all; the newest is kept for members that start later."""
        self._shared.pop(key, None)
        self._shared[key] = value
        if len(self._shared) > MAX_SHARED:
            del self._shared[next(iter(self._shared))]
        for member in self._members:
            if member is not teller and member.writer is not None:
                write(member.writer, Share(0, key, value))
        if teller.writer is not None:
            write(teller.writer, Shared(number))

    def _tell_standing(self) -> None:
        standing = Standing(sum(each.takes for each in self._members), len(self._members))
        for member in self._members:
            if member.writer is not None:
                write(member.writer, standing)

    # -- metrics -----------------------------------------------------------------------------------------------------

    async def _gather(self, asker: _Member, number: int) -> None:
        """Answer one scrape. Each member's snapshot is kept: its counts have been shown, and may not be lost."""
        others = [each for each in self._members if each is not asker and each.takes]
        self._number += 1
        own_number = self._number
        gathering = self._gatherings[own_number] = _Gathering({each.row for each in others})
        try:
            for other in others:
                if other.writer is not None:
                    write(other.writer, Take(own_number))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gathering.done.wait(), SNAPSHOT_SECONDS)
        finally:
            del self._gatherings[own_number]
        found = [each.last_snapshot for each in self._members if each is not asker and each.last_snapshot]
        if asker.writer is not None:
            write(asker.writer, Gathered(number, [*found, snapshot(self._ended)]))

    # -- connections -------------------------------------------------------------------------------------------------

    def _start_accepting(self) -> None:
        if not self._is_accepting:
            self._is_accepting = True
            self._listener.setblocking(False)
            self._listener.listen(LISTEN_BACKLOG)
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _stop_accepting(self) -> None:
        """Stop accepting: new connections wait in the kernel's queue until a process serves again."""
        if self._is_accepting:
            self._is_accepting = False
            asyncio.get_running_loop().remove_reader(self._listener)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
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
        if self._listener.fileno() < 0:  # it is all over
            return
        while self._held and self._deal(self._held[0]):
            self._held.popleft()
        if self._held:
            self._pause()
        elif any(each.takes for each in self._members):
            self._start_accepting()

    def _deal(self, connection: socket.socket) -> bool:
        """Hand a connection to the member with the fewest; False when none can take it now."""
        for member in sorted((each for each in self._members if each.takes), key=self._load):
            assert member.deliveries is not None
            try:
                socket.send_fds(member.deliveries, [b"c"], [connection.fileno()])
            except OSError:  # its queue is full, or it has just ended: its control connection will say so
                continue
            member.on_their_way.append(connection)
            return True
        return False

    def _taken(self, member: _Member) -> None:
        """Our copy of a connection that a member has taken must go at once: it would keep the connection open."""
        assert member.deliveries is not None
        try:
            count = len(member.deliveries.recv(4096))
        except OSError:
            count = 0
        if not count:  # it has ended, and its control connection says so, too
            asyncio.get_running_loop().remove_reader(member.deliveries)
        for _ in range(count):
            member.on_their_way.popleft().close()

    def _load(self, member: _Member) -> int:
        """Connections it has, and those on their way to it."""
        return self._places.get(member.row, Field.OPEN) + len(member.on_their_way)


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal; only the parent reacts to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
