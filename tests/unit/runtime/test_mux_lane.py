"""The lane of a mux stream: token ids go past the buffer, and nothing is lost, doubled or out of order for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import StreamIncomplete
from dynamo.router.dispatch.failover import NO_WAIT, DispatchLimits, DispatchRequest
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.dispatch.stream import RoutedStream
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import END_INDEX, INITIAL_CREDITS, StreamItem
from dynamo.runtime.calls.request_plane.mux.connection import MuxConnection
from dynamo.runtime.calls.request_plane.mux.frames import FrameDecoder, Kind, frame, pack, step_frames
from dynamo.runtime.calls.request_plane.mux.stream import MuxStream
from support.properties import examples


class Wire:
    """A connection without a socket: `say` is what its worker sends."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.connection = MuxConnection("here", on_lost=lambda connection: None)
        self.connection.connection_made(self)  # type: ignore[arg-type]

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def open(self) -> MuxStream:
        return self.connection.open("e", b"\x80", Context("r"))

    def say(self, *items: StreamItem) -> None:
        self.connection.data_received(frame(Kind.ITEMS, pack(list(items))))


def step(*tokens: StreamItem) -> bytes:
    """Return the frame of a step that brings the tokens of these items."""
    (encoded,) = step_frames(
        [item.stream_id for item in tokens], [item.offset for item in tokens], [item.token_ids[0] for item in tokens]
    )
    return encoded


class Lane:
    """Hands every id on to `take_tokens`."""

    def __init__(self, take_tokens: Callable[[list[int]], bool]) -> None:
        self.take_tokens = take_tokens

    def take_token(self, token_id: int, now: float) -> bool:
        return self.take_tokens([token_id])


class Reader:
    """Takes through the lane, and beside it; remembers in which order what came."""

    def __init__(self, stream: MuxStream, *, refuses_at: int | None = None, fails_at: int | None = None) -> None:
        self.stream, self._refuses_at, self._fails_at = stream, refuses_at, fails_at
        self.seen: list[Any] = []
        self.calls = 0
        self.closed: list[BaseException | None] = []
        stream.listen(self.arrived)
        stream.open_lane(Lane(self.tokens), self.closed.append)

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


@given(
    steps=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=8),
    joined=st.booleans(),
    leaves_at=st.none() | st.integers(0, 8),
)
@examples(100)
def test_steps_and_items_bring_the_same_tokens_whether_they_are_read_together_or_not(
    steps: list[tuple[bool, bool, bool]], joined: bool, leaves_at: int | None
) -> None:
    """For each step: whether each of two streams has a token in it, and whether it comes as a step or as items."""

    async def run() -> None:
        wire = Wire()
        streams = [wire.open(), wire.open()]
        readers = [Reader(stream) for stream in streams]
        sent = [0, 0]
        data: list[bytes] = []
        for number, (*has_token, is_step) in enumerate(steps):
            if number == leaves_at and not joined:
                streams[0].listen(readers[0].arrived)  # from now on without a lane
            tokens = []
            for position in (0, 1):
                if has_token[position]:
                    tokens.append(token(streams[position], sent[position]))
                    sent[position] += 1
            if tokens:
                data.append(step(*tokens) if is_step else frame(Kind.ITEMS, pack(tokens)))
                if not joined:
                    wire.connection.data_received(data[-1])
        if joined and data:
            wire.connection.data_received(b"".join(data))
        wire.say(
            *[StreamItem(stream.stream_id, END_INDEX, count, []) for stream, count in zip(streams, sent, strict=True)]
        )
        await asyncio.sleep(0)
        assert [reader.seen for reader in readers] == [list(range(count)) for count in sent]
        assert [stream.take() for stream in streams] == [None, None]  # clean ends: every token was counted

    asyncio.run(run())


async def test_a_reader_that_is_behind_gets_the_tokens_of_several_steps_at_once() -> None:
    wire = Wire()
    stream = wire.open()
    reader = Reader(stream)
    wire.connection.data_received(step(token(stream, 0)) + step(token(stream, 1)))
    assert (reader.seen, reader.calls) == ([0, 1], 1)


async def test_a_jump_in_a_step_is_found() -> None:
    wire = Wire()
    stream = wire.open()
    Reader(stream)
    stream.listener = None
    wire.connection.data_received(step(token(stream, 0)))
    wire.connection.data_received(step(token(stream, 2)))
    with pytest.raises(StreamIncomplete, match="jumped to token 2"):
        await stream.next_batch()


async def test_in_a_step_too_a_reader_that_fails_or_refuses_costs_no_other_stream_anything() -> None:
    wire = Wire()
    streams = [wire.open(), wire.open(), wire.open()]
    failing, refusing, well = Reader(streams[0], fails_at=0), Reader(streams[1], refuses_at=0), Reader(streams[2])
    for offset in range(2):
        wire.connection.data_received(step(*[token(stream, offset) for stream in streams]))
    assert [str(error) for error in failing.closed] == ["the reader failed"]
    assert (refusing.seen[:1], refusing.closed) == ([0], [None])
    assert (well.seen, well.closed) == ([0, 1], [])


