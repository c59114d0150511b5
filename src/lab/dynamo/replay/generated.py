"""Traces drawn from a seed: chats, questions about documents, single prompts and bursts. Pure.

Four kinds of use share the arrivals. Every prompt begins with one of a few system prompts.

- Chats: turn after turn, each with the whole conversation before it, with time to read and write in between.
- Documents: a question behind a document. Few documents get many questions, most get few (Zipf).
- Bursts: many questions about one document within half a second.
- Single prompts that share nothing but the system prompt.

Each kind arrives as a Poisson process. Lengths are drawn around shares of `prompt_tokens`, so the same shape at 1k, 4k and
16k tokens differs in nothing but its size.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate, count
from typing import Final

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.replay.trace import Stretch, Trace, TraceRequest

SYSTEM_SHARE: Final = 1 / 8  # of `prompt_tokens`, as all shares below
DOCUMENT_SHARE: Final = 3 / 4
QUESTION_SHARE: Final = 1 / 12
FIRST_MESSAGE_SHARE: Final = 1 / 3
TURN_SHARE: Final = 1 / 6  # an answer and the next message
SINGLE_SHARE: Final = 3 / 4
BURST_SECONDS: Final = 0.5
FEWEST_TOKENS: Final = 8  # of a drawn length
STAMPEDE: Final = "stampede"

Arrival = tuple[float, int, tuple[Stretch, ...], str | None]
"""(seconds, a number that breaks ties, prompt, session)"""


class TraceShape(msgspec.Struct, frozen=True):
    """What a generated trace is like."""

    requests: int = 2000
    rate: float = 16.0  # requests per second, in the mean
    prompt_tokens: int = 4096  # in the mean, about
    output_tokens: int = 64
    chats: float = 0.45  # shares of the requests; what is left of 1 are single prompts
    documents: float = 0.3
    bursts: float = 0.1
    system_prompts: int = 8
    document_count: int = 60
    zipf: float = 1.0  # the document at place k of the list gets 1 / k ** zipf as many questions as the first
    turns: float = 8.0  # of a chat, in the mean
    chats_alive: float = 32.0  # at a time, in the mean: sets how long people think
    burst_size: float = 12.0  # in the mean

    def check(self) -> None:
        """Raise InvalidArgument, naming the member, for a shape that cannot be drawn."""
        for name in ("requests", "prompt_tokens", "output_tokens", "system_prompts", "document_count"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("rate", "turns", "chats_alive", "burst_size"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise InvalidArgument(f"{name} must be above 0, got {value}")
        for name in ("chats", "documents", "bursts"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise InvalidArgument(f"{name} must be a share from 0 to 1, got {share}")
        if self.chats + self.documents + self.bursts > 1 + 1e-9:
            raise InvalidArgument("chats, documents and bursts together must not be above 1")


class _Pen:
    """Draws lengths and new texts; every text has a key of its own."""

    def __init__(self, rng: random.Random, scale: int) -> None:
        self._rng = rng
        self._scale = scale
        self._keys = count()

    def write(self, share: float, spread: float = 0.35) -> Stretch:
        """Return a new text of about `share` of the trace's prompt length."""
        return Stretch(next(self._keys), self.length(share * self._scale, spread))

    def length(self, mean: float, spread: float) -> int:
        """Draw a length with this mean: lognormal, with `spread` as the deviation of its logarithm."""
        return max(FEWEST_TOKENS, round(mean * self._rng.lognormvariate(-spread * spread / 2, spread)))


class _Zipf:
    """Draws places of a list: the place k (from 0) with a weight of 1 / (k + 1) ** exponent."""

    def __init__(self, size: int, exponent: float) -> None:
        self._sums = list(accumulate((place + 1) ** -exponent for place in range(size)))

    def draw(self, rng: random.Random) -> int:
        """Draw one place."""
        return bisect_left(self._sums, rng.random() * self._sums[-1])


