"""Traces drawn after the statistics of published ones. Pure.

None of them is a published file. `conversation` and `synthetic` have the number of requests, the mean lengths, the clock and the
share of blocks seen before that Mooncake reports of its two traces of these names; `grid` is the workload of groups that share a
prefix, with 128 groups of 32 prompts. How long a person thinks before the next turn is in none of the published files. It
is an assumption here: half of the pauses are shorter than `think_seconds`.

A line of the published files names no session, so those are replayed by their times alone. In the drawn traces the first turn of
a conversation comes at a time of the trace, and each later one so long after the answer to the one before.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.replay.trace import Stretch, Trace, TraceRequest

BLOCK: Final = 512  # tokens that a name of the published files stands for
FEWEST_OUTPUT: Final = 2
MOST_OUTPUT: Final = 2000
THINK_SPREAD: Final = 0.8  # deviation of the logarithm of a pause
SECONDS_OF_A_TOKEN: Final = 0.02  # of an answer: sets where a later turn stands in the trace

Prompt = tuple[Stretch, ...]


class ConversationShape(msgspec.Struct, frozen=True):
    """Long conversations in groups of every few seconds; one block begins all prompts."""

    requests: int = 12_031
    rate: float = 3.4  # requests per second, in the mean
    group_seconds: float = 3.0  # the clock of the trace is that coarse
    median_tokens: int = 6_600  # of a first turn
    spread: float = 1.06  # deviation of the logarithm of that length
    least_tokens: int = 880
    most_tokens: int = 123_000
    turns: float = 1.68  # of a conversation, in the mean
    turn_tokens: int = 1_150  # that a later turn adds besides the answer before it, in the mean
    output_tokens: int = 343
    think_seconds: float = 45.0


class SyntheticShape(msgspec.Struct, frozen=True):
    """Short chats, and several questions about each of many long documents, as a Poisson process."""

    requests: int = 3_993
    rate: float = 3.7
    chats: float = 0.44  # share of the requests
    chat_tokens: int = 60  # median of a message
    chat_turns: float = 4.0
    document_tokens: int = 23_800  # median
    spread: float = 0.5
    most_tokens: int = 120_000
    questions: float = 3.4  # about a document, in the mean
    question_tokens: int = 60
    chat_output: int = 235
    document_output: int = 88
    think_seconds: float = 20.0


class GridShape(msgspec.Struct, frozen=True):
    """Groups of prompts that share a prefix, in an order that chance decides, as a Poisson process."""

    groups: int = 128
    prompts: int = 32  # of each group
    prefix_tokens: int = 2048
    question_tokens: int = 128
    output_tokens: int = 256
    rate: float = 20.0


class _Pen:
    """Draws lengths, pauses and new texts."""

    def __init__(self, seed: int, name: str) -> None:
        self.rng = random.Random(f"{seed} {name}")
        self._keys = count(1)  # 0 begins every conversation

    def text(self, tokens: int) -> Stretch:
        """Return a text that no other prompt has."""
        return Stretch(next(self._keys), max(1, tokens))

    def drawn(self, median: float, spread: float) -> float:
        """Draw from a lognormal distribution."""
        return median * math.exp(self.rng.gauss(0.0, spread))

    def answer(self, mean: float, spread: float = 0.8) -> int:
        """Draw the length of an answer with this mean."""
        drawn = self.drawn(mean * math.exp(-spread * spread / 2), spread)
        return max(FEWEST_OUTPUT, min(MOST_OUTPUT, round(drawn)))

    def goes_on(self, turns: float) -> bool:
        """Draw whether there is one more turn, where there are so many in the mean."""
        return self.rng.random() < 1 - 1 / turns


class _Turn(msgspec.Struct, frozen=True):
    """One request as it is drawn."""

    at: float  # seconds
    number: int  # breaks ties
    prompt: Prompt
    output: int
    session: str | None = None
    delay: float | None = None  # seconds after the answer before

    def __lt__(self, other: _Turn) -> bool:
        return (self.at, self.number) < (other.at, other.number)


_TurnsOf = Callable[[int, float], Iterator[_Turn]]
"""(number of a session, when it begins) -> its turns"""


def _check(shape: ConversationShape | SyntheticShape | GridShape) -> None:
    for name in shape.__struct_fields__:
        if not (math.isfinite(value := getattr(shape, name)) and value > 0):
            raise InvalidArgument(f"{name} must be above 0, got {value}")


def _trace(name: str, turns: Iterator[_Turn], requests: int) -> Trace:
    """Return the first requests of what is drawn, in the order of their times."""
    found = []
    for number, turn in zip(range(requests), turns, strict=False):
        found.append(
            TraceRequest(
                request_id=f"{name}-{number}",
                arrival_ms=round(1000 * turn.at, 3),
                prompt=turn.prompt,
                output_tokens=turn.output,
                session_id=turn.session,
                delay_ms=None if turn.delay is None else round(1000 * turn.delay, 3),
            )
        )
    found.sort(key=lambda request: request.arrival_ms)  # a coarse clock puts some before others; turns keep their order
    return Trace(name, found)


def _sessions(pen: _Pen, rate: float, turns_of: _TurnsOf) -> Iterator[_Turn]:
    """Yield the turns of sessions that begin as a Poisson process, in the order of their times."""
    waiting: list[_Turn] = []
    at = 0.0
    for session in count():
        at += pen.rng.expovariate(rate)
        while waiting and waiting[0].at <= at:
            yield heapq.heappop(waiting)
        for turn in turns_of(session, at):
            heapq.heappush(waiting, turn)


def _later(pen: _Pen, before: _Turn, number: int, prompt: Prompt, output: int, think_seconds: float) -> _Turn:
    """Return the turn that follows another one of its session."""
    delay = pen.drawn(think_seconds, THINK_SPREAD)
    at = before.at + delay + before.output * SECONDS_OF_A_TOKEN
    return _Turn(at, number, prompt, output, before.session, delay)


def conversation(seed: int, requests: int | None = None, shape: ConversationShape | None = None) -> Trace:
    """Draw a trace after Mooncake's conversation trace; `requests`: only the first so many. Raises InvalidArgument."""
    shape = shape or ConversationShape()
    _check(shape)
    pen, numbers = _Pen(seed, "conversation"), count()
    head = Stretch(0, BLOCK)

    def turns_of(session: int, begun: float) -> Iterator[_Turn]:
        tokens = max(shape.least_tokens, min(shape.most_tokens, pen.drawn(shape.median_tokens, shape.spread)))
        prompt: Prompt = (head, pen.text(round(tokens) - BLOCK))
        at = begun // shape.group_seconds * shape.group_seconds
        turn = _Turn(at, next(numbers), prompt, pen.answer(shape.output_tokens), f"talk-{session}")
        yield turn
        while pen.goes_on(shape.turns):
            added = turn.output + round(pen.rng.expovariate(1 / shape.turn_tokens))
            if sum(stretch.tokens for stretch in prompt) + added > shape.most_tokens:
                return
            prompt = (*prompt, pen.text(added))
            turn = _later(pen, turn, next(numbers), prompt, pen.answer(shape.output_tokens), shape.think_seconds)
            yield turn

    return _trace("conversation", _sessions(pen, shape.rate / shape.turns, turns_of), requests or shape.requests)


