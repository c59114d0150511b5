"""`python -m dynamo.mocker --model-path NAME`: serve with mock engines, several in one process with --num-workers."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from dynamo.errors import DynamoException, InvalidArgument, text_of
from dynamo.mocker.arguments import MockFleet, read_arguments
from dynamo.mocker.engine import MockEngine
from dynamo.runtime.observe.log_text import one_line
from dynamo.runtime.observe.logging import configure_dynamo_logging
from dynamo.worker.run import event_loop_factory, exit_status, run
from dynamo.worker.signals import Deadline, SignalGuard
from dynamo.worker.worker import Worker, shutdown_times

# Several workers in one process: each with its own runtime, lease and instance id, on one event loop.

logger = logging.getLogger(__name__)

PAUSE_EVERY: Final = 32  # workers
PAUSE_SECONDS: Final = 2.0


async def run_fleet(fleet: MockFleet, *, force_exit: Callable[[int], Any] = os._exit) -> None:
    """Serve until a signal; then all workers leave at once. Raises an ExceptionGroup of what failed, after all have left."""
    configure_dynamo_logging()
    times = shutdown_times()
    workers = [
        Worker(
            MockEngine(each.model, each.options, seed=each.seed),
            each.config,
            times=times,
            force_exit=force_exit,
            embedded=True,
        )
        for each in fleet.workers
    ]
    stopping = asyncio.Event()

    def stop() -> None:
        stopping.set()
        for worker in workers:
            worker.request_stop()

    def on_signal(name: str) -> None:
        if not stopping.is_set():
            logger.info("%s received", name)
            stop()

    async def serve(worker: Worker) -> None:
        try:
            await worker.run()
        finally:
            stop()  # one that ends or fails takes the others along, each with its clean-up

    with (
        SignalGuard(asyncio.get_running_loop()) as guard,
        Deadline(times.deadline_seconds, force_exit=force_exit) as deadline,
    ):
        guard.listen(on_signal, at_once=deadline.arm)
        failures: list[BaseException] = []
        async with asyncio.TaskGroup() as group:
            for number, worker in enumerate(workers):
                await _pause(fleet, number, stopping)
                if stopping.is_set():
                    break
                group.create_task(_kept(serve(worker), failures), name=f"mock worker {number}")
    if failures:
        raise BaseExceptionGroup("mock workers failed", failures)


async def _kept(serving: Any, failures: list[BaseException]) -> None:
    """Await a worker and keep its failure, which must not cancel the clean-up of the others."""
    try:
        await serving
    except Exception as error:
        failures.append(error)


async def _pause(fleet: MockFleet, number: int, stopping: asyncio.Event) -> None:
    """Wait between two starts."""
    if not number or not fleet.stagger_seconds:
        return
    seconds = fleet.stagger_seconds + (PAUSE_SECONDS if number % PAUSE_EVERY == 0 else 0.0)
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return


def main(argv: list[str] | None = None) -> None:
    fleet = read_arguments(argv)
    if len(fleet.workers) == 1:
        (worker,) = fleet.workers

        async def made(_: list[str] | None) -> tuple[MockEngine, object]:
            return MockEngine(worker.model, worker.options, seed=worker.seed), worker.config

        run(MockEngine, argv, made)  # type: ignore[arg-type]
        return
    _run_several(fleet)


def _run_several(fleet: MockFleet) -> None:
    try:
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(run_fleet(fleet))
    except* InvalidArgument as errors:
        _leave(errors)
    except* DynamoException as errors:
        _leave(errors)


def _leave(errors: BaseExceptionGroup[DynamoException]) -> None:
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, DynamoException)
    print(one_line(text_of(first)), file=sys.stderr)  # noqa: T201 - the last line of a process that failed is for its operator
    raise SystemExit(exit_status(first)) from first


if __name__ == "__main__":
    main()
