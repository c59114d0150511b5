"""`python -m dynamo.mocker --model-path NAME`: serve with mock engines, several in one process with --num-workers."""

from __future__ import annotations

import asyncio
import sys

from dynamo.errors import DynamoException, InvalidArgument, text_of
from dynamo.mocker.arguments import MockFleet, read_arguments
from dynamo.mocker.engine import MockEngine
from dynamo.mocker.fleet import run_fleet
from dynamo.runtime.observe.log_text import one_line
from dynamo.worker.run import event_loop_factory, exit_status, run


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