def synthetic(seed: int, requests: int | None = None, shape: SyntheticShape | None = None) -> Trace:
    """Draw a trace after Mooncake's synthetic trace; `requests`: only the first so many. Raises InvalidArgument."""
    shape = shape or SyntheticShape()
    _check(shape)
    pen, numbers = _Pen(seed, "synthetic"), count()
    chats, documents = shape.chats / shape.chat_turns, (1 - shape.chats) / shape.questions

    def chat(session: int, begun: float) -> Iterator[_Turn]:
        prompt: Prompt = ()
        turn: _Turn | None = None
        while turn is None or pen.goes_on(shape.chat_turns):
            message, output = round(pen.drawn(shape.chat_tokens, 1.0)), pen.answer(shape.chat_output)
            prompt = (*prompt, pen.text(message + (0 if turn is None else turn.output)))
            if turn is None:
                turn = _Turn(begun, next(numbers), prompt, output, f"chat-{session}")
            else:
                turn = _later(pen, turn, next(numbers), prompt, output, shape.think_seconds)
            yield turn

    def document(session: int, begun: float) -> Iterator[_Turn]:
        text = pen.text(min(shape.most_tokens, round(pen.drawn(shape.document_tokens, shape.spread))))
        turn: _Turn | None = None
        while turn is None or pen.goes_on(shape.questions):
            prompt = (text, pen.text(round(pen.drawn(shape.question_tokens, 0.7))))
            output = pen.answer(shape.document_output, 1.2)
            if turn is None:
                turn = _Turn(begun, next(numbers), prompt, output, f"document-{session}")
            else:
                turn = _later(pen, turn, next(numbers), prompt, output, shape.think_seconds)
            yield turn

    def turns_of(session: int, begun: float) -> Iterator[_Turn]:
        is_chat = pen.rng.random() < chats / (chats + documents)
        return chat(session, begun) if is_chat else document(session, begun)

    turns = _sessions(pen, shape.rate * (chats + documents), turns_of)
    return _trace("synthetic", turns, requests or shape.requests)


def grid(seed: int, requests: int | None = None, shape: GridShape | None = None) -> Trace:
    """Draw groups of prompts that share a prefix; `requests`: only the first so many. Raises InvalidArgument."""
    shape = shape or GridShape()
    _check(shape)
    pen = _Pen(seed, "grid")
    prefixes = [pen.text(shape.prefix_tokens) for _ in range(shape.groups)]
    order = prefixes * shape.prompts
    pen.rng.shuffle(order)

    def turns() -> Iterator[_Turn]:
        at = 0.0
        for number, prefix in enumerate(order):
            at += pen.rng.expovariate(shape.rate)
            yield _Turn(at, number, (prefix, pen.text(shape.question_tokens)), shape.output_tokens)

    return _trace("grid", turns(), requests or len(order))
