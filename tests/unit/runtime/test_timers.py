"""Timers that are due already, on both kinds of loops."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from dynamo.runtime.base.timers import due_of
from dynamo.worker.kv_publishing.publisher import LastEventRepeats


def test_a_timer_of_the_future_has_a_time_and_one_of_the_past_is_due_on_uvloop_too() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        later, past = loop.call_at(loop.time() + 100, print), loop.call_at(loop.time() - 1, lambda: None)
        found = due_of(later) - loop.time(), due_of(past)
        later.cancel()
        return found

    seconds, past = uvloop.run(main())
    assert 90 < seconds <= 100.1
    assert past == -math.inf
    seconds, past = asyncio.run(main())
    assert 90 < seconds <= 100
    assert math.isfinite(past)


def test_events_that_follow_a_repetition_which_is_overdue_are_no_error() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        errors: list[Any] = []
        loop.set_exception_handler(lambda _loop, context: errors.append(context))
        repeats = LastEventRepeats(lambda: None)
        repeats._timer = loop.call_at(loop.time() - 1, repeats._due)  # as after a loop that was blocked
        repeats.sent()
        repeats.close()
        return errors

    assert uvloop.run(main()) == []
