"""Runs a frontend and workers as child processes: starts, watches, replaces and stops them in the right order."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dynamo.cli.console import Console
from dynamo.cli.hangup import hangups
from dynamo.cli.local_processes import LocalProcesses, ModelKeeper
from dynamo.cli.readiness import Address, Announcement, read_load, takes_requests
from dynamo.runtime.base.forever import forever
from dynamo.scaling.decide import ScaleRules
from dynamo.settings.command import EXIT_USAGE
from dynamo.supervise.newcomer import Newcomers
from dynamo.supervise.process import GaveUp, SupervisedProcess
from dynamo.supervise.rolling import RollingRestart
from dynamo.supervise.scaling import LoadReading, Scaling

if TYPE_CHECKING:
    from dynamo.cli.serve import ServeOptions

# `dynamo serve --reload`: replace the workers when a source file of the engine changes.


POLL_SECONDS: Final = 0.5
MAX_FILES: Final = 5000  # a home directory by mistake must not cost a core
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})


async def watch_sources(directory: Path, on_change: Callable[[str], None]) -> None:
    """Call `on_change(text)` each time Python files below `directory` have changed and then held still for one poll.

    Editors and `git checkout` write several files in a row: one call for all of them. Their bytecode files are removed
    first. Never returns.
    """
    seen = source_times(directory)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        now = source_times(directory)
        changed = changed_files(seen, now)
        if not changed:
            continue
        while True:
            await asyncio.sleep(POLL_SECONDS)
            later = source_times(directory)
            if later == now:
                break
            now = later
        changed, seen = changed_files(seen, now), now
        if changed:
            _remove_bytecode(directory, changed)
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            on_change(f"{changed[0]}{more} changed")


def source_times(directory: Path) -> dict[str, int]:
    """Return the modification time (ns) of each Python file below `directory`, at most `MAX_FILES` of them."""
    times: dict[str, int] = {}
    for path in _sources(directory):
        if len(times) >= MAX_FILES:
            break
        try:
            times[os.path.relpath(path, directory)] = os.stat(path).st_mtime_ns
        except FileNotFoundError:  # removed since it was listed
            continue
    return times


def changed_files(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return the files that are new, removed or written since."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _remove_bytecode(directory: Path, names: list[str]) -> None:
    """Make Python compile these files again.

    It takes a bytecode file for current when the source has the same size and the same second of modification, and two
    saves within a second are common.
    """
    for name in names:
        with contextlib.suppress(OSError):  # none was written, or the directory cannot be written to
            os.unlink(importlib.util.cache_from_source(os.path.join(directory, name)))


def _sources(directory: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        )
        yield from (os.path.join(folder, name) for name in sorted(files) if name.endswith(".py"))


# How `dynamo serve` ends: what went wrong, the last lines for the terminal, and the exit status.


EXIT_KILLED: Final = 1


class Ending:
    """Collects the reasons; the first failure and the first refusal count."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._failure: GaveUp | None = None
        self._refusal: str | None = None
        self._killed_by: signal.Signals | None = None

    def on_failure(self, failure: GaveUp) -> None:
        """Take the failure of a process that cannot be kept running."""
        self._failure = self._failure or failure

    def on_refusal(self, reason: str) -> None:
        """Take what a worker reported as the operator's mistake."""
        self._refusal = self._refusal or reason

    def on_kill(self, number: signal.Signals) -> None:
        """Take the second signal, for which all processes are killed."""
        self._killed_by = number

    def report(self, processes: Iterable[SupervisedProcess]) -> int:
        """Print how it ended and return the exit status of the command."""
        if self._failure is not None:
            return self._report_failure(self._failure)
        self._console.release()
        if self._killed_by is not None:
            return 128 + self._killed_by
        killed = [process.name for process in processes if process.was_killed]
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
        if failure.status != EXIT_USAGE:  # then the child's own line has it all
            self._console.complain(f"dynamo serve: {failure}. Its last lines:")
        for line in failure.last_lines:
            self._console.complain(line)
        if failure.status != EXIT_USAGE and failure.last_lines:
            self._console.complain(
                f"dynamo serve: error: {failure.name} cannot be kept running: {failure.last_lines[-1]}"
            )
        return failure.status if failure.status > 0 else 128 - failure.status if failure.status else EXIT_KILLED


