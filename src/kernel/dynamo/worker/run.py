"""From a command line to an exit code: what an engine's `main` calls.

Exit codes: 0 after a graceful shutdown, 1 for an error (named on stderr as `"{Kind}: {message}"`), 2 for a mistake of the
operator that the next start would meet again (bad flags, or an `InvalidArgument`: the same line), 143 when the shutdown
took too long and was cut.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, NoReturn

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import BaseEngine
from dynamo.errors import DynamoException, InvalidArgument, text_of
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.observe.log_text import one_line
from dynamo.worker.signals import Deadline
from dynamo.worker.worker import Worker, shutdown_times

__all__ = ["EngineFactory", "event_loop_factory", "run"]

logger = logging.getLogger(__name__)

EngineFactory = Callable[[list[str] | None], Awaitable[tuple[BaseEngine, WorkerConfig]]]
"""Replaces `from_args`: `await factory(argv)` gives the engine, not started, and the worker's configuration."""

EXIT_CALLBACK_SECONDS: Final = 2.0  # for the callbacks of `atexit`, where nothing else of the interpreter is torn down

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2  # as argparse: a supervisor does not start the same command line again


def run(
    engine_cls: type[BaseEngine],
    argv: list[str] | None = None,
    engine_factory: EngineFactory | None = None,
    *,
    on_serving: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until a signal; blocks. `argv=None` means `sys.argv[1:]`.

    `on_serving` is awaited beside the worker once its instance is routable.

    Returns after a graceful shutdown; the process of an engine that `skips_teardown` ends instead. Raises SystemExit (see
    above) when the worker failed; an exception of `from_args` that is none of ours passes through.
    """
    try:
        run_engine(engine_cls, argv, engine_factory, on_serving=on_serving)
    except DynamoException as error:
        print(one_line(text_of(error)), file=sys.stderr)  # noqa: T201 - the last line of a process that failed is for its operator
        if engine_cls.skips_teardown:
            exit_at_once(exit_status(error))
        raise SystemExit(exit_status(error)) from error
    if engine_cls.skips_teardown:
        exit_at_once(0)


def exit_at_once(status: int) -> NoReturn:
    """End this process without the teardown of the interpreter, which takes seconds with large libraries.

    Callbacks of `atexit` run first (the log is written by one of them), within `EXIT_CALLBACK_SECONDS`, and standard
    output and error are flushed. Threads are cut where they are.
    """
    limit = threading.Timer(EXIT_CALLBACK_SECONDS, os._exit, (status,))
    limit.daemon = True
    limit.start()
    try:
        atexit._run_exitfuncs()  # a failing callback has been printed
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # its reader is gone, or the engine closed it
                stream.flush()
        os._exit(status)


def exit_status(error: DynamoException) -> int:
    """Return the exit status of a worker process that `error` ended."""
    return EXIT_USAGE if isinstance(error, InvalidArgument) else EXIT_FAILED


def run_engine(
    engine_cls: type[BaseEngine],
    argv: list[str] | None = None,
    engine_factory: EngineFactory | None = None,
    *,
    on_serving: Callable[[], Awaitable[None]] | None = None,
    force_exit: Callable[[int], object] | None = None,
) -> None:
    """Run an engine as `run` does, but raise the typed error of a failed worker instead of exiting with a line and a
    status.

    `force_exit(status)` ends the process when the shutdown takes too long; it is called in a thread. None: `os._exit`.
    """
    runner = asyncio.Runner(loop_factory=event_loop_factory())
    try:
        runner.run(_start(engine_cls, argv, engine_factory, on_serving=on_serving, force_exit=force_exit))
    finally:
        # Waits for whatever the engine left in the loop's executor or in tasks of its own: so again with a limit.
        with Deadline(shutdown_times().timeout_seconds, force_exit=force_exit or os._exit) as deadline:
            deadline.arm()
            runner.close()
    _name_what_lingers()


async def _start(
    engine_cls: type[BaseEngine],
    argv: list[str] | None = None,
    engine_factory: EngineFactory | None = None,
    *,
    on_serving: Callable[[], Awaitable[None]] | None = None,
    force_exit: Callable[[int], object] | None = None,
) -> None:
    """Make the engine and serve it. Unit tests of engines await this with a `Worker` of their own in this module, which
    takes an engine and its configuration, and whose `run` takes nothing."""
    try:
        engine, config = await (engine_factory or engine_cls.from_args)(argv)
    except InvalidArgument:
        raise  # its message is for the operator, and `run` prints it
    except DynamoException:
        traceback.print_exc()  # `run` prints one line for these, and an author needs to see where it came from
        raise
    worker = Worker(engine, config) if force_exit is None else Worker(engine, config, force_exit=force_exit)
    beside = Background()  # not as a block: a failure of the callback is logged and does not end the worker
    if on_serving is not None:
        beside.start(_once_serving(worker, on_serving), "on_serving")
    try:
        await worker.run()
    finally:
        await beside.close()


async def _once_serving(worker: Worker, on_serving: Callable[[], Awaitable[None]]) -> None:
    await worker.wait_serving()
    await on_serving()


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory where uvloop is installed (None: the standard loop)."""
    try:
        import uvloop
    except ImportError:  # optional at run time; there is none for Windows
        return None
    return uvloop.new_event_loop


def _name_what_lingers() -> None:
    """Name the threads that an engine left behind in the log: they keep the process alive."""
    lingering = [
        thread.name
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread() and thread.is_alive()
    ]
    if lingering:
        logger.warning("the process cannot exit before these threads of the engine do: %s", ", ".join(lingering))
