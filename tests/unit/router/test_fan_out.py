from __future__ import annotations

import asyncio

import pytest

from dynamo.router.dispatch.fan_out import CAPACITY, FanOut
from dynamo.runtime.calls.context import Context


class Part:
    """Gives what the test puts in."""

    def __init__(self) -> None:
        self.arrivals: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self.closed = 0
        self.taken = 0

    async def next(self) -> str | None:
        found = await self.arrivals.get()
        self.taken += 1
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.closed += 1


async def test_it_ends_when_every_part_has_ended() -> None:
    parts = [Part(), Part()]
    found: list[str] = []
    async with FanOut[str](Context("r")) as fan_out:
        for part in parts:
            fan_out.add(part)
        parts[0].arrivals.put_nowait("a")
        parts[0].arrivals.put_nowait(None)
        assert await anext(fan_out) == ["a"]
        parts[1].arrivals.put_nowait("b")
        parts[1].arrivals.put_nowait(None)
        async for batch in fan_out:
            found += batch
    assert found == ["b"]
    assert all(part.closed for part in parts)


async def test_a_failure_comes_behind_what_had_arrived_and_ends_the_others() -> None:
    parts = [Part(), Part()]
    found: list[str] = []

    async def read_all() -> None:
        async with FanOut[str](Context("r")) as fan_out:
            for part in parts:
                fan_out.add(part)
            parts[0].arrivals.put_nowait("a")
            parts[0].arrivals.put_nowait(ValueError("lost"))
            async for batch in fan_out:
                found.extend(batch)

    with pytest.raises(ValueError, match="lost"):
        await read_all()
    assert found == ["a"]
    assert all(part.closed for part in parts)


async def test_a_part_has_an_id_of_its_own_and_ends_with_the_call() -> None:
    context = Context("r")
    async with FanOut[str](context) as fan_out:
        child = fan_out.child(3)
        assert child.id() == "r-3"
        assert not child.is_stopped()
        context.kill()
        assert child.is_killed()


async def test_a_slow_reader_holds_the_parts_back() -> None:
    part = Part()
    for number in range(2 * CAPACITY):
        part.arrivals.put_nowait(str(number))
    async with FanOut[str](Context("r")) as fan_out:
        fan_out.add(part)
        first = await anext(fan_out)
        while part.taken < len(first) + CAPACITY:
            await asyncio.sleep(0)
        for _ in range(CAPACITY):
            await asyncio.sleep(0)
        assert part.taken <= len(first) + CAPACITY + 1
