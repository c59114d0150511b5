"""Work that runs for ever begins again where it raises; the failure is counted and shown for as long as it is news."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from dynamo.runtime.base import forever as module
from dynamo.runtime.base.forever import FAILURES, forever
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.health import HealthState
from dynamo.runtime.observability import _failing, register_process
from dynamo.runtime.observe.metrics import MetricsRegistry
from dynamo.testing.simulation.loop import run_virtual


def failures() -> float:
    registry = MetricsRegistry()
    register_process(registry)
    name = b"dynamo_loop_failures_total "
    return float(next(line for line in registry.expose().splitlines() if line.startswith(name)).split()[1])


def test_it_begins_again_after_a_wait_that_doubles_and_starts_anew_after_a_minute_of_health() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        begun, shown = list[float](), list[int]()

        async def work() -> None:
            begun.append(loop.time())
            shown.append(len(FAILURES.troubles()))
            if len(begun) == 9:
                await asyncio.sleep(module.HEALTHY_SECONDS)
                shown.append(len(FAILURES.troubles()))
            if len(begun) < 11:
                raise RuntimeError("for a test")

        before = FAILURES.count
        await forever(work, "a loop")
        waits = [after - at for at, after in pairwise(begun)]
        assert [round(wait, 3) for wait in waits] == [0.5, 1, 2, 4, 8, 16, 30, 30, 60.5, 1]
        assert FAILURES.count - before == 10
        assert shown == [0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1]
        assert FAILURES.troubles() == []

    run_virtual(scenario())


async def test_a_failure_is_a_metric_and_stands_in_health_until_the_loop_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_SECONDS", 0.0)
    health = HealthState()
    health.add_detail("failing", _failing)
    runs, before, again = 0, failures(), asyncio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ValueError("a secret")
        again.set()
        await asyncio.Event().wait()

    async with Background() as background:
        task = background.keep(work, "a loop")
        await again.wait()
        assert failures() - before == 1
        assert health.body()["failing"] == {
            "loops": ["a loop failed (ValueError) and begins again; the log has the error"]
        }
        assert "a loop failed; it begins again in 0 s" in caplog.text
        task.cancel()
        await asyncio.wait([task])
        assert "failing" not in health.body()
