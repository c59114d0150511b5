"""Child processes: one incarnation (`Process`), and a program that is started again when it dies (`SupervisedProcess`).

A child runs in a session of its own, so that Ctrl-C in a terminal reaches only the parent. Its standard input is a
lifeline: the parent never writes to it, and the child reads its end when the parent is gone, however the parent ended. Its output
comes back line by line, and what it reports (`child.Reports`) on a pipe of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Self

from dynamo.runtime.base.tasks import Background
from dynamo.supervise.backoff import NOT_STARTED, RestartPolicy
from dynamo.supervise.lines import LineSplitter

READ_BYTES: Final = 64 * 1024
LAST_LINES: Final = 20
OUTPUT_AFTER_DEATH_SECONDS: Final = 1.0  # a descendant may have left the process group and still hold its output


@dataclass(frozen=True, slots=True)
class Program:
    """What to start. `{report}` in an argument becomes the number of the report pipe."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    stop_seconds: float  # from SIGTERM to SIGKILL
    inherited: tuple[int, ...] = ()
    first_env: Mapping[str, str] = field(default_factory=dict)  # more, for the first incarnation only


class GaveUp(Exception):
    """A process cannot be kept running."""

    def __init__(self, name: str, status: int, last_lines: list[str]) -> None:
        super().__init__(f"{name} {exit_words(status, last_lines)}")
        self.name, self.status, self.last_lines = name, status, last_lines


class _Pipes:
    """This process's ends of the pipes to one child.

    They are not pipes of `asyncio.subprocess`: those keep `wait()` from returning (Python 3.11) for as long as anything
    holds them open, and a child that died may have left a process that holds them for ever.
    """

    def __init__(self, lifeline: int, output: int, reports: int) -> None:
        self._lifeline = os.fdopen(lifeline, "wb", buffering=0)
        self._readable = [os.fdopen(each, "rb", buffering=0) for each in (output, reports)]
        self._transports: list[asyncio.ReadTransport] = []

    async def open_readers(self) -> list[asyncio.StreamReader]:
        """Return the readers of the output and of the reports."""
        loop = asyncio.get_running_loop()
        readers = []
        for pipe in self._readable:
            reader = asyncio.StreamReader()
            transport, _ = await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), pipe)
            self._transports.append(transport)
            readers.append(reader)
        return readers

    def close(self) -> None:
        """Close all ends. Idempotent."""
        self._lifeline.close()
        for transport in self._transports:
            transport.close()
        for pipe in self._readable[len(self._transports) :]:
            pipe.close()


