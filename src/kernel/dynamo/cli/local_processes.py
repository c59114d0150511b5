"""The processes of `dynamo serve`: the frontend, and the workers, those on their way out included."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo.cli.console import Console
from dynamo.cli.programs import programs, worker_program
from dynamo.supervise.backoff import RestartPolicy
from dynamo.supervise.process import Program, SupervisedProcess

if TYPE_CHECKING:
    from dynamo.cli.serve import ServeOptions

OnReport = Callable[[SupervisedProcess, Mapping[str, Any]], None]


class LocalProcesses:
    """Not started yet: the code that has them keeps them. It is the `WorkerPool` of a rolling restart, and the
    `ScalablePool` of scaling."""

    def __init__(
        self,
        options: ServeOptions,
        console: Console,
        store: Path,
        listener: int,
        group: asyncio.TaskGroup,
        *,
        on_report: OnReport,
    ) -> None:
        """`listener` is the descriptor of the frontend's socket. `group` runs what a restart spawns."""
        self._options = options
        self._console = console
        self._store = store
        self._group = group
        self._on_report = on_report
        self.frontend_started = asyncio.Event()
        frontend, *workers = programs(options, listener, store, os.environ)
        self.frontend = self._supervised(frontend)
        self.workers = [self._supervised(worker) for worker in workers]
        # Of all workers that run, those on their way out included.
        self._slots = {worker: slot for slot, worker in enumerate(self.workers)}
        self.instances: dict[SupervisedProcess, int] = {}  # the ids that workers registered with

    def all(self) -> list[SupervisedProcess]:
        """Return every process that runs."""
        return [self.frontend, *self._slots]

    @property
    def admin_port(self) -> int | None:
        """The port of the admin routes; None: that of the API, or one that only the log names."""
        return self._options.flags.admin_port or None

    def missing(self) -> str:
        """Describe what is waited for before a model can be listed."""
        loading = [worker.name for worker in self.workers if not worker.is_ready]
        if not self.workers:
            return "a worker, which is started with the next request"
        if len(loading) == len(self.workers):
            return f"{', '.join(loading)} to load its model" if len(loading) == 1 else f"{', '.join(loading)} to load"
        return "the frontend to list a model"

    async def stop(self) -> None:
        """Stop all. The frontend goes first: it lets its requests end, and they need the workers for that."""
        await self.frontend.stop()
        await asyncio.gather(*(worker.stop() for worker in self._slots))

    # -- what a rolling restart needs ----------------------------------------------------------------------------

    def add_replacement(self, leaving: SupervisedProcess, policy: RestartPolicy) -> SupervisedProcess:
        """Return the process that replaces `leaving`, not started yet."""
        return self._added(leaving.name, policy)

    def remove(self, process: SupervisedProcess) -> None:
        """Forget a worker that was stopped."""
        del self._slots[process]
        self.instances.pop(process, None)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` until the command ends."""
        return self._group.create_task(work, name=name)

    # -- what scaling needs ----------------------------------------------------------------------------------------

    def add_worker(self, policy: RestartPolicy) -> SupervisedProcess:
        """Return one more worker, not started yet and not in `workers`."""
        taken = {worker.name for worker in self._slots}
        name = next(name for number in range(1, len(taken) + 2) if (name := f"worker-{number}") not in taken)
        return self._added(name, policy)

    def instance_of(self, worker: SupervisedProcess) -> int | None:
        """Return the instance id that a worker registered with; None: not yet."""
        return self.instances.get(worker)

    def _added(self, name: str, policy: RestartPolicy) -> SupervisedProcess:
        slot = next(number for number in range(len(self._slots) + 1) if number not in self._slots.values())
        new = self._supervised(worker_program(self._options, self._store, os.environ, name, slot), policy)
        self._slots[new] = slot
        return new

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

    def _log_death(self, text: str) -> None:
        self._console.release()  # the held lines of the process that died give the reason
        self._console.say(text)

    def _started(self, process: SupervisedProcess) -> None:
        if process is self.frontend:
            self.frontend_started.set()
