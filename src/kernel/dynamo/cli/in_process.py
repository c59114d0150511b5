"""The same frontend and workers in one process and one event loop, over memory."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from dynamo.cli.console import Console
from dynamo.cli.engines import endpoint_path, load_engine, on_planes, served_as
from dynamo.cli.hangup import hangups
from dynamo.cli.local import stopping_signals
from dynamo.cli.local_processes import http_arguments
from dynamo.cli.readiness import Address, ready_text, say_inspector, wait_listed
from dynamo.cli.usage import UsageError
from dynamo.errors import DynamoException, InvalidArgument, text_of
from dynamo.frontend.app import Frontend
from dynamo.frontend.args import parse_args
from dynamo.frontend.http.admin import log_exposure
from dynamo.frontend.http.server import HttpServer
from dynamo.runtime.base.settings import RuntimeSettings, SystemSettings
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.observe.logging import configure_dynamo_logging
from dynamo.settings.command import EXIT_USAGE
from dynamo.worker.hub import served_name
from dynamo.worker.run import event_loop_factory
from dynamo.worker.signals import Deadline
from dynamo.worker.worker import Worker, shutdown_times

if TYPE_CHECKING:
    from dynamo.cli.serve import ServeOptions
    from dynamo.contract.config import WorkerConfig
    from dynamo.contract.engine import BaseEngine

EXIT_FAILED: Final = 1


def serve_in_process(
    options: ServeOptions, console: Console, listeners: Sequence[socket.socket], address: Address
) -> int:
    """Serve until a signal; the exit status. A worker that fails ends everything: it shares this process."""
    engine_cls = load_engine(options.engine)
    configure_dynamo_logging()
    system_port = SystemSettings.from_env().port
    if options.flags.workers.most > 1 and system_port > 0:
        raise UsageError(
            f"DYN_SYSTEM_PORT={system_port} is one port for {options.flags.workers.most} workers in one process; use 0"
        )
    failure: BaseException | None = None
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        try:
            runner.run(_OneProcess(options, console, listeners, address).run(engine_cls))
        except* DynamoException as failures:
            failure = _first(failures)
    if failure is not None:
        if isinstance(failure, InvalidArgument):
            console.complain(f"dynamo serve: error: {failure}")
            return EXIT_USAGE
        console.complain(text_of(failure))
        return EXIT_FAILED
    console.say("stopped")
    return 0


class _OneProcess:
    def __init__(
        self, options: ServeOptions, console: Console, listeners: Sequence[socket.socket], address: Address
    ) -> None:
        self._options = options
        self._console = console
        self._listeners = listeners
        self._address = address
        self._stop = asyncio.Event()
        self._workers: list[Worker] = []
        # Without a grace, unless one is set: no router is left that could send a request late.
        self._times = shutdown_times({"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0", **os.environ})

    async def run(self, engine_cls: type[BaseEngine]) -> None:
        made = [await self._make(engine_cls) for _ in range(self._options.flags.workers.most)]
        settings = parse_args(http_arguments(self._options.flags), self._frontend_env(made[0][1]))
        log_exposure(settings)
        runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "mem", settings=settings.runtime)
        self._show_table([config for _, config in made])
        # From the first signal on, as in a process of its own. Requests have their own time before that.
        limit = self._times.deadline_seconds + settings.grace_period_seconds + settings.graceful_shutdown_seconds
        with (
            Deadline(limit) as deadline,
            stopping_signals(lambda number: self._asked(number, deadline), _leave_at_once),
        ):
            try:
                async with (
                    hangups(restart=self._cannot_restart, terminal_gone=lambda: self._asked(signal.SIGHUP, deadline)),
                    Frontend(settings, runtime) as frontend,
                ):
                    await self._serve(HttpServer(frontend, listeners=self._listeners), made)
            finally:
                await runtime.aclose()

    def _frontend_env(self, config: WorkerConfig) -> dict[str, str]:
        starting = config.served_model_name or (served_name(config.model_name) if config.model_name else "")
        return {"DYN_STARTING_MODEL": starting, **os.environ, "DYN_API_KEY": self._options.own_key or ""}

    async def _make(self, engine_cls: type[BaseEngine]) -> tuple[BaseEngine, WorkerConfig]:
        engine, config = await engine_cls.from_args(list(self._options.engine_args))
        settings = config.runtime_settings or RuntimeSettings.from_env()
        system = replace(settings.system, admin_port=None)  # DYN_ADMIN_PORT is the frontend's; they share this process
        config = replace(config, runtime_settings=replace(settings, system=system))
        return engine, served_as(on_planes(config, discovery="mem", requests="mem"), self._options.flags.served_names)

    async def _serve(self, server: HttpServer, made: list[tuple[BaseEngine, WorkerConfig]]) -> None:
        self._workers = [Worker(engine, config, times=self._times, embedded=True) for engine, config in made]
        await server.start()
        try:
            with server.published_inspector():
                await self._work(made, server)
        finally:
            await server.close()

    async def _work(self, made: list[tuple[BaseEngine, WorkerConfig]], server: HttpServer) -> None:
        async with asyncio.TaskGroup() as group:
            for number, worker in enumerate(self._workers, 1):
                group.create_task(self._run(worker), name=f"worker-{number}")
            readiness = group.create_task(self._announce(made[0][1].endpoint_types), name="readiness")
            await self._stop.wait()
            readiness.cancel()
            await server.stop()  # first: its requests need the workers to end well
            for worker in self._workers:
                worker.request_stop()

    async def _run(self, worker: Worker) -> None:
        await worker.run()
        self._stop.set()

    async def _announce(self, surfaces: str) -> None:
        models = await wait_listed(
            self._address,
            self._console,
            waits_for=lambda: f"{len(self._workers)} worker(s) to load",
            on_answer=lambda: None,
        )
        self._console.say("Ready", strong=True)
        self._console.say(ready_text(self._address, models[0], surfaces))
        say_inspector(self._console, self._options.flags.admin_port or self._address.port)

    def _show_table(self, configs: list[WorkerConfig]) -> None:
        pid = str(os.getpid())
        rows = [("frontend", pid, self._address.shown)]
        rows += [(f"worker-{number}", pid, endpoint_path(config)) for number, config in enumerate(configs, 1)]
        self._console.table(("part", "pid", "address"), rows)

    def _asked(self, number: signal.Signals, deadline: Deadline) -> None:
        self._console.say(f"{number.name}: stopping (again: at once)")
        deadline.arm()
        self._stop.set()

    def _cannot_restart(self) -> None:
        self._console.say("SIGHUP: one process cannot replace its own workers; start it without --in-process for that")


def _leave_at_once(number: signal.Signals) -> None:
    os._exit(128 + number)


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    first: BaseException = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
