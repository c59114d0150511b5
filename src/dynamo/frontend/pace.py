"""When a silent stream counts as stalled, judged by its own pace and by its neighbours at the same worker. Pure.

Silence is counted in beats, which come from one timer of the frontend: a beat in which the frontend itself stood still is one
beat, however long it was. So a suspended machine is never taken for a silent engine.

Two mistakes are possible, and they do not cost the same. To leave a worker that was only slow costs a computation; the client
sees nothing of it. To end a request that would have gone on costs the request. So the second takes far more evidence, and what
commonly makes a healthy worker pause (somebody's long prompt, a stream that is preempted while others go on) is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["Finding", "Pace", "Patience", "judge"]

BEATS_PER_FLOOR: Final = 20  # a limit is noticed at most a twentieth of the shortest one late
SHORTEST_BEAT_SECONDS: Final = 0.01

SETTLED_BEATS: Final = 4
"""Beats with tokens after which a stream's own gaps are known. Before, the time to its first token counts as one: an engine
that needs 15 s for a token has needed as much for the first."""

LONGEST_FLOORS: Final = 60  # no stream gets more than this many times the floor: ten minutes, as it comes

QUIET_GAPS: Final = 2
"""A slow neighbour counts as silent, too, only after twice its own longest gap: else every pause between its tokens would."""

ALONE_FACTOR: Final = 3
"""How much longer one stream may be silent while others of its worker go on: schedulers preempt a stream when memory is short,
and take it up again when another one has ended."""

PROMPT_FACTOR: Final = 3
"""The same for all streams of a worker that had a prompt to compute when they fell silent: without chunked prefill, everybody
waits for it."""

LAST_FACTOR: Final = 6  # the same for a request that no other worker can take: it is not moved then but ended


@dataclass(frozen=True, slots=True)
class Patience:
    """How long silence may last, in seconds; None (or a floor of 0): that rule is off."""

    floor_seconds: float = 10.0
    factor: float = 20.0  # times a stream's own longest gap
    first_token_seconds: float | None = None
    inter_token_seconds: float | None = None

    @property
    def is_on(self) -> bool:
        return self.floor_seconds > 0 or self.first_token_seconds is not None or self.inter_token_seconds is not None

    @property
    def beat_seconds(self) -> float:
        """How often to look."""
        limits = (self.floor_seconds or None, self.first_token_seconds, self.inter_token_seconds)
        return max(SHORTEST_BEAT_SECONDS, min([one for one in limits if one is not None]) / BEATS_PER_FLOOR)

    def beats(self, seconds: float) -> int:
        """A limit in beats; at least two, since a token may come right after a beat."""
        return max(2, math.ceil(seconds / self.beat_seconds - 1e-6))


class Pace:
    """The rhythm of one choice at the worker where it is."""

    __slots__ = ("_attempt", "_first_gap", "_seen", "heard", "longest", "silence")

    def __init__(self) -> None:
        self._attempt = -1
        self._seen = 0
        self._first_gap = 0
        self.heard = 0  # beats with tokens; 0: this worker has not said anything yet
        self.longest = 0  # the longest gap of this choice so far, in beats
        self.silence = 0  # beats since the last token, or since the worker was asked

    def beat(self, tokens: int, attempt: int, is_reading: bool) -> bool:
        """Look once; whether there are new tokens. `tokens`: all there were so far; `attempt`: another number is another worker; `is_reading`: False while
        its client is behind with what was said already, which is no silence of the engine."""
        if attempt != self._attempt:
            if self._attempt >= 0:  # else it has just begun, and all its tokens are this worker's
                self._seen = tokens
            self._attempt, self.heard, self.silence = attempt, 0, 0
        if tokens != self._seen:
            gap = self.silence + 1
            if self.heard:
                self.longest = max(self.longest, gap)
            else:
                self._first_gap = gap
            self._seen = tokens
            self.heard += 1
            self.silence = 0
            return True
        self.silence = self.silence + 1 if is_reading else 0
        return False

    @property
    def gap(self) -> int:
        """The longest silence that is usual for it, in beats, as far as is known."""
        return self.longest if self.heard >= SETTLED_BEATS else max(self.longest, self._first_gap)

    def limit(self, patience: Patience) -> int:
        """Beats of silence after which it is too quiet by its own measure."""
        floor = patience.beats(patience.floor_seconds)
        return min(max(floor, math.ceil(patience.factor * self.gap)), LONGEST_FLOORS * floor)


class Finding(Enum):
    """What is wrong with a stream."""

    FROZEN = "the worker says nothing to anybody"
    STUCK = "the worker says nothing to this request, but goes on with others"
    FIRST_TOKEN = "the first token did not come in time"
    INTER_TOKEN = "the next token did not come in time"

    @property
    def blames_worker(self) -> bool:
        """Whether other requests should stay away, too."""
        return self is Finding.FROZEN


def judge(paces: Sequence[Pace], patience: Patience, *, was_frozen: bool = False) -> list[tuple[Pace, Finding, bool]]:
    """Which of the streams at one worker to move, why, and whether that is the last word: ended, if it cannot be moved.

    `was_frozen`: this worker was found frozen, and has said nothing since.
    """
    found: dict[Pace, tuple[Finding, bool]] = {}
    if patience.floor_seconds > 0:
        _judge_stalls(paces, patience, was_frozen, found)
    for pace in paces:
        seconds = patience.inter_token_seconds if pace.heard else patience.first_token_seconds
        if seconds is not None and pace.silence >= patience.beats(seconds):
            found[pace] = (Finding.INTER_TOKEN if pace.heard else Finding.FIRST_TOKEN), True
    return [(pace, *verdict) for pace, verdict in found.items()]


def _judge_stalls(
    paces: Sequence[Pace], patience: Patience, was_frozen: bool, found: dict[Pace, tuple[Finding, bool]]
) -> None:
    begun = [pace for pace in paces if pace.heard]
    waiting = [pace for pace in paces if not pace.heard]
    if begun:
        shortest = min([pace.limit(patience) for pace in begun])
        quiet = min([pace.silence for pace in begun])  # since the worker last said anything
        if quiet >= shortest:
            had_prompt = any(pace.silence >= quiet for pace in waiting)
            limit = shortest * (PROMPT_FACTOR if had_prompt else 1)
            if all(pace.silence >= max(limit, QUIET_GAPS * pace.gap) for pace in begun):
                is_last = quiet >= LAST_FACTOR * shortest
                for pace in paces:
                    found[pace] = Finding.FROZEN, is_last
                return
        for pace in begun:
            own = pace.limit(patience)
            if pace.silence >= ALONE_FACTOR * own:
                found[pace] = Finding.STUCK, pace.silence >= LAST_FACTOR * own
    if was_frozen:
        floor = patience.beats(patience.floor_seconds)
        for pace in waiting:
            if pace.silence >= floor:
                found[pace] = Finding.FROZEN, pace.silence >= LAST_FACTOR * floor