def generate(shape: TraceShape, seed: int, name: str = "generated") -> Trace:
    """Draw a trace. The same shape and seed give the same trace on any machine. Raises InvalidArgument."""
    shape.check()
    seconds = shape.requests / shape.rate
    arrivals: list[Arrival] = []
    longer = 1.2
    while len(arrivals) < shape.requests:  # a Poisson process may bring fewer than its mean
        arrivals = sorted(_arrivals(shape, random.Random(f"{seed} arrivals"), seconds * longer + 1))
        longer *= 1.5
    rng = random.Random(f"{seed} answers")
    pen = _Pen(rng, shape.prompt_tokens)
    return Trace(
        name,
        [
            TraceRequest(
                request_id=f"r{number}",
                arrival_ms=round(1000 * at, 3),
                prompt=prompt,
                output_tokens=max(2, pen.length(shape.output_tokens, 0.5)),
                session_id=session,
            )
            for number, (at, _, prompt, session) in enumerate(arrivals[: shape.requests])
        ],
    )


def _arrivals(shape: TraceShape, rng: random.Random, seconds: float) -> Iterator[Arrival]:
    """Yield what arrives within `seconds`, in no order."""
    pen = _Pen(rng, shape.prompt_tokens)
    systems = [pen.write(SYSTEM_SHARE, 0.2) for _ in range(shape.system_prompts)]
    library = [(rng.choice(systems), pen.write(DOCUMENT_SHARE)) for _ in range(shape.document_count)]
    zipf = _Zipf(shape.document_count, shape.zipf)
    order = count()
    single = 1 - shape.chats - shape.documents - shape.bursts

    def question(document: int) -> tuple[Stretch, ...]:
        return (*library[document], pen.write(QUESTION_SHARE))

    for at in _poisson(rng, shape.rate * shape.documents, 0.0, seconds):
        yield at, next(order), question(zipf.draw(rng)), None
    for at in _poisson(rng, shape.rate * max(0.0, single), 0.0, seconds):
        yield at, next(order), (rng.choice(systems), pen.write(SINGLE_SHARE)), None
    for at in _poisson(rng, shape.rate * shape.bursts / shape.burst_size, 0.0, seconds):
        document = zipf.draw(rng)
        for _ in range(max(2, round(rng.gauss(shape.burst_size, shape.burst_size / 4)))):
            yield at + rng.random() * BURST_SECONDS, next(order), question(document), None
    yield from _chats(shape, rng, seconds, systems, pen, order)


def _chats(
    shape: TraceShape,
    rng: random.Random,
    seconds: float,
    systems: list[Stretch],
    pen: _Pen,
    order: count[int],
) -> Iterator[Arrival]:
    """Yield the turns of all chats, also of those that began before the trace does."""
    if not shape.chats:
        return
    rate = shape.rate * shape.chats / shape.turns  # of new chats
    pause = shape.chats_alive / (rate * shape.turns)  # between two turns, in the mean
    for number, begun in enumerate(_poisson(rng, rate, -4 * shape.turns * pause, seconds)):
        at = begun
        prompt: tuple[Stretch, ...] = (rng.choice(systems), pen.write(FIRST_MESSAGE_SHARE))
        while at < seconds:
            if at >= 0:
                yield at, next(order), prompt, f"chat-{number}"
            if rng.random() < 1 / shape.turns:
                break
            at += pause * (0.25 + 0.75 * rng.expovariate(1.0))  # a person does not answer at once
            prompt = (*prompt, pen.write(TURN_SHARE))


def _poisson(rng: random.Random, rate: float, begin: float, end: float) -> Iterator[float]:
    """Yield the times of a Poisson process."""
    if rate <= 0:
        return
    at = begin + rng.expovariate(rate)
    while at < end:
        yield at
        at += rng.expovariate(rate)


