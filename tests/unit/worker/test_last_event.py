"""The last KV event is said again after a silence: soon at first, and then seldom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dynamo.worker.kv_publishing import publisher
from dynamo.worker.kv_publishing.publisher import LastEventRepeats


class Timer:
    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due, self.call, self.is_cancelled = due, call, False

    def when(self) -> float:
        return self.due

    def cancel(self) -> None:
        self.is_cancelled = True


class Clock:
    """An event loop as far as timers see it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []
        self.wakeups = 0

    def time(self) -> float:
        return self.now

    def call_at(self, due: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(due, call))
        return self.timers[-1]

    def run_until(self, end: float) -> None:
        while due := [timer for timer in self.timers if not timer.is_cancelled and timer.due <= end]:
            first = min(due, key=lambda timer: timer.due)
            self.timers.remove(first)
            self.now = max(self.now, first.due)
            self.wakeups += 1
            first.call()
        self.now = end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    loops: Any = vars(publisher)["asyncio"]
    monkeypatch.setattr(loops, "get_running_loop", lambda: made)
    return made


def test_it_is_said_again_within_a_second_and_then_every_ten_seconds(clock: Clock) -> None:
    times: list[float] = []
    repeats = LastEventRepeats(lambda: times.append(round(clock.now, 3)))
    clock.run_until(100.0)
    assert clock.wakeups == 0
    repeats.sent()
    clock.run_until(131.0)
    assert times == [100.2, 100.5, 100.9, 110.9, 120.9, 130.9]
    assert clock.wakeups == len(times)
    clock.run_until(132.0)
    repeats.sent()
    clock.run_until(133.0)
    assert times[6:] == [132.2, 132.5, 132.9]
    repeats.close()
    repeats.sent()
    clock.run_until(200.0)
    assert len(times) == 9


def test_a_worker_that_publishes_all_the_time_repeats_nothing(clock: Clock) -> None:
    times: list[float] = []
    repeats = LastEventRepeats(lambda: times.append(clock.now))
    for step in range(10_000):
        clock.run_until(step / 1000)
        repeats.sent()
    assert times == []
    assert clock.wakeups <= 60
