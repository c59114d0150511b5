"""How long interactive requests wait beside a batch, on a machine of their own: the wait in the event loop alone.

    python benchmarks/batch_waits.py [--delay 0.001] [--turns 7]

A frontend with a running batch, in this process, on a loop whose clock is the processor time of its thread: what other
processes do to this machine does not count, and when nothing is ready time jumps to the next timer, such as the next token of
an engine without any work of its own. Reading and writing the disk takes 5 ms, off the loop. Interactive requests come one
at a time, in turns without and with the batch. What a worker, a disk and a network add on a real machine is not in it:
`batches.py --turns` measures that.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from dynamo.testing.simulation.loop import VirtualLoop, run_virtual
from support.batch_client import begin, chat_line, poll
from support.frontend_cluster import Cluster, cluster
from support.tiny_model import write_tiny_model

T = TypeVar("T")

BAR: Final = 1.10  # p99 with a batch over p99 without
TOKENS: Final = 4
LINES_A_SECOND: Final = 600  # more than are executed: no batch ends within its turn
ASKED: Final = 300  # in each turn
DISK_SECONDS: Final = 0.005


class ProcessorTimeLoop(VirtualLoop):
    """Time is what this thread has computed, and what it jumped over; work for other threads takes a fixed time."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.thread_time()

    def time(self) -> float:
        return self._now + time.thread_time() - self._began

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        began = time.thread_time()
        done = super().run_in_executor(executor, func, *args)
        self._began += time.thread_time() - began
        later: asyncio.Future[T] = self.create_future()

        def end() -> None:
            if later.done():
                return
            if (error := done.exception()) is not None:
                later.set_exception(error)
            else:
                later.set_result(done.result())

        self.call_later(DISK_SECONDS, end)
        return later


async def waits(house: Cluster, asked: int) -> list[float]:
    """Ask one request after the other; return the time of each, in ms."""
    loop, found = asyncio.get_running_loop(), []
    for _ in range(asked):
        began = loop.time()
        answer = await house.client.chat("hi", max_tokens=TOKENS)
        assert answer.status == 200, answer.body
        found.append(1000 * (loop.time() - began))
    return found


async def measure(directory: Path, turns: int, delay_seconds: float) -> int:
    """Print the waits, and tell by the status whether the bar was met."""

    async def script(body: Any, context: Any, sink: Any) -> None:
        for number in range(TOKENS):
            await asyncio.sleep(delay_seconds)
            sink.send_tokens([97], finish_reason="length" if number == TOKENS - 1 else None)

    alone, beside, ended, seconds = [], [], 0.0, 0.0
    loop = asyncio.get_running_loop()
    lines = [chat_line(f"line-{n}", "What is 27 + 15?") for n in range(_lines_of_a_turn(delay_seconds))]
    async with cluster(directory, files_dir=directory / "files", batch_model_wait_seconds=0.0) as house:
        await house.worker(script, directory=write_tiny_model(directory / "model"))
        gc.collect()
        gc.freeze()
        gc.disable()  # as a frontend collects between requests
        await waits(house, 100)
        for _ in range(turns):
            alone.append(await waits(house, ASKED))
            batch = await begin(house, lines)
            await asyncio.sleep(0.1)
            await waits(house, 20)
            before, began = house.metric("dynamo_frontend_batch_lines_total", result="completed"), loop.time()
            beside.append(await waits(house, ASKED))
            ended += house.metric("dynamo_frontend_batch_lines_total", result="completed") - before
            seconds += loop.time() - began
            await house.client.call("POST", f"/v1/batches/{batch['id']}/cancel")
            await poll(house, batch["id"], "cancelled")
    cuts = [[statistics.quantiles(found, n=100) for found in each] for each in (alone, beside)]
    for name, each in zip(("alone", "beside a batch"), cuts, strict=True):
        p50, p99 = statistics.median([one[49] for one in each]), statistics.median([one[98] for one in each])
        print(f"interactive, {name:15} p50 {p50:6.2f}  p99 {p99:6.2f} ms, medians of {turns} turns")
    ratio = statistics.median([one[98] / other[98] for other, one in zip(*cuts, strict=True)])
    print(f"p99 with a batch over p99 without, median of the turns: {ratio:.2f}     bar {BAR}")
    print(f"lines beside people: {ended / seconds:.0f}/s")
    return 0 if ratio <= BAR else 1


def _lines_of_a_turn(delay_seconds: float) -> int:
    return round(LINES_A_SECOND * (1.0 + ASKED * (0.01 + TOKENS * delay_seconds)))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--delay", type=float, default=0.001, metavar="S", help="before each token (default: %(default)s)"
    )
    parser.add_argument("--turns", type=int, default=7, metavar="N", help="default: %(default)s")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        return run_virtual(measure(Path(place), given.turns, given.delay), loop=ProcessorTimeLoop())


if __name__ == "__main__":
    sys.exit(main())
