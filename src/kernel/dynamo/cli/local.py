"""Runs a frontend and workers as child processes: starts, watches, replaces and stops them in the right order."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo.cli.announcement import Announcement
from dynamo.cli.console import Console
from dynamo.cli.ending import Ending
from dynamo.cli.hangup import hangups
from dynamo.cli.local_processes import LocalProcesses
from dynamo.cli.readiness import Address, read_load, takes_requests
from dynamo.cli.reload import watch_sources
from dynamo.scaling.decide import ScaleRules
from dynamo.supervise.newcomer import Newcomers
from dynamo.supervise.process import GaveUp, SupervisedProcess
from dynamo.supervise.rolling import RollingRestart
from dynamo.supervise.scaling import LoadReading, Scaling

if TYPE_CHECKING:
    from dynamo.cli.serve import ServeOptions

__all__ = ["LocalCluster", "stopping_signals"]


class LocalCluster:
    """A frontend and workers on this machine; `await LocalCluster(...).run()` serves until a signal."""

    def __init__(
        self, options: ServeOptions, console: Console, listener: socket.socket, address: Address, store: Path
    ) -> None:
        """`listener` is closed at the beginning of the end, so that no client connects to a socket without a frontend."""
        self._options = options
        self._console = console
        self._listener = listener
        self._stop = asyncio.Event()
        self._sources: asyncio.Future[Path] | None = None  # where the engine's files are, once a worker imported them
        self._group = asyncio.TaskGroup()
        self._processes = LocalProcesses(
            options, console, store, listener.fileno(), self._group, on_report=self._on_report
        )
        self._announcement = Announcement(console, self._processes, address, store)
        self._ending = Ending(console)
        self._newcomers = Newcomers(
            partial(takes_requests, address), console.say, limit_seconds=options.flags.replace_seconds
        )
        self._restart = RollingRestart(self._processes, self._newcomers, console.say)
        self._scaling = None if options.flags.workers.is_fixed else self._made_scaling(address)

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
                    group.create_task(self._announcement.follow_frontend(), name="readiness"),
                    group.create_task(self._restart.run(), name="rolling restart"),
                ]
                if self._scaling is not None:
                    beside.append(group.create_task(self._scaling.run(), name="scaling"))
                if self._options.flags.reload:
                    self._sources = asyncio.get_running_loop().create_future()
                    beside.append(group.create_task(self._reload(self._sources), name="reload"))
                for process in self._processes.all():
                    group.create_task(self._keep(process), name=process.name)
                await self._stop.wait()
                for task in beside:
                    task.cancel()
                self._listener.close()
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
                if self._sources is not None and not self._sources.done() and report.get("sources"):
                    self._sources.set_result(Path(report["sources"]))
                self._announcement.on_configured(process, report)
            case "refused":
                self._ending.on_refusal(report["reason"])
            case "serving":
                self._processes.instances[process] = report["instance_id"]
                if not self._newcomers.registered(process, report):
                    process.mark_ready()
                self._announcement.on_serving(process, report)

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
