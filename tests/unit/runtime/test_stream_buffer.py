"""The caller's end of a stream, apart from every wire: its table of states, its callbacks."""

from __future__ import annotations

import asyncio
import itertools
from typing import Final

import pytest

from dynamo.errors import Disconnected, DynamoException, StreamIncomplete
from dynamo.runtime.calls.request_plane.base import END_INDEX, StreamItem
from dynamo.runtime.calls.request_plane.stream import TRANSITIONS, StreamBuffer, StreamEvent, StreamState
from support.cases import each_case

LOST: Final = Disconnected("gone")


class Recorded(StreamBuffer):
    """A stream that writes down what it asks of its wire."""

    __slots__ = ("sent",)

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[object] = []

    def _send_stop(self) -> None:
        self.sent.append("stop")

    def _send_kill(self) -> None:
        self.sent.append("kill")

    def _grant(self, credits: int) -> None:
        self.sent.append(credits)


def end_item(total: int = 0) -> StreamItem:
    return StreamItem(0, END_INDEX, total, [])


DEEDS = {
    StreamEvent.END: lambda stream: stream.deliver(end_item()),
    StreamEvent.LOST: lambda stream: stream.lost(LOST),
    StreamEvent.FINISH: lambda stream: stream.finish(),
    StreamEvent.KILL: lambda stream: stream.kill(),
}


@each_case(
    "events", list(itertools.product(StreamEvent, repeat=3)), ids=lambda events: "-".join(e.value for e in events)
)
async def test_the_table_is_what_a_stream_does(events: tuple[StreamEvent, ...]) -> None:
    stream, state = Recorded(), StreamState.OPEN
    for event in events:
        DEEDS[event](stream)
        state = TRANSITIONS[state].get(event, state)
        assert stream.state is state
    assert stream.sent.count("kill") <= 1
    stream.close()
    assert stream.state in (StreamState.CLOSED, StreamState.DRAINING)
    stream.kill()


def test_every_state_has_a_row_and_nothing_leaves_the_last_one() -> None:
    assert set(TRANSITIONS) == set(StreamState)
    assert not TRANSITIONS[StreamState.CLOSED]
    assert all(following in StreamState for row in TRANSITIONS.values() for following in row.values())


async def test_what_had_arrived_can_be_read_before_the_loss_is_raised() -> None:
    stream = Recorded()
    stream.deliver(StreamItem(0, 0, 0, [7]))
    stream.lost(LOST)
    assert [item.token_ids for item in stream.take() or ()] == [[7]]
    with pytest.raises(Disconnected):
        stream.take()


@pytest.mark.parametrize("offset", [0, 2])
async def test_a_gap_or_an_overlap_kills_the_stream(offset: int) -> None:
    stream = Recorded()
    stream.deliver(StreamItem(0, 0, 0, [7]))
    stream.deliver(StreamItem(0, 0, offset, [8]))
    assert [item.token_ids for item in await stream.next_batch()] == [[7]]
    with pytest.raises(StreamIncomplete, match="jumped to token"):
        await stream.next_batch()
    assert stream.sent == ["kill"]


async def test_an_end_that_counts_other_tokens_is_no_clean_end() -> None:
    stream = Recorded()
    stream.deliver(StreamItem(0, 0, 0, [7]))
    stream.deliver(end_item(total=2))
    assert len(stream.take() or ()) == 1
    with pytest.raises(StreamIncomplete, match="sent 2 tokens, 1 of them arrived"):
        stream.take()


async def test_grants_come_half_a_window_at_a_time() -> None:
    stream = Recorded()
    for offset in range(0, 1024, 64):
        stream.deliver(StreamItem(0, 0, offset, [1] * 64))
        stream.take()
    assert stream.sent == [512, 512]


@pytest.mark.parametrize("leave", ["finish", "close"])
async def test_a_booking_is_told_of_the_first_items_and_released_once(leave: str) -> None:
    stream = Recorded()
    seen: list[DynamoException | str | None] = []
    stream.book(first=seen.append, released=lambda: seen.append("released"))
    assert stream.take() == []
    for offset in range(3):
        stream.deliver(StreamItem(0, 0, offset, [1]))
        stream.take()
    assert seen == [None]
    getattr(stream, leave)()
    stream.close()
    assert seen == [None, "released"]
    stream.kill()


async def test_a_booking_is_told_of_an_error_that_comes_first() -> None:
    stream = Recorded()
    seen: list[DynamoException | None] = []
    stream.book(first=seen.append, released=None)
    stream.lost(LOST)
    for _ in range(2):
        with pytest.raises(Disconnected):
            await stream.next_batch()
    assert seen == [LOST]


async def test_a_listener_is_called_once_for_all_that_came_and_again_for_the_end() -> None:
    stream = Recorded()
    takes: list[object] = []
    stream.listen(lambda: takes.append(stream.take()))
    for offset in range(3):
        stream.deliver(StreamItem(0, 0, offset, [offset]))
    stream.deliver(end_item(3))
    assert takes == []  # never inside the call that brought something
    await asyncio.sleep(0)
    batch, last = takes
    assert isinstance(batch, list)
    assert ([item.token_ids for item in batch], last) == ([[0], [1], [2]], None)
