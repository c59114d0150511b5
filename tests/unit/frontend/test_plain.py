"""The short way of plain tokens: what it sends and counts is what the long way would, and nothing is lost where it ends."""

from __future__ import annotations

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any

from dynamo.frontend.apis.plain import NumberedOutput, PlainOutput, PlainTokens
from dynamo.runtime.request_plane.base import StreamItem
from dynamo.text import ByteTokenizer, ChoiceDecoder


class Stream:
    """Takes events by its short way, until it is full."""

    is_committed = can_push = True
    pushed_at = 0.0

    def __init__(self, *, has_splicer: bool = True) -> None:
        self.events: list[bytes] = []
        self.is_full = False
        self._has_splicer, self._ends = has_splicer, (b"", b"")

    def splicer(self, opening: bytes, closing: bytes) -> Any:
        self._ends = (opening, closing)
        return SimpleNamespace(push=self._splice) if self._has_splicer else None

    def _splice(self, middle: bytes, now: float) -> bool:
        return self.push(middle.join(self._ends), now)

    def push(self, data: bytes, now: float) -> bool:
        if not self.is_full:
            self.events.append(data)
        return not self.is_full


class Way:
    """The short way of one choice whose stop token is `z`."""

    def __init__(self, stream: Stream, *, is_numbered: bool = False) -> None:
        self.stream, self.refused, self.generated = stream, list[bytes](), list[int]()
        self.counted, self.others = list[int](), list[list[int]]()
        self.tally = SimpleNamespace(completion_tokens=0)
        self.decoder = ChoiceDecoder(ByteTokenizer(), [], {"stop_token_ids": [ord("z")]}, {}, include_stop_str=False)
        counters: Any = SimpleNamespace(tokens=lambda count, now: self.counted.append(count))
        output: PlainOutput
        if is_numbered:
            numbers = itertools.count()
            output = NumberedOutput(
                lambda piece: b"%d<%b>" % (next(numbers), piece),
                stream,  # type: ignore[arg-type]
                self.refused,
                counters,
                None,
            )
        else:
            output = PlainOutput((b"<", b">"), stream, self.refused, counters, None)  # type: ignore[arg-type]
        self.tokens = PlainTokens(self.decoder, self.generated, self.tally, output, self.otherwise)

    def otherwise(self, items: list[StreamItem]) -> bool:
        self.others.append([token for item in items for token in item.token_ids])
        return False

    def take(self, text: str) -> list[bool]:
        now = asyncio.get_running_loop().time()
        return [self.tokens.take_token(byte, now) for byte in text.encode()]


async def test_each_token_becomes_an_event_and_is_counted() -> None:
    for has_splicer in (True, False):
        way = Way(Stream(has_splicer=has_splicer))
        assert way.take('a"\n') == [True] * 3
        assert [json.loads(event[1:-1]) for event in way.stream.events] == ["a", '"', "\n"]
        assert (way.generated, way.counted) == ([97, 34, 10], [1, 1, 1])
        way.tokens.settle()
        way.tokens.settle()  # a second time adds nothing
        assert (way.tally.completion_tokens, way.decoder.generated) == (3, 3)


async def test_a_character_of_several_tokens_is_one_event() -> None:
    way = Way(Stream())
    assert way.take("a\u20acb") == [True] * 5
    assert [json.loads(event[1:-1]) for event in way.stream.events] == ["a", "\u20ac", "b"]
    way.tokens.settle()
    assert (way.tally.completion_tokens, way.decoder.generated, len(way.generated)) == (5, 5, 5)


async def test_an_api_may_write_each_event_itself() -> None:
    way = Way(Stream(), is_numbered=True)
    assert way.take("a€") == [True] * 4
    way.stream.is_full = True
    assert way.take("b") == [False]
    way.stream.is_full = False
    assert way.take("c") == [True]
    # What was refused was written once, and waits for its writer.
    assert way.stream.events == [b'0<"a">', '1<"€">'.encode(), b'3<"c">']
    assert way.refused == [b'2<"b">']
    way.tokens.settle()
    assert way.tally.completion_tokens == 6


async def test_tokens_that_come_together_are_one_event() -> None:
    way = Way(Stream())
    assert way.tokens.take_tokens(list(b"ab"))
    assert way.tokens.take_items([StreamItem(1, 0, 2, [99]), StreamItem(1, 0, 3, [100])])
    assert (way.stream.events, way.counted) == ([b'<"ab">', b'<"cd">'], [2, 2])
    assert (way.tally.completion_tokens, way.decoder.generated) == (4, 4)


async def test_a_token_that_may_stop_goes_the_long_way_which_knows_all_that_came_before() -> None:
    way = Way(Stream())
    assert way.take("ab") == [True, True]
    assert way.take("z") == [False]
    assert (way.others, way.generated) == ([[ord("z")]], [97, 98])
    assert (way.tally.completion_tokens, way.decoder.generated) == (2, 2)


async def test_an_item_with_more_than_tokens_goes_the_long_way() -> None:
    way = Way(Stream())
    assert not way.tokens.take_items([StreamItem(1, 0, 0, [97]), StreamItem(1, 0, 1, [98], None, {"log_probs": [0.0]})])
    assert (way.others, way.stream.events) == ([[97, 98]], [])


async def test_the_event_that_a_slow_client_cannot_take_is_kept_for_the_writer() -> None:
    for has_splicer in (True, False):
        way = Way(Stream(has_splicer=has_splicer))
        assert way.take("a") == [True]
        way.stream.is_full = True
        assert way.take("b") == [False]
        assert (way.stream.events, way.refused) == ([b'<"a">'], [b'<"b">'])
        way.tokens.settle()
        assert way.tally.completion_tokens == 2
