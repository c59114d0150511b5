"""Faults of the product that the simulator found, each held by a test of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo.errors import ResponseTimeout
from dynamo.frontend.pipeline.idle_timeout import IdleTimeout
from dynamo.testing.simulation import draw, run_scenario
from dynamo.testing.simulation.loop import VirtualLoop, run_virtual


class Ended:
    """What `IdleTimeout` needs of an exchange."""

    def __init__(self) -> None:
        self.reasons: list[Any] = []

    def end_with(self, reason: Any) -> None:
        self.reasons.append(reason)


def test_a_suspended_machine_is_no_silence_of_the_engine() -> None:
    """Seed 9: every request in flight failed with 504 after a clock jump, with its tokens waiting to be read."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        exchange = Ended()
        inactivity = IdleTimeout(exchange, lambda error: False, 10.0)
        await asyncio.sleep(5.0)
        loop.jump(60.0)
        await asyncio.sleep(0.1)
        inactivity.last = loop.time()  # what was waiting has been read
        await asyncio.sleep(9.0)
        assert exchange.reasons == []
        await asyncio.sleep(3.0)
        assert [type(reason) for reason in exchange.reasons] == [ResponseTimeout]
        inactivity.close()

    run_virtual(main())


def test_a_silent_engine_is_noticed_on_time() -> None:
    async def main() -> None:
        exchange = Ended()
        inactivity = IdleTimeout(exchange, lambda error: False, 10.0)
        await asyncio.sleep(5.0)
        inactivity.last = asyncio.get_running_loop().time()
        await asyncio.sleep(9.9)
        assert exchange.reasons == []
        await asyncio.sleep(1.3)
        assert len(exchange.reasons) == 1

    run_virtual(main())


@pytest.mark.parametrize(
    "seed",
    [
        *(934, 1219, 1395, 1420, 1831, 2201, 2937),  # a suspended machine was taken for a silent engine
        *(7291, 7698),  # a worker that had no room was not asked again when the other one was lost
        *(11398, 18857),  # the simulated wire lost what was sent before the end of a connection, and the end with it
    ],
)
def test_seeds_that_found_something_find_nothing(seed: int) -> None:
    assert [str(finding) for finding in run_scenario(draw(seed, crowds=False)).findings] == []


def test_a_machine_suspended_while_the_run_settles_has_not_settled() -> None:
    assert [str(finding) for finding in run_scenario(draw(18223)).findings] == []
