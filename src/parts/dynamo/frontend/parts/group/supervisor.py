"""The parent of a group: it owns the socket, deals connections out, and keeps its members running.

It reads no HTTP. A connection goes to the member that has the fewest, and stays there (`dealer.py`). Metrics pass through
here (`rounds.py`), and so do values that hold for all members.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from dynamo.frontend.base.peers import TOKEN_KEY
from dynamo.frontend.base.settings.keys import KeySources
from dynamo.frontend.http.inspector_access import AdminKeys, published_access
from dynamo.frontend.http.server import log_serving
from dynamo.frontend.parts.group.member_process import MemberProcess
from dynamo.frontend.parts.group.messages import (
    Gather,
    MemberAnswer,
    MemberQuestion,
    Ready,
    Share,
    Shared,
    Snapshot,
    Standing,
    read,
)
from dynamo.frontend.parts.group.parent import ConnectionDealer, GroupQuestions, GroupScrapes
from dynamo.frontend.parts.group.places import Places
from dynamo.frontend.settings import FrontendSettings
from dynamo.runtime.http.inspector_token import new_token
from dynamo.supervise.backoff import NOT_STARTED
from dynamo.supervise.process import exit_words

logger = logging.getLogger(__name__)

MAX_SHARED: Final = 4096  # values that hold for all; the oldest goes first
KILL_RESERVE_SECONDS: Final = 4.0  # for a member that cannot keep its own limit; `dynamo serve` kills after 5


class _SharedValues:
    """What one member reports to all the others, and those that start later."""

    def __init__(self, members: Sequence[MemberProcess]) -> None:
        self._members = members
        self._values: dict[str, bytes] = {}
        self.questions = GroupQuestions(members)

    def share(self, teller: MemberProcess, message: Share) -> None:
        """Pass a value on; the newest of each key is kept."""
        self._values.pop(message.key, None)
        self._values[message.key] = message.value
        if len(self._values) > MAX_SHARED:
            del self._values[next(iter(self._values))]
        for member in self._members:
            if member is not teller:
                member.send(Share(0, message.key, message.value))
        teller.send(Shared(message.number))

    def put(self, key: str, value: bytes) -> None:
        """Keep a value of the parent's own, for members that start from now on."""
        self._values[key] = value

    def tell_all(self, member: MemberProcess) -> None:
        """Send a process that starts what was shared before."""
        for key, value in self._values.items():
            member.send(Share(0, key, value))


class _Launcher:
    """Starts the processes of the members, each with the descriptors that it inherits."""

    def __init__(self, places: Places, rows: int, argv: Sequence[str], admin: socket.socket | None) -> None:
        self._places, self._rows, self._argv, self._admin = places, rows, argv, admin
        self.admin_port: int | None = None if admin is None else admin.getsockname()[1]

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()

    async def start(
        self, member: MemberProcess
    ) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
        """Start the process of a member, and connect to it. Raises OSError, and leaves nothing open then."""
        with ExitStack() as own_ends, ExitStack() as its_ends:
            (ours, control), (dealt, deliveries) = _pair(own_ends, its_ends), _pair(own_ends, its_ends)
            inherited = {"control": control.fileno(), "deliveries": deliveries.fileno(), "places": self._places.fd}
            if self._places.limits is not None:
                inherited["limits"] = self._places.limits.fd
            if self._admin is not None:
                inherited["admin"] = self._admin.fileno()
            flags = [f"--{name}={fd}" for name, fd in inherited.items()]
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            own_ends.callback(writer.close)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "dynamo.frontend.parts.group.member"),
                *(*flags, f"--row={member.row}", f"--rows={self._rows}", "--", *self._argv),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=tuple(inherited.values()),
                preexec_fn=_ignore_interrupts,
            )
            own_ends.pop_all()
        dealt.setblocking(False)
        member.process, member.writer, member.deliveries = process, writer, dealt
        return process, reader, writer


