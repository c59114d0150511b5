"""The processes of `dynamo serve`: the frontend, and the workers, those on their way out included."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from dynamo.cli.console import Console
from dynamo.supervise.backoff import RestartPolicy
from dynamo.supervise.process import Program, SupervisedProcess

if TYPE_CHECKING:
    from dynamo.cli.serve import ServeOptions
    from dynamo.cli.serve_flags import ServeFlags


# The programs of `dynamo serve`: command line, environment and time to end of the frontend and of each worker.

KILL_RESERVE_SECONDS: Final = 5.0  # the child's own deadline comes first; this one is for a child that cannot keep it

UPSTREAM: Final = "upstream"  # the engine, and the name of its process

GRACE_SECONDS: Final = 0.3
"""How long a worker still takes requests once it has left the store: the frontend reads it every 0.1 s."""


def http_arguments(flags: ServeFlags) -> tuple[str, ...]:
    """Return the flags of a frontend that state where it is served."""
    found = {
        "--http-host": flags.http_host,
        "--http-port": "off" if flags.http_port is None else str(flags.http_port),
        "--uds": flags.uds,
        "--root-path": flags.root_path or None,
        "--admin-port": None if flags.admin_port is None else str(flags.admin_port),
        "--keys": flags.keys,
    }
    return tuple(part for flag, value in found.items() if value is not None for part in (flag, value))


def programs(options: ServeOptions, listeners: Sequence[int], store: Path, environ: Mapping[str, str]) -> list[Program]:
    """Return the programs to start: the frontend, the workers, and the one for the models of another server beside those."""
    workers = (
        worker_program(options, store, environ, f"worker-{slot + 1}", slot)
        for slot in range(0 if options.many else options.flags.workers.at_first)
    )
    found = [_frontend_program(options, listeners, store, environ), *workers]
    if options.upstream_args:
        flags = replace(options.flags, served_names=())
        upstream = replace(options, flags=flags, engine=UPSTREAM, engine_args=options.upstream_args, serve_as="")
        found.append(worker_program(upstream, store, environ, UPSTREAM, len(found) - 1))
    return [replace(program, first_env=_chaos(options, program.name)) for program in found]


def _frontend_program(
    options: ServeOptions, listeners: Sequence[int], store: Path, environ: Mapping[str, str]
) -> Program:
    env = _environment(store, environ)
    if options.flags.store is None:  # a private store holds what these workers register, whatever its namespace
        for name in ("DYN_NAMESPACE", "DYN_NAMESPACE_PREFIX"):
            env.pop(name, None)
    starting = next(iter(options.flags.served_names), None) or starting_model(options.engine_args)
    if starting is not None:
        env.setdefault("DYN_STARTING_MODEL", starting)
    if options.own_key is not None:
        env["DYN_API_KEY"] = options.own_key
    limits = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": 5.0, "DYN_HTTP_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": 0.0}
    stop_seconds = sum(_seconds(env, name, default) for name, default in limits.items()) + KILL_RESERVE_SECONDS
    arguments = _child(
        *("frontend", stop_seconds),
        *(*[f"--listener={each}" for each in listeners], "--", *http_arguments(options.flags)),
        *_scaling_arguments(options),
        *options.frontend_args,
        *(() if options.flags.frontend_workers is None else ("--workers", str(options.flags.frontend_workers))),
    )
    return Program("frontend", arguments, env, stop_seconds, (*listeners, *options.inherited))


def starting_model(engine_args: Sequence[str]) -> str | None:
    """Return the name that an engine with these arguments will serve; None: they do not name it."""
    found: dict[str, str] = {}
    for argument, following in pairwise((*engine_args, "")):
        flag, is_joined, value = argument.partition("=")
        found[flag] = value if is_joined else following
    if name := found.get("--served-model-name"):
        return name
    if not (model := found.get("--model-name") or found.get("--model")):
        return None
    from dynamo.worker.hub import served_name

    return served_name(model)


def _scaling_arguments(options: ServeOptions) -> tuple[str, ...]:
    """Return the flags of a frontend whose workers come and go by their load."""
    workers = options.flags.workers
    if workers.is_fixed:
        return ()
    on_demand = () if workers.least else ("--cold-start-wait-seconds", str(options.flags.cold_start_wait))
    return ("--autoscale", "--autoscale-target", str(options.flags.scale_target), *on_demand)


def worker_program(options: ServeOptions, store: Path, environ: Mapping[str, str], name: str, slot: int) -> Program:
    """Return a worker's program; no two that run at a time have the same `slot`, as fixed ports count up by it."""
    env = _environment(store, environ)
    env.pop("DYN_API_KEY", None)  # which is a secret between clients and the frontend
    limits = {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": 30.0, "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": 5.0}
    deadline = sum(_seconds(env, name, default) for name, default in limits.items()) + KILL_RESERVE_SECONDS
    ports = {port: _nth_port(env.get(port, ""), slot) for port in ("DYN_SYSTEM_PORT", "DYN_TCP_RPC_PORT")}
    env |= {port: value for port, value in ports.items() if value}
    if env.pop("DYN_ADMIN_PORT", "") and env.get("DYN_SYSTEM_HOST"):  # the number is the frontend's
        env["DYN_ADMIN_PORT"] = "0"
    if options.serve_as:  # no request is sent to it any more when it gets the order to end
        env["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0"
    names = (options.serve_as,) if options.serve_as else options.flags.served_names
    named = [f"--serve-as={each}" for each in names]
    arguments = _child("worker", deadline, "--engine", options.engine, *named, "--", *options.engine_args)
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
    head = (
        sys.executable,
        "-m",
        "dynamo.cli.child",
        role,
        "--kill-after",
        str(kill_after),
        "--report",
        "{report}",
    )
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


class ModelKeeper(Protocol):
    """Loads and unloads many models, each in a process of its own."""

    async def run(self) -> None:
        """Do so as the frontend orders it. Never returns."""

    def serves(self, process: SupervisedProcess, report: Mapping[str, object]) -> None:
        """Take what the worker of a model reports."""


MadeResidents = Callable[["LocalProcesses", Callable[[str], None]], ModelKeeper]

OnReport = Callable[[SupervisedProcess, Mapping[str, object]], None]


class _WorkerPrograms(NamedTuple):
    """What workers that are added later run."""

    options: ServeOptions
    store: Path

    def of(self, name: str, slot: int, options: ServeOptions | None) -> Program:
        """Return the program of a worker. `options`: those of one model of several; None: those of all."""
        return worker_program(options or self.options, self.store, os.environ, name, slot)


class LocalProcesses:
    """Not started yet: the code that has them keeps them. It is the `WorkerPool` of a rolling restart, and the
    `ScalablePool` of scaling."""

    def __init__(
        self,
        options: ServeOptions,
        console: Console,
        store: Path,
        listeners: Sequence[int],
        group: asyncio.TaskGroup,
        *,
        on_report: OnReport,
    ) -> None:
        """`listeners` are the descriptors of the frontend's sockets. `group` runs what a restart spawns."""
        self._console = console
        self._programs = _WorkerPrograms(options, store)
        self._group = group
        self._on_report = on_report
        self.frontend_started = asyncio.Event()
        frontend, *workers = [self._supervised(each) for each in programs(options, listeners, store, os.environ)]
        # Of all workers that run, those on their way out included.
        self._slots = {worker: slot for slot, worker in enumerate(workers)}
        self._lasting = (frontend, workers.pop()) if options.upstream_args else (frontend,)
        self.workers = workers
        self.instances: dict[SupervisedProcess, int] = {}  # the ids that workers registered with

    @property
    def frontend(self) -> SupervisedProcess:
        return self._lasting[0]

    @property
    def upstream(self) -> SupervisedProcess | None:
        """The worker of another server beside those of this machine, which is neither scaled nor replaced; None: there is none."""
        return self._lasting[1] if len(self._lasting) > 1 else None

    def all(self) -> list[SupervisedProcess]:
        """Return every process that runs."""
        return [self.frontend, *self._slots]

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

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run `work` until the command ends."""
        return self._group.create_task(work, name=name)

    # -- what scaling needs ----------------------------------------------------------------------------------------

    def add_worker(self, policy: RestartPolicy) -> SupervisedProcess:
        """Return one more worker, not started yet and not in `workers`."""
        taken = {worker.name for worker in self._slots}
        name = next(name for number in range(1, len(taken) + 2) if (name := f"worker-{number}") not in taken)
        return self._added(name, policy)

    def add_model(self, name: str, policy: RestartPolicy) -> SupervisedProcess:
        """Return the process of one of many models, not started yet; it has the model's name."""
        return self._added(name, policy, self._programs.options.many[name])

    def instance_of(self, worker: SupervisedProcess) -> int | None:
        """Return the instance id that a worker registered with; None: not yet."""
        return self.instances.get(worker)

    def _added(self, name: str, policy: RestartPolicy, options: ServeOptions | None = None) -> SupervisedProcess:
        slot = next(number for number in range(len(self._slots) + 1) if number not in self._slots.values())
        new = self._supervised(self._programs.of(name, slot, options), policy)
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
