"""When lines begin: all at once while nobody asks, and for a share of the event loop's time while people do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from dynamo.frontend.base.shares import SharedBound
from dynamo.frontend.parts.batches.fair_slots import FairSlots
from dynamo.frontend.parts.batches.line_pace import QUIET_SECONDS, LinePace, Metered
from dynamo.testing.simulation.loop import VirtualLoop, run_virtual


class BusyLoop(VirtualLoop):
    """A virtual loop that a callback can keep."""

    def keep(self, seconds: float) -> None:
        self._now += seconds


def keep(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, BusyLoop)
    loop.keep(seconds)


async def lines_in(seconds: float, pace: LinePace, line_seconds: float) -> int:
    """How many lines end in so many seconds, each of which keeps the loop for so long."""
    slots, ended = FairSlots(SharedBound(1000, None), pace.begin), 0
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds

    async def line() -> None:
        keep(line_seconds / 2)
        await asyncio.sleep(0.01)
        keep(line_seconds / 2)

    async def run() -> None:
        nonlocal ended
        work = Metered(line())
        await work
        pace.end(work.seconds)
        slots.release("a")
        ended += 1

    async with asyncio.TaskGroup() as group:
        while loop.time() < until:
            await slots.acquire("a", "1")
            group.create_task(run())
    return ended


def share_of_lines(
    *, waits_seconds: float | None, line_seconds: float, asks: Callable[[], bool] = lambda: True
) -> float:
    async def main() -> float:
        pace = LinePace(asks)
        if waits_seconds is not None:
            pace.waited(waits_seconds)
        seconds = 20_000 * line_seconds if line_seconds < 0.002 else 20.0
        return await lines_in(seconds, pace, line_seconds) * line_seconds / seconds

    return run_virtual(main(), loop=BusyLoop())


def test_lines_take_everything_while_nobody_asks() -> None:
    assert share_of_lines(waits_seconds=0.005, line_seconds=0.002, asks=lambda: False) > 0.95


@pytest.mark.parametrize("line_seconds", [0.0002, 0.002, 0.02])
def test_the_share_of_lines_follows_how_long_people_wait_for_their_requests(line_seconds: float) -> None:
    for waits_seconds, share in (
        (None, 1 / 5),  # nobody was answered yet
        (0.0, 1 / 51),
        (0.005, 1 / 21),
        (0.025, 1 / 5),
        (0.1, 1 / 2),
        (10.0, 1 / 2),
    ):
        found = share_of_lines(waits_seconds=waits_seconds, line_seconds=line_seconds)
        assert found == pytest.approx(share, rel=0.15)


def test_lines_take_everything_again_a_moment_after_the_last_person() -> None:
    async def main() -> None:
        people, loop = [True], asyncio.get_running_loop()
        pace = LinePace(lambda: bool(people))
        pace.waited(0.005)
        slots = FairSlots(SharedBound(1000, None), pace.begin)
        await slots.acquire("a", "1")
        people.clear()
        pace.end(0.05)
        began = loop.time()
        for _ in range(500):
            await slots.acquire("a", "1")
        assert loop.time() - began <= 2 * QUIET_SECONDS

    run_virtual(main(), loop=BusyLoop())


async def test_a_coroutine_that_is_measured_behaves_as_it_does_alone() -> None:
    seen: list[Any] = []

    async def work(turns: int) -> str:
        for turn in range(turns):
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                seen.append(turn)
                raise
        await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0.001))
        if turns == 3:
            raise ValueError("three")
        return "done"

    async def measured(turns: int) -> str:
        return await Metered(work(turns))

    assert await measured(2) == "done"
    with pytest.raises(ValueError, match=re.escape("three")):
        await measured(3)
    task = asyncio.ensure_future(measured(10**9))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(seen) == 1
