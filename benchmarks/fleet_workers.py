"""Mock workers of one process, which join and leave on command: what `fleet.py` registers a thousand of.

    python fleet_workers.py FLAGS OF THE MOCKER

Reads `join N` and `leave N` from its standard input, and answers `joined TOTAL` and `left TOTAL` when that is done. The workers are
those of `python -m dynamo.mocker`: each has its own runtime, lease, instance record, listener and publishers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from dynamo.errors import DynamoException
from dynamo.mocker.arguments import MockWorker, read_arguments
from dynamo.mocker.engine import MockEngine
from dynamo.runtime.observe.logging import configure_dynamo_logging
from dynamo.worker.run import event_loop_factory
from dynamo.worker.worker import Worker, shutdown_times

logger = logging.getLogger(__name__)


class Workers:
    """The workers that serve, the oldest first."""

    def __init__(self, made_like: MockWorker) -> None:
        self._like, self._times = made_like, shutdown_times()
        self._running: dict[Worker, asyncio.Task[None]] = {}

    async def join(self, count: int) -> None:
        """Return when so many more serve. Raises what keeps one from it."""
        like = self._like
        for _ in range(count):
            engine = MockEngine(like.model, like.options, seed=like.seed)
            worker = Worker(engine, like.config, times=self._times, embedded=True)
            self._running[worker] = asyncio.create_task(worker.run())
        for worker, running in [*self._running.items()][-count:]:
            serving = asyncio.ensure_future(worker.wait_serving())
            await asyncio.wait((serving, running), return_when=asyncio.FIRST_COMPLETED)
            serving.cancel()
            if running.done():
                del self._running[worker]
                running.result()

    async def leave(self, count: int) -> None:
        """Return when the oldest ones have left, as after SIGTERM."""
        leaving = list(self._running)[:count]
        for worker in leaving:
            worker.request_stop()
        ends = await asyncio.gather(*(self._running.pop(worker) for worker in leaving), return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                logger.warning("a worker ended with %r", end)

    def __len__(self) -> int:
        return len(self._running)


async def main() -> None:
    """Do as told until the standard input ends, and leave."""
    configure_dynamo_logging()
    (like,) = read_arguments(sys.argv[1:]).workers
    workers, reader = Workers(like), asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    async for line in reader:
        verb, _, number = line.decode().partition(" ")
        if verb == "join":
            try:
                await workers.join(int(number))
            except DynamoException as error:  # the others go on: who gives the order sees the number
                logger.warning("a worker did not start: %r", error)
            answers.write(f"joined {len(workers)}\n")
        else:
            await workers.leave(int(number))
            answers.write(f"left {len(workers)}\n")
    await workers.leave(len(workers))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(main())
