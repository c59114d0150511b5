"""Runs a frontend and workers as child processes: starts, watches, replaces and stops them in the right order."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dynamo.cli.console import Console
from dynamo.cli.hangup import hangups
from dynamo.cli.readiness import (
    PROGRESS_SECONDS,
    Address,
    ready_text,
    takes_requests,
    wait_listed,
)
from dynamo.cli.reload import watch_sources
from dynamo.settings.command import EXIT_USAGE
from dynamo.supervise.backoff import RestartPolicy
from dynamo.supervise.process import GaveUp, Program, SupervisedProcess, exit_words
from dynamo.supervise.rolling import POLL_SECONDS, RollingRestart, WorkerRefused

if TYPE_CHECKING:
    from dynamo.cli.serve import ServeOptions

__all__ = ["LocalCluster", "programs", "stopping_signals", "worker_program"]

KILL_RESERVE_SECONDS: Final = 5.0  # the child's own deadline comes first; this one is for a child that cannot keep it
EXIT_KILLED: Final = 1

GRACE_SECONDS: Final = 0.3
"""How long a worker still takes requests once it has left the store: the frontend looks there every 0.1 s."""


class LocalCluster:
    """A frontend and workers on this machine; `await LocalCluster(...).run()` serves until a signal."""

    def __init__(
        self, options: ServeOptions, console: Console, listener: socket.socket, address: Address, store: Path
    ) -> None:
        """`listener` is closed at the beginning of the end, so that no client connects to a socket without a frontend."""
        self._console = console
        self._listener = listener
        self._address = address
        self._store = store
        self._stop = asyncio.Event()
        self._failure: GaveUp | None = None
        self._refusal: str | None = None  # what a worker reported as the operator's mistake
        self._killed_by: signal.Signals | None = None
        self._endpoints: dict[str, str] = {}
        self._served: dict[str, tuple[str, int]] = {}  # worker -> (model, instance id) that it reported last
        self._sources: Path | None = None  # where the engine's files are, once a worker has imported them
        self._sources_known = asyncio.Event()
        self._surfaces = ""
        self._is_table_shown = False
        self._is_announced = False
        self._frontend_started = asyncio.Event()
        self._options = options
        frontend, *workers = programs(options, listener.fileno(), store, os.environ)
        self._frontend = self._supervised(frontend)
        self.workers = [self._supervised(worker) for worker in workers]
        # Of all workers that run, those on their way out included.
        self._slots = {worker: slot for slot, worker in enumerate(self.workers)}
        self._group = asyncio.TaskGroup()
        self._restart = RollingRestart(
            self, partial(takes_requests, address), console.say, limit_seconds=options.replace_seconds
        )

    def _supervised(self, program: Program, policy: RestartPolicy | None = None) -> SupervisedProcess:
        self._console.join(program.name)
        return SupervisedProcess(
            program,
            log=self._log_death,
            on_line=self._console.pass_on,
            on_report=self._on_report,
            on_start=self._started,
            policy=policy,
        )

    @property
    def _processes(self) -> list[SupervisedProcess]:
        return [self._frontend, *self._slots]

    async def run(self) -> int:
        """Serve until a signal or a failure; return the exit status of the command."""
        self._console.hold()
        with stopping_signals(self._asked_to_stop, self._asked_again):
            async with (
                hangups(restart=self._asked_to_restart, terminal_gone=self._terminal_gone),
                self._group as group,
            ):
                for process in self._processes:
                    group.create_task(self._keep(process), name=process.name)
                beside = [
                    group.create_task(self._watch_frontend(), name="readiness"),
                    group.create_task(self._restart.run(), name="rolling restart"),
                    group.create_task(self._reload(), name="reload"),
                ]
                await self._stop.wait()
                for task in beside:
                    task.cancel()
                self._listener.close()
                # The frontend first: it lets its requests end, and they need the workers for that.
                await self._frontend.stop()
                await asyncio.gather(*(worker.stop() for worker in self._slots))
        return self._status()

    # -- a rolling restart -------------------------------------------------------------------------------------------

    def _asked_to_restart(self) -> None:
        if not self._stop.is_set():
            self._restart.request("SIGHUP")

    def _terminal_gone(self) -> None:
        if not self._stop.is_set():
            self._console.say("SIGHUP: the terminal is gone: stopping")
            self._stop.set()

    def add_replacement(self, leaving: SupervisedProcess, policy: RestartPolicy) -> SupervisedProcess:
        """Return the process that replaces `leaving`, not started yet."""
        slot = next(number for number in range(len(self._slots) + 1) if number not in self._slots.values())
        new = self._supervised(worker_program(self._options, self._store, os.environ, leaving.name, slot), policy)
        self._slots[new] = slot
        return new

    def remove(self, process: SupervisedProcess) -> None:
        """Forget a worker that was stopped."""
        del self._slots[process]

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` until the command ends."""
        return self._group.create_task(work, name=name)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _asked_to_stop(self, number: signal.Signals) -> None:
        self._console.release()
        self._console.say(f"{number.name}: stopping (again: at once)")
        self._stop.set()

    def _asked_again(self, number: signal.Signals) -> None:
        self._killed_by = number
        for process in self._processes:
            process.kill()

    def _status(self) -> int:
        if self._failure is not None:
            return self._report_failure(self._failure)
        self._console.release()
        if self._killed_by is not None:
            return 128 + self._killed_by
        killed = [process.name for process in self._processes if process.was_killed]
        if killed:
            self._console.complain(f"dynamo serve: {', '.join(killed)} did not end in time and had to be killed")
            return EXIT_KILLED
        self._console.say("stopped")
        return 0

    def _report_failure(self, failure: GaveUp) -> int:
        self._console.release(forget=True)
        if failure.status == EXIT_USAGE and self._refusal is not None:
            self._console.complain(f"dynamo serve: error: {self._refusal}")
            return EXIT_USAGE
        if failure.status != EXIT_USAGE:  # then the child's own line says it all
            self._console.complain(
                f"dynamo serve: {failure.name} {exit_words(failure.status)} and cannot be kept running. Its last lines:"
            )
        for line in failure.last_lines:
            self._console.complain(line)
        return failure.status if failure.status > 0 else 128 - failure.status if failure.status else EXIT_KILLED

    # -- what happens meanwhile --------------------------------------------------------------------------------------

    async def _keep(self, process: SupervisedProcess) -> None:
        try:
            await process.keep()
        except GaveUp as failure:
            self._failure = self._failure or failure
            self._stop.set()

    def _log_death(self, text: str) -> None:
        self._console.release()  # the held lines of the process that died give the reason
        self._console.say(text)

    def _started(self, process: SupervisedProcess) -> None:
        if process is self._frontend:
            self._frontend_started.set()

    def _on_report(self, process: SupervisedProcess, report: Mapping[str, Any]) -> None:
        """Take a worker's report (`child.Reports`)."""
        match report["event"]:
            case "configured":
                self._endpoints[process.name] = report["endpoint"]
                self._surfaces = report["surfaces"]
                if self._options.reload and self._sources is None and report.get("sources"):
                    self._sources = Path(report["sources"])
                    self._sources_known.set()
                self._show_table(report["endpoint"])
            case "refused":
                self._refusal = self._refusal or report["reason"]
            case "serving":
                if not self._restart.on_registered(process, report):
                    process.mark_ready()
                self._served[process.name] = report["model"], report["instance_id"]
                again = " again" if process.starts > 1 else ""
                pid = process.process.pid if process.process is not None else 0
                self._console.say(
                    f"{process.name} (pid {pid}) serves {self._endpoints[process.name]}{again} at {report['address']}"
                )

    def _show_table(self, endpoint: str) -> None:
        """Print the processes once, when the first worker has read its command line: all workers have the same one."""
        if self._is_table_shown:
            return
        self._is_table_shown = True
        rows = [
            (process.name, str(process.process.pid) if process.process else "-", where)
            for process, where in ((p, self._address.url if p is self._frontend else endpoint) for p in self._processes)
        ]
        self._console.table(("process", "pid", "address"), rows)
        self._console.say(f"they find each other in {self._store}")
        self._console.release()

    async def _watch_frontend(self) -> None:
        """Wait, after every start of the frontend, until it answers and lists a model, and print that."""
        while True:
            await self._frontend_started.wait()
            self._frontend_started.clear()
            models = await wait_listed(
                self._address, self._console, waits_for=self._missing, on_answer=self._frontend.mark_ready
            )
            if not self._is_announced:
                await self._all_taken()
                self._is_announced = True
                self._console.say("Ready", strong=True)
                self._console.say(ready_text(self._address, models[0], self._surfaces))
            else:
                self._console.say(f"frontend serves again at {self._address.url}")

    async def _all_taken(self) -> None:
        """Wait until the frontend sends requests to every requested worker."""
        loop = asyncio.get_running_loop()
        begun = reported_at = loop.time()
        for worker in self.workers:
            while not await self._is_taken(worker):
                if loop.time() - reported_at >= PROGRESS_SECONDS:
                    reported_at = loop.time()
                    self._console.say(f"waiting for {worker.name} ({reported_at - begun:.0f} s)")
                await asyncio.sleep(POLL_SECONDS)

    async def _is_taken(self, worker: SupervisedProcess) -> bool:
        if worker.name not in self._served:
            return False
        try:
            return await takes_requests(self._address, *self._served[worker.name])
        except WorkerRefused as refusal:
            self._console.complain(f"the frontend refuses {worker.name} ({refusal}); the other workers serve")
            return True  # for good: the card of the worker differs

    async def _reload(self) -> None:
        await self._sources_known.wait()
        assert self._sources is not None
        self._console.say(f"replacing the workers when a Python file below {self._sources} changes")
        await watch_sources(self._sources, self._sources_changed)

    def _sources_changed(self, what: str) -> None:
        if not self._stop.is_set():
            self._restart.request(what)

    def _missing(self) -> str:
        loading = [worker.name for worker in self.workers if not worker.is_ready]
        if len(loading) == len(self.workers):
            return f"{', '.join(loading)} to load its model" if len(loading) == 1 else f"{', '.join(loading)} to load"
        return "the frontend to list a model"


