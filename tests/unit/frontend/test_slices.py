"""Requests that arrive together begin a few in each turn of the loop."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.admission.process import AT_ONCE, SHORT_BYTES, Slices
from support.properties import examples

LONG = SHORT_BYTES + 1


async def begin(slices: Slices, name: int, body_bytes: int, begun: list[int]) -> None:
    if not slices.takes():
        await slices.turn(body_bytes)
    begun.append(name)


async def turns_of(sizes: list[int]) -> list[list[int]]:
    """Let requests with bodies of these sizes arrive in one turn; return which of them began in each turn that had some."""
    slices, begun, turns = Slices(), list[int](), list[list[int]]()
    tasks = [asyncio.create_task(begin(slices, name, size, begun)) for name, size in enumerate(sizes)]
    for _ in range(10 * len(sizes) + 10):
        before = len(begun)
        await asyncio.sleep(0)
        if len(begun) > before:
            turns.append(begun[before:])
    await asyncio.gather(*tasks)
    return turns


@given(st.lists(st.sampled_from([10, LONG]), max_size=60))
@examples(40)
def test_every_request_begins_once_and_no_turn_has_more_than_its_share(sizes: list[int]) -> None:
    turns = asyncio.run(turns_of(sizes))

    assert sorted(name for turn in turns for name in turn) == list(range(len(sizes)))
    assert all(len(turn) <= AT_ONCE for turn in turns)
    for size in {10, LONG}:  # of one kind they keep their order
        order = [name for turn in turns for name in turn if sizes[name] == size]
        assert order == sorted(order)


async def test_what_is_short_goes_first_and_what_is_long_goes_on() -> None:
    turns = await turns_of([LONG] * 30 + [10] * 30)

    # The first turn takes what comes, the others one long request and short ones.
    assert turns[0] == list(range(AT_ONCE))
    assert turns[1] == [AT_ONCE, *range(30, 30 + AT_ONCE - 1)]
    assert all(any(name < 30 for name in turn) for turn in turns)


async def test_one_that_is_cancelled_while_it_waits_takes_no_place_of_a_turn() -> None:
    slices, begun = Slices(), list[int]()
    tasks = [asyncio.create_task(begin(slices, name, 10, begun)) for name in range(3 * AT_ONCE)]
    await asyncio.sleep(0)
    for task in tasks[AT_ONCE : 2 * AT_ONCE]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert begun == [*range(AT_ONCE), *range(2 * AT_ONCE, 3 * AT_ONCE)]
    await asyncio.sleep(0)  # the turn after the last one
    await asyncio.sleep(0)
    assert slices.takes()


async def test_what_arrives_later_is_behind_those_that_wait() -> None:
    slices, begun = Slices(), list[int]()
    tasks = [asyncio.create_task(begin(slices, name, 10, begun)) for name in range(3 * AT_ONCE)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(begin(slices, 1000, 10, begun))]
    await asyncio.gather(*tasks)

    assert begun[-1] == 1000
