"""The short way of plain tokens: what it sends and counts is what the long way would, and nothing is lost where it ends."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.pipeline.plain import NumberedOutput, PlainOutput, PlainTokens
from dynamo.runtime.calls.request_plane.base import StreamItem
from dynamo.text import ByteTokenizer, ChoiceDecoder
from support.properties import examples


class Spliced:
    """The short way of a `Stream`."""

    def __init__(self, push: Callable[[bytes, float], bool]) -> None:
        self.push = push

    @staticmethod
    def push_each(splicers: Sequence[Spliced], middles: Sequence[bytes], now: float) -> list[int]:
        pushed = [one.push(middle, now) for one, middle in zip(splicers, middles, strict=True)]
        return [place for place, is_pushed in enumerate(pushed) if not is_pushed]


class Counters:
    """Remembers what was counted."""

    def __init__(self) -> None:
        self.counted: list[int] = []

    def tokens(self, count: int, now: float) -> None:
        self.counted.append(count)

    @staticmethod
    def token_each(requests: Sequence[Counters], now: float) -> None:
        for request in requests:
            request.tokens(1, now)


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
        return Spliced(self._splice) if self._has_splicer else None

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
        self.others = list[list[int]]()
        self.tally = SimpleNamespace(completion_tokens=0)
        self.decoder = ChoiceDecoder(ByteTokenizer(), [], {"stop_token_ids": [ord("z")]}, {}, include_stop_str=False)
        counters: Any = Counters()
        self.counted: list[int] = counters.counted
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


@given(
    steps=st.lists(st.lists(st.sampled_from('ab"z\u20ac'), min_size=4, max_size=4), max_size=6),
    full=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 3))),
)
@examples(60)
def test_a_step_of_many_choices_is_what_its_tokens_are_one_by_one(
    steps: list[list[str]], full: set[tuple[int, int]]
) -> None:
    """z: the stop token; a character of several bytes is one token for each; the third choice has no splicer."""

    async def run() -> None:
        together, singly = ([Way(Stream(has_splicer=place != 2)) for place in range(4)] for _ in range(2))
        open_ways = set(range(4))
        bytes_of = [b"".join(step[place].encode() for step in steps) for place in range(4)]
        for number in range(min(map(len, bytes_of))):
            places = sorted(open_ways)
            for place in places:
                for ways in (together, singly):
                    ways[place].stream.is_full = (number, place) in full
            ids = [bytes_of[place][number] for place in places]
            lanes = [together[place].tokens for place in places]
            left = PlainTokens.take_step(lanes, ids, 1.0) if lanes else []
            assert left == sorted(left)
            over = {places[at] for at in left if not lanes[at].take_token(ids[at], 1.0)}
            assert over == {p for p, one in zip(places, ids, strict=True) if not singly[p].tokens.take_token(one, 1.0)}
            open_ways -= over
        for one, other in zip(together, singly, strict=True):
            one.tokens.settle()
            other.tokens.settle()
            assert vars(one.stream) | {"_splice": None} == vars(other.stream) | {"_splice": None}
            assert (one.generated, one.refused, one.others) == (other.generated, other.refused, other.others)
            assert (one.counted, one.tally) == (other.counted, other.tally)

    asyncio.run(run())