def programs(options: ServeOptions, listener: int, store: Path, environ: Mapping[str, str]) -> list[Program]:
    """Return the programs to start: the frontend, then the workers."""
    workers = (worker_program(options, store, environ, f"worker-{slot + 1}", slot) for slot in range(options.workers))
    found = [_frontend_program(options, listener, store, environ), *workers]
    return [replace(program, first_env=_chaos(options, program.name)) for program in found]


def _frontend_program(options: ServeOptions, listener: int, store: Path, environ: Mapping[str, str]) -> Program:
    env = _environment(store, environ)
    if options.store is None:  # a private store holds what these workers register, whatever its namespace
        for name in ("DYN_NAMESPACE", "DYN_NAMESPACE_PREFIX"):
            env.pop(name, None)
    limits = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": 5.0, "DYN_HTTP_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": 0.0}
    stop_seconds = sum(_seconds(env, name, default) for name, default in limits.items()) + KILL_RESERVE_SECONDS
    arguments = _child(
        *("frontend", stop_seconds, "--listener", str(listener), "--"),
        *("--http-host", options.http_host, "--http-port", str(options.http_port)),
        *(() if options.admin_port is None else ("--admin-port", str(options.admin_port))),
        *options.frontend_args,
        *(() if options.frontend_workers is None else ("--workers", str(options.frontend_workers))),
    )
    return Program("frontend", arguments, env, stop_seconds, (listener,))