def stampede(
    requests: int,
    prefix_tokens: int,
    within_ms: float,
    seed: int,
    *,
    output_tokens: int = 16,
    beside: Trace | None = None,
) -> Trace:
    """Draw many requests that begin with one cold prefix, all within a moment; `beside`: other traffic of that time.

    They arrive in the middle of the other traffic. Their policy class is `STAMPEDE`.
    """
    rng = random.Random(f"{seed} stampede")
    start = 0.0
    others: list[TraceRequest] = []
    if beside is not None:
        others = list(beside.requests)
        start = others[len(others) // 2].arrival_ms
    prefix = Stretch(-1, prefix_tokens)
    crowd = [
        TraceRequest(
            request_id=f"stampede-{number}",
            arrival_ms=round(start + rng.random() * within_ms, 3),
            prompt=(prefix, Stretch(-2 - number, 32 + rng.randrange(64))),
            output_tokens=output_tokens,
            policy_class=STAMPEDE,
        )
        for number in range(requests)
    ]
    crowd.sort(key=_arrival)
    return Trace(STAMPEDE, list(heapq.merge(others, crowd, key=_arrival)))


def _arrival(request: TraceRequest) -> float:
    return request.arrival_ms


class MooncakeShape(msgspec.Struct, frozen=True):
    """What a trace like Mooncake's is like: long prompts in blocks of 512 tokens, in groups every few seconds.

    The published traces are not part of this package; `dynamo bench replay --trace FILE` replays them where they are.
    """

    requests: int = 1000
    rate: float = 3.3
    group_seconds: float = 3.0  # the clock of the trace is that coarse
    median_tokens: int = 6900
    spread: float = 1.1  # deviation of the logarithm of a length
    most_tokens: int = 122_880
    output_tokens: int = 340
    chats: float = 0.55  # shares of the requests: conversations, programs with one of a few long instructions, the rest
    programs: float = 0.3
    turns: float = 4.0
    program_count: int = 12


def generate_mooncake_like(shape: MooncakeShape, seed: int, name: str = "mooncake-like") -> Trace:
    """Draw a trace with the lengths, sharing and coarse clock of the Mooncake traces. Raises InvalidArgument."""
    if shape.requests < 1 or not shape.rate > 0:
        raise InvalidArgument("requests and rate must be above 0")
    rng = random.Random(f"{seed} mooncake")
    blocks = count(1)  # id 0 begins every prompt
    block = 512

    def text(tokens: float) -> tuple[Stretch, ...]:
        return tuple(Stretch(next(blocks), block) for _ in range(max(1, round(tokens / block))))

    def length(median: float) -> float:
        return min(shape.most_tokens, median * math.exp(rng.gauss(0.0, shape.spread)))

    head = (Stretch(0, block),)
    programs = [(*head, *text(rng.uniform(2000, 8000))) for _ in range(shape.program_count)]
    talks: list[tuple[str, tuple[Stretch, ...]]] = []
    draws: list[Callable[[], tuple[str | None, tuple[Stretch, ...]]]] = []

    def turn() -> tuple[str | None, tuple[Stretch, ...]]:
        """Go on with a recent conversation, or begin one."""
        if talks and rng.random() < 1 - 1 / shape.turns:
            place = rng.randrange(len(talks))
            session, prompt = talks[place]
            longer = (*prompt, *text(rng.expovariate(1 / 1500) + shape.output_tokens))
            if len(longer) * block > shape.most_tokens:
                longer = prompt  # the same question again
            talks[place] = session, longer
            return session, longer
        session = f"talk-{next(blocks)}"
        talks.append((session, (*head, *text(length(shape.median_tokens)))))
        if len(talks) > 60:
            talks.pop(0)
        return talks[-1]

    def program() -> tuple[str | None, tuple[Stretch, ...]]:
        return None, (*rng.choice(programs), *text(length(shape.median_tokens / 4)))

    def single() -> tuple[str | None, tuple[Stretch, ...]]:
        return None, (*head, *text(length(shape.median_tokens)))

    draws = [turn, program, single]
    weights = [shape.chats, shape.programs, max(0.0, 1 - shape.chats - shape.programs)]
    requests: list[TraceRequest] = []
    at = 0.0
    for number in range(shape.requests):
        at += rng.expovariate(shape.rate)
        session, prompt = rng.choices(draws, weights)[0]()
        cut = prompt[-1]._replace(tokens=rng.randrange(1, block + 1))  # the last block is seldom full
        requests.append(
            TraceRequest(
                request_id=f"m{number}",
                arrival_ms=1000 * shape.group_seconds * (at // shape.group_seconds),
                prompt=(*prompt[:-1], cut),
                output_tokens=max(2, round(shape.output_tokens * rng.lognormvariate(-0.32, 0.8))),
                session_id=session,
            )
        )
    return Trace(name, requests)
