"""The lane of a mux stream: token ids go past the buffer, and nothing is lost, doubled or out of order for that."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import StreamIncomplete
from dynamo.router.dispatch import RoutedStream
from dynamo.router.failover import DispatchLimits, DispatchRequest
from dynamo.runtime.context import Context
from dynamo.runtime.request_plane.base import END_INDEX, INITIAL_CREDITS, StreamItem
from dynamo.runtime.request_plane.mux.connection import MuxConnection
from dynamo.runtime.request_plane.mux.frames import Kind, frame, pack
from dynamo.runtime.request_plane.mux.stream import MuxStream


class Wire:
    """A connection without a socket: `say` is what its worker sends."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.connection = MuxConnection("here", on_lost=lambda connection: None)
        self.connection.connection_made(self)  # type: ignore[arg-type]

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    writelines = property(lambda self: lambda parts: self.write(b"".join(parts)))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def open(self) -> MuxStream:
        return self.connection.open("e", b"\x80", Context("r"))

    def say(self, *items: StreamItem) -> None:
        self.connection.data_received(frame(Kind.ITEMS, pack(list(items))))


class Reader:
    """Takes through the lane, and beside it; remembers in which order what came."""

    def __init__(self, stream: MuxStream, *, refuses_at: int | None = None, fails_at: int | None = None) -> None:
        self.stream, self._refuses_at, self._fails_at = stream, refuses_at, fails_at
        self.seen: list[Any] = []
        self.calls = 0
        self.closed: list[BaseException | None] = []
        stream.listen(self.arrived)
        stream.open_lane(self.tokens, self.closed.append)

    def tokens(self, ids: list[int]) -> bool:
        self.calls += 1
        self.seen += ids
        if self.calls - 1 == self._fails_at:
            raise ValueError("the reader failed")
        return self.calls - 1 != self._refuses_at

    def arrived(self) -> None:
        for item in self.stream.take() or ():
            self.seen += item.token_ids if item.extra is None else [*item.token_ids, item.extra]


def token(stream: MuxStream, offset: int, **more: Any) -> StreamItem:
    return StreamItem(stream.stream_id, 0, offset, [offset], **more)


async def test_tokens_of_one_frame_are_passed_on_together_for_each_stream() -> None:
    wire = Wire()
    one, two = wire.open(), wire.open()
    readers = [Reader(one), Reader(two)]
    wire.say(token(one, 0), token(two, 0), token(one, 1), token(one, 2))
    wire.say(token(two, 1))
    assert [(reader.seen, reader.calls) for reader in readers] == [([0, 1, 2], 1), ([0, 1], 2)]


@given(kinds=st.lists(st.sampled_from("pex"), max_size=12), cuts=st.sets(st.integers(0, 12)))
def test_the_order_is_that_of_the_wire_however_items_are_mixed_and_framed(kinds: list[str], cuts: set[int]) -> None:
    """p: plain; e: with an extra; x: plain, and the reader stops listening to the lane before it."""

    async def run() -> None:
        wire = Wire()
        stream = wire.open()
        reader = Reader(stream)
        expected: list[Any] = []
        pending: list[StreamItem] = []
        for offset, kind in enumerate(kinds):
            if offset in cuts:
                wire.say(*pending)
                pending.clear()
            if kind == "x":
                wire.say(*pending)
                pending.clear()
                stream.listen(reader.arrived)
            extra = {"n": offset} if kind == "e" else None
            pending.append(token(stream, offset, extra=extra))
            expected += [offset] if extra is None else [offset, extra]
        wire.say(*pending, StreamItem(stream.stream_id, END_INDEX, len(kinds), []))
        await asyncio.sleep(0)
        assert reader.seen == expected
        assert stream.take() is None  # a clean end: every token was counted

    asyncio.run(run())


async def test_a_reader_that_refuses_has_the_rest_in_its_buffer() -> None:
    wire = Wire()
    stream = wire.open()
    reader = Reader(stream, refuses_at=1)
    stream.listener = None  # as a reader that waits in `next_batch`
    for offset in range(4):
        wire.say(token(stream, offset))
    assert (reader.seen, reader.closed) == ([0, 1], [None])
    assert [item.token_ids for item in await stream.next_batch()] == [[2], [3]]


async def test_what_the_reader_raises_closes_its_lane_and_hurts_no_other_stream() -> None:
    wire = Wire()
    one, two = wire.open(), wire.open()
    failing, well = Reader(one, fails_at=0), Reader(two)
    wire.say(token(one, 0), token(two, 0))
    wire.say(token(two, 1))
    assert [str(error) for error in failing.closed] == ["the reader failed"]
    assert (well.seen, well.closed) == ([0, 1], [])


async def test_a_reader_that_left_while_its_frame_was_handed_out_finds_the_tokens_again() -> None:
    wire = Wire()
    one, two = wire.open(), wire.open()
    second = Reader(two)
    Reader(one).stream.open_lane(lambda ids: bool(two.listen(None)) or True, lambda error: None)
    wire.say(token(one, 0), token(two, 0), token(two, 1))
    assert second.seen == []
    assert [(item.offset, item.token_ids) for item in await two.next_batch()] == [(0, [0, 1])]
    wire.say(token(two, 2))
    assert [(item.offset, item.token_ids) for item in await two.next_batch()] == [(2, [2])]


async def test_a_jump_is_found_on_the_lane_too() -> None:
    wire = Wire()
    stream = wire.open()
    Reader(stream)
    stream.listener = None
    wire.say(token(stream, 0))
    wire.say(token(stream, 5))
    with pytest.raises(StreamIncomplete, match="jumped to token 5"):
        await stream.next_batch()


async def test_the_worker_gets_its_credits_back() -> None:
    wire = Wire()
    stream = wire.open()
    Reader(stream)
    await asyncio.sleep(0)
    before = len(wire.written)
    for offset in range(INITIAL_CREDITS):
        wire.say(token(stream, offset))
    await asyncio.sleep(0)
    assert any(data[4] == Kind.CREDIT for data in wire.written[before:])


async def test_a_routed_stream_opens_the_lane_of_its_worker_s_stream() -> None:
    """Else every token takes the long way, and no other test would notice."""
    wire = Wire()
    stream = wire.open()
    request = DispatchRequest({}, [], record=Any, timer=Any, limits=DispatchLimits())  # type: ignore[arg-type]
    pool = SimpleNamespace(pool=None, replacement_wait_seconds=0.0, queries_of_death=None)
    routed = RoutedStream(pool, request, Context("r"))  # type: ignore[arg-type]
    routed._stream = stream
    seen: list[list[int]] = []
    items: list[list[StreamItem]] = []

    def take_tokens(ids: list[int]) -> bool:
        seen.append(ids)
        return len(seen) < 2

    reading = asyncio.create_task(routed.push(lambda batch: bool(items.append(batch)) or True, take_tokens))
    await asyncio.sleep(0)
    wire.say(token(stream, 0), token(stream, 1))
    wire.say(token(stream, 2, extra={"n": 1}))
    wire.say(token(stream, 3))
    await reading  # the second refusal settles it
    assert seen == [[0, 1], [3]]
    assert [[item.token_ids for item in batch] for batch in items] == [[[2]]]