class Process:
    """One running child."""

    def __init__(
        self,
        child: asyncio.subprocess.Process,
        pipes: _Pipes,
        *,
        on_line: Callable[[str], None],
        on_report: Callable[[dict[str, Any]], None],
    ) -> None:
        self._child = child
        self._pipes = pipes
        self._on_line, self._on_report = on_line, on_report
        self.pid = child.pid
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)

    @classmethod
    async def start(
        cls, program: Program, *, on_line: Callable[[str], None], on_report: Callable[[dict[str, Any]], None]
    ) -> Self:
        """Start the program; `follow` must be awaited afterwards. Raises OSError."""
        with ExitStack() as own_ends, ExitStack() as its_ends:
            stdin, lifeline = _pipe(its_ends, own_ends)
            output, stdout = _pipe(own_ends, its_ends)
            reports, report_to = _pipe(own_ends, its_ends)
            child = await asyncio.create_subprocess_exec(
                *(part.replace("{report}", str(report_to)) for part in program.argv),
                env=program.env,
                stdin=stdin,
                stdout=stdout,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(*program.inherited, report_to),
            )
            own_ends.pop_all()
        return cls(child, _Pipes(lifeline, output, reports), on_line=on_line, on_report=on_report)

    async def follow(self) -> int:
        """Pass on output and reports until the child is dead; return its status as `subprocess` gives it (-9: SIGKILL)."""
        with closing(self._pipes):
            try:
                output, reports = await self._pipes.open_readers()
            except BaseException:
                self.kill()
                await self._child.wait()
                raise
            async with Background() as readers:  # a bug in a callback ends the child, and is raised here
                readers.start(_read_lines(output, self._take_line), f"output of {self.pid}")
                readers.start(_read_lines(reports, self._take_report), f"reports of {self.pid}")
                try:
                    status = await self._child.wait()
                    self.kill()  # what it started and left behind
                    await readers.wait(OUTPUT_AFTER_DEATH_SECONDS)
                except asyncio.CancelledError:
                    self.kill()
                    await self._child.wait()
                    raise
        return status

    def _take_line(self, line: str) -> None:
        self.last_lines.append(line)
        self._on_line(line)

    def _take_report(self, line: str) -> None:
        self._on_report(json.loads(line))

    def terminate(self) -> None:
        """Send SIGTERM."""
        with suppress(ProcessLookupError):
            self._child.terminate()

    def kill(self) -> None:
        """End the process, and everything that it started, now."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # a session leader's group has its own number


def _pipe(readers: ExitStack, writers: ExitStack) -> tuple[int, int]:
    """Return the two ends of a pipe, which those close. Raises OSError."""
    reading, writing = os.pipe()
    readers.callback(os.close, reading)
    writers.callback(os.close, writing)
    return reading, writing


async def _read_lines(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    splitter = LineSplitter()
    while data := await stream.read(READ_BYTES):
        for line in splitter.feed(data):
            take(line)
    for line in splitter.finish():
        take(line)


@dataclass(slots=True)
class _Times:
    """Loop times of one incarnation, and what the last start took that succeeded."""

    started_at: float = 0.0
    ready_since: float | None = None
    start_seconds: float | None = None


class SupervisedProcess:
    """Keeps one program running: starts it, and starts it again after it died, until `stop`."""

    def __init__(
        self,
        program: Program,
        *,
        log: Callable[[str], None],
        on_line: Callable[[str, str], None],
        on_report: Callable[[SupervisedProcess, dict[str, Any]], None],
        on_start: Callable[[SupervisedProcess], None] = lambda worker: None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self.program = program
        self.process: Process | None = None
        self.starts = 0
        self.was_killed = False
        self._log, self._on_line, self._on_report, self._on_start = log, on_line, on_report, on_start
        self._policy = policy or RestartPolicy()
        self._times = _Times()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def is_ready(self) -> bool:
        """Whether the running incarnation was marked ready."""
        return self._times.ready_since is not None

    @property
    def start_seconds(self) -> float | None:
        """How long its last start took until it served; None: none has served yet."""
        return self._times.start_seconds

    def mark_ready(self) -> None:
        """Mark the running incarnation as serving; the restart policy counts from here."""
        times = self._times
        if times.ready_since is None:
            times.ready_since = asyncio.get_running_loop().time()
            times.start_seconds = times.ready_since - times.started_at

    async def keep(self) -> None:
        """Return after `stop`. Raises GaveUp."""
        loop = asyncio.get_running_loop()
        try:
            while not self._stopping.is_set():
                status, last_lines = await self._live()
                if self._stopping.is_set():
                    return
                ready_since, self._times.ready_since = self._times.ready_since, None
                healthy = None if ready_since is None else loop.time() - ready_since
                last_line = last_lines[-1] if last_lines else ""
                delay = self._policy.after_death(status, healthy_seconds=healthy, last_line=last_line)
                if delay is None:
                    raise GaveUp(self.name, status, last_lines)
                self._log(f"{self.name} {exit_words(status, last_lines)}; starting it again in {delay:g} s")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay)
        finally:
            self._ended.set()

    async def _live(self) -> tuple[int, list[str]]:
        program = self.program
        if self.starts == 0:
            program = replace(program, env={**program.env, **program.first_env})
        try:
            self.process = process = await Process.start(
                program,
                on_line=lambda line: self._on_line(self.name, line),
                on_report=lambda report: self._on_report(self, report),
            )
        except OSError as error:  # no room for a process, or no descriptor: that may pass
            return NOT_STARTED, [error.strerror or str(error)]
        self.starts += 1
        self._times.started_at = asyncio.get_running_loop().time()
        self._on_start(self)
        try:
            if self._stopping.is_set():  # stopped while it was being started
                process.terminate()
            return await process.follow(), list(process.last_lines)
        finally:
            self.process = None

    async def stop(self) -> None:
        """Send SIGTERM, kill the child when its time is up, and wait until it has ended."""
        self._stopping.set()
        if self.process is not None:
            self.process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), self.program.stop_seconds)
            return
        self.kill()
        await self._ended.wait()

    def kill(self) -> None:
        """End the child now and do not start another."""
        self._stopping.set()
        if self.process is not None:
            self.was_killed = True
            self.process.kill()


def exit_words(status: int, last_lines: Sequence[str] = ()) -> str:
    """Describe an exit status of `subprocess`, or NOT_STARTED, whose last line is the reason."""
    if status == NOT_STARTED:
        return f"could not be started ({last_lines[-1]})" if last_lines else "could not be started"
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-status}"
