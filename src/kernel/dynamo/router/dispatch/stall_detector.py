"""When a silent stream counts as stalled, and what moves it: judged by its own cadence and by its neighbours at the worker.

Silence is counted in ticks of one timer for the whole frontend. A tick during which the frontend itself stood still is one
tick, however long it was, so a suspended machine is never taken for a silent engine. The timer reads numbers that are
there anyway (how many tokens a stream has), so it costs nothing for a token and nothing for a wake-up.

Two mistakes are possible, and they do not cost the same. To leave a worker that was only slow costs a computation, and the
client sees nothing of that. To end a request that would have gone on costs the request. So ending a request takes far more
evidence than moving it, and the common pauses of a healthy worker (another request's long prompt, a stream that is preempted
while others go on) are waited for.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from msgspec import Struct

from dynamo.errors import DynamoException, ResponseTimeout

logger = logging.getLogger(__name__)

TICKS_PER_FLOOR: Final = 20  # a limit is noticed at most a twentieth of the shortest one late
SHORTEST_TICK_SECONDS: Final = 0.01

SETTLED_TICKS: Final = 4
"""Ticks with tokens after which a stream's own gaps are known. Before, the time to its first token counts as one: an engine
that needs 15 s for a token has needed as much for the first."""

LONGEST_FLOORS: Final = 60  # no stream gets more than this many times the floor: ten minutes, as it comes

QUIET_GAPS: Final = 2
"""A slow neighbour counts as silent, too, only after twice its own longest gap: else every pause between its tokens would."""

ALONE_FACTOR: Final = 3
"""How much longer one stream may be silent while others of its worker go on: schedulers preempt a stream when memory is short,
and take it up again when another one has ended."""

PROMPT_FACTOR: Final = 3
"""The same for all streams of a worker that had a prompt to compute when they fell silent: without chunked prefill, all
streams wait for it."""

LAST_FACTOR: Final = 6  # the same for a request that no other worker can take: it is not moved then but ended


@dataclass(frozen=True, slots=True)
class StallPolicy:
    """How long silence may last, in seconds; None (or a floor of 0): that rule is off."""

    floor_seconds: float = 10.0
    factor: float = 20.0  # times a stream's own longest gap
    first_token_seconds: float | None = None
    inter_token_seconds: float | None = None

    @property
    def is_on(self) -> bool:
        return self.floor_seconds > 0 or self.first_token_seconds is not None or self.inter_token_seconds is not None

    @property
    def tick_seconds(self) -> float:
        """How often to check."""
        limits = (self.floor_seconds or None, self.first_token_seconds, self.inter_token_seconds)
        return max(SHORTEST_TICK_SECONDS, min([one for one in limits if one is not None]) / TICKS_PER_FLOOR)

    def ticks(self, seconds: float) -> int:
        """Return a limit in ticks: at least two, since a token may come right after a tick."""
        return max(2, math.ceil(seconds / self.tick_seconds - 1e-6))


class TokenCadence(Struct, eq=False):
    """The rhythm of one stream at the worker where it is."""

    _attempt: int = -1
    _seen: int = 0
    _first_gap: int = 0
    ticks_with_tokens: int = 0  # 0: this worker has not sent anything yet
    longest: int = 0  # the longest gap of this stream so far, in ticks
    silence: int = 0  # ticks since the last token, or since the request was sent

    def tick(self, tokens: int, attempt: int, is_reading: bool) -> bool:
        """Check the stream once; return whether there are new tokens.

        `tokens`: all there were so far. `attempt`: another number is another worker. `is_reading`: False while its client is
        behind with what has arrived already, which is not a silence of the engine.
        """
        if attempt != self._attempt:
            if self._attempt >= 0:  # else it has just begun, and all its tokens are this worker's
                self._seen = tokens
            self._attempt, self.ticks_with_tokens, self.silence = attempt, 0, 0
        if tokens != self._seen:
            gap = self.silence + 1
            if self.ticks_with_tokens:
                self.longest = max(self.longest, gap)
            else:
                self._first_gap = gap
            self._seen = tokens
            self.ticks_with_tokens += 1
            self.silence = 0
            return True
        self.silence = self.silence + 1 if is_reading else 0
        return False

    def has_news(self, tokens: int, attempt: int) -> bool:
        """Return whether there are tokens that the last check did not see, or another attempt."""
        return tokens != self._seen or attempt != self._attempt

    @property
    def gap(self) -> int:
        """The longest silence that is usual for this stream, in ticks, as far as is known."""
        return self.longest if self.ticks_with_tokens >= SETTLED_TICKS else max(self.longest, self._first_gap)


def _limit(gap: int, factor: float, floor: int) -> int:
    """Return the ticks of silence after which a stream with this usual gap is too quiet by its own measure."""
    return min(max(floor, math.ceil(factor * gap)), LONGEST_FLOORS * floor)


class StallKind(Enum):
    """What is wrong with a stream."""

    FROZEN = "the worker sends nothing on any stream"
    STUCK = "the worker sends nothing on this stream but goes on with others"
    FIRST_TOKEN = "the first token did not come in time"
    INTER_TOKEN = "the next token did not come in time"

    @property
    def is_worker_fault(self) -> bool:
        """Whether other requests should avoid the worker, too."""
        return self is StallKind.FROZEN


def judge(
    cadences: Sequence[TokenCadence], policy: StallPolicy, *, was_frozen: bool = False
) -> list[tuple[TokenCadence, StallKind, bool]]:
    """Decide for each stream at one worker whether to move it, why, and whether to end it if it cannot be moved.

    `was_frozen`: the worker was found frozen and has sent nothing since.
    """
    found: dict[TokenCadence, tuple[StallKind, bool]] = {}
    if policy.floor_seconds > 0:
        _judge_stalls(cadences, policy, was_frozen, found)
    for cadence in cadences:
        seconds = policy.inter_token_seconds if cadence.ticks_with_tokens else policy.first_token_seconds
        if seconds is not None and cadence.silence >= policy.ticks(seconds):
            found[cadence] = (StallKind.INTER_TOKEN if cadence.ticks_with_tokens else StallKind.FIRST_TOKEN), True
    return [(cadence, *verdict) for cadence, verdict in found.items()]


def _judge_stalls(
    cadences: Sequence[TokenCadence],
    policy: StallPolicy,
    was_frozen: bool,
    found: dict[TokenCadence, tuple[StallKind, bool]],
) -> None:
    floor, factor = policy.ticks(policy.floor_seconds), policy.factor
    begun = [cadence for cadence in cadences if cadence.ticks_with_tokens]
    waiting = [cadence for cadence in cadences if not cadence.ticks_with_tokens]
    if begun:
        shortest = _limit(min([cadence.gap for cadence in begun]), factor, floor)
        quiet = min([cadence.silence for cadence in begun])  # since the worker last sent anything
        if quiet >= shortest:
            had_prompt = any(cadence.silence >= quiet for cadence in waiting)
            limit = shortest * (PROMPT_FACTOR if had_prompt else 1)
            if all(cadence.silence >= max(limit, QUIET_GAPS * cadence.gap) for cadence in begun):
                is_last = quiet >= LAST_FACTOR * shortest
                for cadence in cadences:
                    found[cadence] = StallKind.FROZEN, is_last
                return
        for cadence in begun:
            if cadence.silence < ALONE_FACTOR * floor:
                continue  # as nearly all: no limit is shorter than the floor
            own = _limit(cadence.gap, factor, floor)
            if cadence.silence >= ALONE_FACTOR * own:
                found[cadence] = StallKind.STUCK, cadence.silence >= LAST_FACTOR * own
    if was_frozen:
        for cadence in waiting:
            if cadence.silence >= floor:
                found[cadence] = StallKind.FROZEN, cadence.silence >= LAST_FACTOR * floor


EXAMINED_AT_ONCE: Final = 1024  # streams; a millisecond or so, and then other work goes on
MAX_FROZEN: Final = 1024  # workers remembered; the oldest is forgotten


class WatchedStream(Protocol):
    """What is needed of a stream."""

    is_reading: bool  # waiting for its worker, and not for its client

    @property
    def request_id(self) -> str: ...

    @property
    def tokens(self) -> int:
        """How many tokens there were so far."""

    @property
    def attempts(self) -> int:
        """How many workers were tried so far."""

    @property
    def instance_id(self) -> int | None:
        """The worker whose answer is awaited or read; None between two workers."""

    def fail_over(self, error: DynamoException, *, is_worker_fault: bool, is_last: bool) -> bool:
        """Leave the worker because of `error`; return whether that was done.

        `is_worker_fault`: other requests should avoid the worker, too. Without `is_last` the stream only leaves the worker
        if another worker can go on.
        """
        ...


class StallDetector:
    """Watches the running streams of one frontend and moves those without progress. It has one timer."""

    def __init__(self, policy: StallPolicy, on_stall: Callable[[StallKind], None]) -> None:
        """`on_stall`: for the metrics; called once for each stream that is moved or ended."""
        self.policy = policy
        self._is_on = policy.is_on
        self._tick_seconds = policy.tick_seconds if policy.is_on else 0.0
        self._on_stall = on_stall
        self._cadences: dict[WatchedStream, TokenCadence] = {}  # bounded by the requests in flight
        self._frozen: dict[int, None] = {}  # found so, and no token came from there since
        self._timer: asyncio.TimerHandle | None = None
        self._rest: asyncio.Handle | None = None  # of a tick

    def add(self, stream: WatchedStream) -> None:
        """Watch a stream that begins."""
        if self._is_on:
            self._cadences[stream] = TokenCadence()
            if self._timer is None:
                self._set_timer()

    def remove(self, stream: WatchedStream) -> None:
        """Stop watching a stream that has ended; idempotent."""
        self._cadences.pop(stream, None)
        if not self._cadences:
            self.close()

    def close(self) -> None:
        """Stop the timer; it starts again with the next stream."""
        for handle in (self._timer, self._rest):
            if handle is not None:
                handle.cancel()
        self._timer = self._rest = None

    def __len__(self) -> int:
        return len(self._cadences)

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)

    def _tick(self) -> None:
        self._set_timer()
        if self._rest is None:  # else the last tick is not through, and this one is part of it
            self._go_on(self._pieces())

    def _go_on(self, pieces: Iterator[None]) -> None:
        """Do a piece of a tick, and the rest of it in other turns of the loop."""
        self._rest = None
        if next(pieces, pieces) is None:
            self._rest = asyncio.get_running_loop().call_soon(self._go_on, pieces)

    def _pieces(self) -> Iterator[None]:
        """Check every stream, `EXAMINED_AT_ONCE` in each piece. Streams may come and go between two pieces."""
        frozen = self._frozen
        by_worker: dict[int, list[TokenCadence]] = {}
        streams: dict[TokenCadence, WatchedStream] = {}
        for number, (stream, cadence) in enumerate(list(self._cadences.items()), 1):
            if not number % EXAMINED_AT_ONCE:
                yield
            if self._cadences.get(stream) is not cadence:
                continue
            instance_id = stream.instance_id
            has_news = cadence.tick(stream.tokens, stream.attempts, stream.is_reading)
            if instance_id is None:
                continue
            if has_news and frozen:
                frozen.pop(instance_id, None)
            if stream.is_reading:
                streams[cadence] = stream
                by_worker.setdefault(instance_id, []).append(cadence)
        judged = 0
        for instance_id, cadences in by_worker.items():
            if (judged := judged + len(cadences)) >= EXAMINED_AT_ONCE:
                judged = 0
                yield
            for cadence, kind, is_last in judge(cadences, self.policy, was_frozen=instance_id in frozen):
                stream = streams[cadence]
                has_same = self._cadences.get(stream) is cadence and stream.instance_id == instance_id
                if has_same and not cadence.has_news(stream.tokens, stream.attempts):
                    self._give_up(stream, instance_id, cadence, kind, is_last)

    def _give_up(
        self, stream: WatchedStream, instance_id: int, cadence: TokenCadence, kind: StallKind, is_last: bool
    ) -> None:
        seconds = cadence.silence * self._tick_seconds
        if kind is StallKind.FROZEN:
            if len(self._frozen) >= MAX_FROZEN:
                self._frozen.pop(next(iter(self._frozen)))
            self._frozen[instance_id] = None
        error = ResponseTimeout(f"no token for {seconds:.1f} s: {kind.value}")
        if stream.fail_over(error, is_worker_fault=kind.is_worker_fault, is_last=is_last):
            cadence.silence = 0
            self._on_stall(kind)
            logger.warning(
                "request %s: no token from worker %x for %.1f s (%s); leaving the worker",
                stream.request_id,
                instance_id,
                seconds,
                kind.value,
            )