class _End:
    """Whether the group ends, and with which status."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.failure = 0
        self.signal: signal.Signals | None = None  # the second one

    def status(self) -> int:
        """Return the exit status; a group that was stopped twice ends as a process without handlers would."""
        if self.signal is not None:
            signal.signal(self.signal, signal.SIG_DFL)
            os.kill(os.getpid(), self.signal)
        return self.failure


class Supervisor:
    """`await Supervisor(settings, argv, listeners).run()` serves until a signal; its result is the exit status."""

    def __init__(
        self,
        settings: FrontendSettings,
        argv: Sequence[str],
        listeners: Sequence[socket.socket],
        *,
        admin: socket.socket | None = None,
    ) -> None:
        """`listeners` are bound and not listening yet; they are closed at the end. `argv`: the command line, for the members.

        `admin` is bound for the admin routes. All members accept from it themselves: any of them answers for all, and this
        process keeps the port while members come and go.
        """
        self._settings = settings
        self._places = Places.create(settings.workers, with_limits=settings.key_sources.exist)
        self._launcher = _Launcher(self._places, settings.workers, tuple(argv), admin)
        self._members = [MemberProcess(row) for row in range(settings.workers)]
        self._dealer = ConnectionDealer(listeners, self._members, self._places)
        self._scrapes = GroupScrapes(self._members, metrics_prefix=settings.metrics_prefix)
        self._shared = _SharedValues(self._members)
        self._was_serving = False
        self._end = _End()

    async def run(self) -> int:
        """Run the group; return 0 after a clean end, else the status of the member without which the group cannot
        run.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._hear, number)
        token = new_token()  # of the inspector: every member lets it in
        self._shared.put(TOKEN_KEY, token.encode())
        sources = self._settings.key_sources
        keys = _keys_at_start(sources) if sources.exist else None
        try:
            with published_access(self._settings, self._dealer.port, self._launcher.admin_port, token, keys):
                async with asyncio.TaskGroup() as group:
                    for member in self._members:
                        group.create_task(self._keep(member), name=member.name)
        finally:
            self._dealer.close()
            self._launcher.close()
            await self._scrapes.close()
            await self._shared.questions.close()
            self._places.close()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return self._end.status()

    # -- signals -----------------------------------------------------------------------------------------------------

    def _hear(self, number: signal.Signals) -> None:
        if self._end.stopping.is_set():
            self._end.signal = number
            self._each(lambda process: process.kill())
            return
        logger.info("%s: draining, no new requests (again to leave at once)", number.name)
        self._stop()

    def _stop(self) -> None:
        """Members drain side by side; connections are dealt to them until the last one has ended, and answered 503."""
        self._end.stopping.set()
        self._each(lambda process: process.terminate())
        settings = self._settings
        limit = settings.grace_period_seconds + settings.graceful_shutdown_seconds + KILL_RESERVE_SECONDS
        asyncio.get_running_loop().call_later(limit, self._each, lambda process: process.kill())

    def _each(self, do: Callable[[asyncio.subprocess.Process], None]) -> None:
        for member in self._members:
            if member.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    do(member.process)

    # -- members -----------------------------------------------------------------------------------------------------

    async def _keep(self, member: MemberProcess) -> None:
        loop = asyncio.get_running_loop()
        while not self._end.stopping.is_set():
            status = await self._live(member)
            since, member.ready_since = member.ready_since, None
            self._places.clear(member.row)
            self._scrapes.keep_counts(member)
            self._tell_standing()
            if self._end.stopping.is_set():
                return
            delay = member.policy.after_death(status, healthy_seconds=None if since is None else loop.time() - since)
            words = exit_words(status)
            has_logged_why = not self._was_serving and status > 0 and status != NOT_STARTED
            if delay is None or has_logged_why:  # it would log it again
                logger.error("%s %s and cannot be kept running", member.name, words)
                self._end.failure = self._end.failure or (status if status > 0 else 1)
                self._stop()
                return
            logger.error("%s %s; starting it again in %g s", member.name, words, delay)
            self._scrapes.restarts.inc()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end.stopping.wait(), delay)

    async def _live(self, member: MemberProcess) -> int:
        """Run one incarnation; return its status as `subprocess` gives it (-9: SIGKILL), or NOT_STARTED."""
        try:
            process, reader, writer = await self._launcher.start(member)
        except OSError as error:  # no room for a process, or no descriptor: that may pass
            logger.error("%s cannot be started: %s", member.name, error.strerror or error)
            return NOT_STARTED
        if self._end.stopping.is_set():  # stopped while it was being started
            process.terminate()
        self._shared.tell_all(member)
        try:
            while (message := await read(reader)) is not None:
                self._take(member, message)
            self._leave(member)
            return await process.wait()
        finally:
            self._leave(member)
            writer.close()
            member.writer = member.process = None

    def _leave(self, member: MemberProcess) -> None:
        """Send no more connections to this process, and wait for none of its answers."""
        self._dealer.remove(member)
        self._scrapes.leave(member)

    def _take(self, member: MemberProcess, message: object) -> None:
        match message:
            case Ready():
                member.ready_since = asyncio.get_running_loop().time()
                self._dealer.add(member)
                self._tell_standing()
                if not self._was_serving:
                    self._was_serving = True
                    log_serving(self._settings, self._dealer.port)
                logger.info("%s (pid %d) serves", member.name, member.process.pid if member.process else 0)
            case Snapshot(number, encoded):
                self._scrapes.on_snapshot(member, number, encoded)
            case Gather(number, encoded):
                self._scrapes.begin(member, number, encoded)
            case Share():
                self._shared.share(member, message)
            case MemberQuestion():
                self._shared.questions.begin(member, message)
            case MemberAnswer():
                self._shared.questions.on_answer(member, message)
            case _:
                raise RuntimeError(f"a member does not say {message!r}")

    def _tell_standing(self) -> None:
        standing = Standing(sum(each.takes for each in self._members), len(self._members))
        for member in self._members:
            member.send(standing)


def _pair(*owners: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, each of which its owner closes. Raises OSError."""
    ends = socket.socketpair()
    for owner, end in zip(owners, ends, strict=True):
        owner.enter_context(end)
    return ends


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal; only the parent reacts to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _keys_at_start(sources: KeySources) -> AdminKeys:
    """Return the keys as they are at the start; the members follow their files."""
    from dynamo.frontend.parts.keys.key_store import KeyStore

    return KeyStore(sources)
