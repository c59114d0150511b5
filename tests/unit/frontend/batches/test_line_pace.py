"""How many lines run at once: all of them while nobody asks, few while people wait for a late event loop."""

from __future__ import annotations

import asyncio
import time

from dynamo.frontend.batches.line_pace import QUIET_SECONDS, LinePace
from support.patience import PATIENCE_SECONDS

MOST = 64


async def settle(pace: LinePace, *, work_seconds: float, until: int) -> int:
    """Let turns of the loop last so long, until the limit is as wanted; the limit."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while pace.limit() != until:
            asyncio.get_running_loop().call_soon(time.sleep, work_seconds)
            await asyncio.sleep(0)
    return pace.limit()


async def test_lines_take_everything_while_nobody_asks_however_late_the_loop_is() -> None:
    pace = LinePace(MOST, lambda: False)
    for _ in range(50):
        assert pace.limit() == MOST
        asyncio.get_running_loop().call_soon(time.sleep, 0.002)
        await asyncio.sleep(0)


async def test_a_late_loop_leaves_one_line_while_people_ask_and_all_of_them_when_they_have_gone() -> None:
    people = [True]
    pace = LinePace(MOST, lambda: bool(people))
    assert await settle(pace, work_seconds=0.002, until=1) == 1
    people.clear()
    began = time.monotonic()
    assert await settle(pace, work_seconds=0.002, until=MOST) == MOST
    assert time.monotonic() - began > QUIET_SECONDS * 0.9


async def test_a_loop_that_is_on_time_gets_more_lines_again() -> None:
    pace = LinePace(MOST, lambda: True)
    await settle(pace, work_seconds=0.002, until=1)
    assert await settle(pace, work_seconds=0.0, until=2) == 2