class StepLane(Lane):
    """Takes even ids together with those of other lanes, and odd ones by itself; 7 makes it leave the lane of `other`."""

    def __init__(self, log: list[Any], stream: MuxStream, other: MuxStream | None = None) -> None:
        super().__init__(lambda ids: bool(log.append((stream.stream_id, ids))) or self._leave(ids))
        self._log, self._stream, self._other = log, stream, other

    def _leave(self, ids: list[int]) -> bool:
        if ids == [7] and self._other is not None:
            self._other.listen(None)
        return True

    @staticmethod
    def take_step(lanes: list[StepLane], ids: list[int], now: float) -> list[int]:
        lanes[0]._log.append([one for one in ids if one % 2 == 0])
        return [place for place, one in enumerate(ids) if one % 2]


async def test_lanes_of_one_kind_take_a_step_together_and_the_rest_one_by_one() -> None:
    wire, log = Wire(), list[Any]()
    one, two, three = wire.open(), wire.open(), wire.open()
    for stream in (one, two, three):
        stream.open_lane(StepLane(log, stream), lambda error: None)

    def tokens(*ids: int, offset: int = 0) -> list[StreamItem]:
        return [StreamItem(s.stream_id, 0, offset, [id]) for s, id in zip((one, two, three), ids, strict=True)]

    wire.connection.data_received(step(*tokens(2, 3, 4)))
    assert log == [[2, 4], (two.stream_id, [3])]
    log.clear()
    wire.connection.data_received(step(*tokens(6, 8, 10, offset=1)))
    assert log == [[6, 8, 10]]
    log.clear()
    two.open_lane(Lane(lambda ids: bool(log.append((two.stream_id, ids))) or True), lambda error: None)
    wire.connection.data_received(step(*tokens(2, 4, 6, offset=2)))  # two kinds: nothing is taken together
    assert log == [(one.stream_id, [2]), (two.stream_id, [4]), (three.stream_id, [6])]
    assert [stream.tokens_taken for stream in (one, two, three)] == [3, 3, 3]


async def test_a_stream_that_is_twice_in_a_step_keeps_its_order() -> None:
    wire, log = Wire(), list[Any]()
    stream = wire.open()
    stream.open_lane(StepLane(log, stream), lambda error: None)
    wire.connection.data_received(
        step(StreamItem(stream.stream_id, 0, 0, [3]), StreamItem(stream.stream_id, 0, 1, [4]))
    )
    assert log == [(stream.stream_id, [3]), (stream.stream_id, [4])]


async def test_a_reader_that_left_while_a_step_was_handed_out_finds_its_token_again() -> None:
    wire, log = Wire(), list[Any]()
    one, two = wire.open(), wire.open()
    one.open_lane(StepLane(log, one, two), lambda error: None)
    two.open_lane(StepLane(log, two), lambda error: None)
    wire.connection.data_received(step(StreamItem(one.stream_id, 0, 0, [7]), StreamItem(two.stream_id, 0, 0, [9])))
    assert log == [[], (one.stream_id, [7])]
    assert [(item.offset, item.token_ids) for item in await two.next_batch()] == [(0, [9])]


async def test_a_step_whose_columns_differ_in_length_breaks_the_wire() -> None:
    wire = Wire()
    wire.open()
    wire.connection.data_received(frame(Kind.STEP, pack(([1], [0, 1], [5]))))
    assert b"columns" in wire.written[-1]
    assert not wire.connection.usable


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
    Reader(one).stream.open_lane(Lane(lambda ids: bool(two.listen(None)) or True), lambda error: None)
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


@pytest.mark.parametrize("in_steps", [False, True])
async def test_the_worker_gets_its_credits_back(in_steps: bool) -> None:
    wire = Wire()
    stream = wire.open()
    Reader(stream)
    await asyncio.sleep(0)
    before = len(wire.written)
    for offset in range(INITIAL_CREDITS):
        if in_steps:
            wire.connection.data_received(step(token(stream, offset)))
        else:
            wire.say(token(stream, offset))
    await asyncio.sleep(0)
    frames = FrameDecoder().feed(b"".join(wire.written[before:]))
    granted = sum(
        amount for kind, _, _, payload in frames if kind == Kind.CREDIT for _, amount in msgspec.msgpack.decode(payload)
    )
    # Half a window at a time, and never more than what was taken: else a worker could fill the reader's memory.
    assert INITIAL_CREDITS // 2 <= granted <= INITIAL_CREDITS


async def test_a_routed_stream_opens_the_lane_of_its_worker_s_stream() -> None:
    """Else every token takes the long way, and no other test would notice."""
    wire = Wire()
    stream = wire.open()
    request = DispatchRequest({}, [], record=DispatchRecord(), timer=Any, limits=DispatchLimits())  # type: ignore[arg-type]
    pool = SimpleNamespace(pool=None, worker_wait=NO_WAIT, queries_of_death=None, stages=())
    routed = RoutedStream(pool, request, Context("r"))  # type: ignore[arg-type]
    routed._stream = stream
    seen: list[list[int]] = []
    items: list[list[StreamItem]] = []

    def take_tokens(ids: list[int]) -> bool:
        seen.append(ids)
        return len(seen) < 2

    reading = asyncio.create_task(routed.push(lambda batch: bool(items.append(batch)) or True, Lane(take_tokens)))
    await asyncio.sleep(0)
    wire.say(token(stream, 0), token(stream, 1))
    wire.say(token(stream, 2, extra={"n": 1}))
    wire.say(token(stream, 3))
    await reading  # the second refusal settles it
    assert seen == [[0, 1], [3]]
    assert [[item.token_ids for item in batch] for batch in items] == [[[2]]]