def worker_program(options: ServeOptions, store: Path, environ: Mapping[str, str], name: str, slot: int) -> Program:
    """Return a worker's program; no two that run at a time have the same `slot`, as fixed ports count up by it."""
    env = _environment(store, environ)
    limits = {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": 30.0, "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": 5.0}
    deadline = sum(_seconds(env, name, default) for name, default in limits.items()) + KILL_RESERVE_SECONDS
    ports = {port: _nth_port(env.get(port, ""), slot) for port in ("DYN_SYSTEM_PORT", "DYN_TCP_RPC_PORT")}
    env |= {port: value for port, value in ports.items() if value}
    if env.pop("DYN_ADMIN_PORT", "") and env.get("DYN_SYSTEM_HOST"):  # the number is the frontend's
        env["DYN_ADMIN_PORT"] = "0"
    arguments = _child("worker", deadline, "--engine", options.engine, "--", *options.engine_args)
    return Program(name, arguments, env, deadline)


def _environment(store: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every process."""
    # A process that takes the process of another is well: the plan is for the first incarnation of each (`programs`).
    env = {name: value for name, value in environ.items() if name != "DYN_CHAOS"}
    env |= {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(store),
        "DYN_REQUEST_PLANE": "tcp",
        "PYTHONUNBUFFERED": "1",  # lines arrive when they are written
    }
    env.setdefault("DYN_TCP_RPC_HOST", "127.0.0.1")
    env.setdefault("DYN_EVENT_PLANE_HOST", "127.0.0.1")
    env.setdefault("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", str(GRACE_SECONDS))
    return env


def _chaos(options: ServeOptions, name: str) -> Mapping[str, str]:
    if options.chaos is None:
        return {}
    return {"DYN_CHAOS": str(options.chaos), "DYN_ALLOW_CHAOS": "1", "DYN_CHAOS_NAME": name}


def _child(role: str, kill_after: float, *more: str) -> tuple[str, ...]:
    head = (sys.executable, "-m", "dynamo.cli.child", role, "--kill-after", str(kill_after), "--report", "{report}")
    return (*head, *more)


def _nth_port(text: str, index: int) -> str:
    """Return the fixed port of the worker in slot `index`: ports count up. 0, and a text that is not a number, stay as they are."""
    return str(int(text) + index) if text.isascii() and text.isdigit() and int(text) > 0 else text


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    """Read a number as the children do, which warn about a value that cannot be read.

    Importing their reader would cost more than it saves: this process has none of the runtime in it.
    """
    try:
        value = float(env.get(name, "").strip() or default)
    except ValueError:
        return default
    return max(0.0, value) if math.isfinite(value) else default


@contextmanager
def stopping_signals(first: Any, again: Any) -> Iterator[None]:
    """Call `first(signal)` for the first SIGINT or SIGTERM on the loop, `again(signal)` for every later one."""
    loop = asyncio.get_running_loop()
    was_asked = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal was_asked
        (again if was_asked else first)(number)
        was_asked = True

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
