"""Run the collected tests in processes that are forked after the collection (`--forks N`).

With pytest-xdist each process imports and collects everything: 4.5 s of CPU for each, 11 s on a fresh clone, where the
assertions of 350 files are rewritten first. Here that is done once. Neighbours stay together, as their fixtures are shared:
a process takes runs of tests, shorter ones towards the end.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest

LONGEST_RUN = 24
ENDING_SECONDS = 20.0  # for the fixtures of a test that is cut, which end the processes that it started
RUNS_LEFT_FOR_EACH = 6  # of what is left, a process takes this part of its share: the ends of all are near each other


@dataclass
class _Child:
    """A forked process: `given` are the indices it has and has not finished; `running` is the one it is at."""

    pid: int
    connection: Connection
    given: deque[int] = field(default_factory=deque)
    running: int | None = None


class ForkedRun:
    """Replaces the loop over the tests of one process; everything else of pytest stays."""

    def __init__(self, forks: int) -> None:
        self._forks = forks
        self._children: list[_Child] = []
        self._waiting: deque[int] = deque()
        self._number = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Give out the tests until all are reported; return None where pytest's own loop is to run."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        self._waiting.extend(range(len(session.items)))
        try:
            for _ in range(min(self._forks, len(session.items))):
                self._fork(session)
            while self._children:
                by_connection = {child.connection: child for child in self._children}
                for connection in wait(list(by_connection)):
                    self._read(session, by_connection[connection])  # type: ignore[index]
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            self._cut()
        return True

    def _cut(self) -> None:
        """End the processes that are left: their fixtures are taken down, so that no server of a test outlives it."""
        for child in self._children:
            child.connection.close()
            os.kill(child.pid, signal.SIGTERM)
        until = time.monotonic() + ENDING_SECONDS
        for child in self._children:
            while not os.waitpid(child.pid, os.WNOHANG)[0]:
                if time.monotonic() >= until:
                    os.kill(child.pid, signal.SIGKILL)
                    os.waitpid(child.pid, 0)
                    break
                time.sleep(0.02)
        self._children.clear()

    def _fork(self, session: pytest.Session) -> None:
        self._number += 1
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            ours.close()
            _run_in_child(session, theirs, self._number)
        theirs.close()
        self._children.append(_Child(pid, ours))

    def _read(self, session: pytest.Session, child: _Child) -> None:
        try:
            kind, value = child.connection.recv()
        except EOFError:
            self._end(session, child)
            return
        hooks = session.config.hook
        if kind == "report":
            hooks.pytest_runtest_logreport(
                report=hooks.pytest_report_from_serializable(config=session.config, data=value)
            )
        elif kind == "start":
            child.running = value
        elif kind == "end":
            child.given.remove(value)
            child.running = None
        elif kind == "more":
            run = self._next_run()
            child.given.extend(run)
            child.connection.send(run)
        elif kind == "broken":
            raise pytest.UsageError(f"a process of tests failed outside of any test:\n{value}")

    def _next_run(self) -> list[int]:
        length = len(self._waiting) // (self._forks * RUNS_LEFT_FOR_EACH)
        return [self._waiting.popleft() for _ in range(min(max(length, 1), LONGEST_RUN, len(self._waiting)))]

    def _end(self, session: pytest.Session, child: _Child) -> None:
        self._children.remove(child)
        child.connection.close()
        _, status = os.waitpid(child.pid, 0)
        if child.running is not None:
            self._report_death(session, session.items[child.running], status)
            child.given.remove(child.running)
        elif status or child.given:
            raise pytest.UsageError(f"a process of tests ended between two tests, status {status}")
        self._waiting.extendleft(reversed(child.given))
        if self._waiting and child.running is not None:
            self._fork(session)

    def _report_death(self, session: pytest.Session, item: pytest.Item, status: int) -> None:
        text = f"the process of this test ended in it: exit code {os.waitstatus_to_exitcode(status)}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        session.config.hook.pytest_runtest_logreport(report=report)


class _ToParent:
    """Sends each report to the process that writes them."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))


def _run_in_child(session: pytest.Session, connection: Connection, number: int) -> NoReturn:
    status = 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    atexit._clear()  # what was registered while the tests were collected is the parent's to run
    try:
        _part_from_parent(session.config, connection, number)
        _run_tests(session, connection)
        status = 0
    except BaseException:  # whatever it is, the parent is to print it
        text = traceback.format_exc()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            session._setupstate.teardown_exact(None)
        finally:
            with suppress(OSError):  # the parent has cut this process
                connection.send(("broken", text))
    finally:
        connection.close()
        atexit._run_exitfuncs()  # temporary folders of the tests' own, for one
        os._exit(status)  # not the endings of the parent: its folders are still in use


def _part_from_parent(config: pytest.Config, connection: Connection, number: int) -> None:
    """Take the capture files, the temporary folder and the output that the fork left shared."""
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    manager.stop_global_capturing()
    manager.start_global_capturing()
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"fork{number}"
    folders._basetemp.mkdir(mode=0o700)
    reporter: Any = config.pluginmanager.getplugin("terminalreporter")
    reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    config.pluginmanager.register(_ToParent(config, connection))


def _run_tests(session: pytest.Session, connection: Connection) -> None:
    given: deque[int] = deque()

    def ask() -> None:
        connection.send(("more", None))
        given.extend(connection.recv())

    ask()
    while given:
        index = given.popleft()
        if not given:
            ask()  # now, because the end of a test takes down what the next one does not need
        following = session.items[given[0]] if given else None
        connection.send(("start", index))
        session.config.hook.pytest_runtest_protocol(item=session.items[index], nextitem=following)
        connection.send(("end", index))
    _fail_on_leftovers()


def _fail_on_leftovers() -> None:
    """Collect what is left; raise RuntimeError for an object that complains about how it was left."""
    complaints: list[str] = []
    sys.unraisablehook = lambda left: complaints.append(
        f"{left.err_msg or 'unraisable'}: {left.exc_value!r}: {left.object!r}"
    )
    for _ in range(3):
        gc.collect()
    if complaints:
        raise RuntimeError("\n".join(complaints))