class LocalCluster:
    """A frontend and workers on this machine; `await LocalCluster(...).run()` serves until a signal."""

    def __init__(
        self,
        options: ServeOptions,
        console: Console,
        listeners: Sequence[socket.socket],
        address: Address,
        store: Path,
    ) -> None:
        """`listeners` are closed at the beginning of the end, so that no client connects to a socket without a frontend."""
        self._options = options
        self._console = console
        self._listeners = listeners
        self._stop = asyncio.Event()
        self._sources: asyncio.Future[Path] | None = None  # where the engine's files are, once a worker imported them
        self._group = asyncio.TaskGroup()
        descriptors = [each.fileno() for each in listeners]
        self._processes = LocalProcesses(options, console, store, descriptors, self._group, on_report=self._on_report)
        self._announcement = Announcement(
            console, self._processes, address, store, options.flags.admin_port or address.port
        )
        self._ending = Ending(console)
        self._newcomers = Newcomers(
            partial(takes_requests, address), console.say, limit_seconds=options.flags.replace_seconds
        )
        self._restart = RollingRestart(self._processes, self._newcomers, console.say)
        self._scaling: Scaling | ModelKeeper | None = None
        if options.residents is not None:
            self._scaling = options.residents(self._processes, console.say)
        elif not options.flags.workers.is_fixed:
            self._scaling = self._made_scaling(address)

    def _made_scaling(self, address: Address) -> Scaling:
        flags = self._options.flags

        async def read() -> LoadReading | None:
            model = self._announcement.model
            return None if model is None else await read_load(address, model)

        rules = ScaleRules(
            flags.workers.least, flags.workers.most, flags.scale_target, down_after_seconds=flags.scale_down_after
        )
        say = self._console.say
        return Scaling(self._processes, self._newcomers, read, say, rules, is_advice_only=flags.scale_advise)

    async def run(self) -> int:
        """Serve until a signal or a failure; return the exit status of the command."""
        self._console.hold()
        with stopping_signals(self._asked_to_stop, self._asked_again):
            async with (
                hangups(restart=self._asked_to_restart, terminal_gone=self._terminal_gone),
                self._group as group,
            ):
                beside = [
                    group.create_task(forever(self._announcement.follow_frontend, "readiness"), name="readiness"),
                    group.create_task(forever(self._restart.run, "rolling restart"), name="rolling restart"),
                ]
                if self._scaling is not None:
                    beside.append(group.create_task(forever(self._scaling.run, "scaling"), name="scaling"))
                if self._options.flags.reload:
                    self._sources = asyncio.get_running_loop().create_future()
                    beside.append(
                        group.create_task(forever(partial(self._reload, self._sources), "reload"), name="reload")
                    )
                for process in self._processes.all():
                    group.create_task(self._keep(process), name=process.name)
                await self._stop.wait()
                for task in beside:
                    task.cancel()
                for listener in self._listeners:
                    listener.close()
                await self._processes.stop()
        return self._ending.report(self._processes.all())

    async def _keep(self, process: SupervisedProcess) -> None:
        try:
            await process.keep()
        except GaveUp as failure:
            self._ending.on_failure(failure)
            self._stop.set()

    def _on_report(self, process: SupervisedProcess, report: Mapping[str, Any]) -> None:
        """Take a worker's report (`child.Reports`)."""
        match report["event"]:
            case "configured":
                is_own = process is not self._processes.upstream
                if is_own and self._sources is not None and not self._sources.done() and report.get("sources"):
                    self._sources.set_result(Path(report["sources"]))
                self._announcement.on_configured(process, report)
            case "refused":
                self._ending.on_refusal(report["reason"])
            case "serving":
                self._processes.instances[process] = report["instance_id"]
                if not self._newcomers.registered(process, report):
                    process.mark_ready()
                self._announcement.on_serving(process, report)
        scaling = None if process is self._processes.upstream else self._scaling
        if scaling is not None and not isinstance(scaling, Scaling):
            scaling.serves(process, report)

    # -- signals and changed files -----------------------------------------------------------------------------------

    def _asked_to_restart(self) -> None:
        if not self._stop.is_set():
            self._restart.request("SIGHUP")

    def _terminal_gone(self) -> None:
        if not self._stop.is_set():
            self._console.say("SIGHUP: the terminal is gone: stopping")
            self._stop.set()

    def _asked_to_stop(self, number: signal.Signals) -> None:
        self._console.release()
        self._console.say(f"{number.name}: stopping (again: at once)")
        self._stop.set()

    def _asked_again(self, number: signal.Signals) -> None:
        self._ending.on_kill(number)
        for process in self._processes.all():
            process.kill()

    async def _reload(self, sources: asyncio.Future[Path]) -> None:
        root = await sources
        self._console.say(f"replacing the workers when a Python file below {root} changes")
        await watch_sources(root, self._sources_changed)

    def _sources_changed(self, what: str) -> None:
        if not self._stop.is_set():
            self._restart.request(what)


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
