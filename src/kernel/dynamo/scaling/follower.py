"""Follows one role of one model over time: keeps the samples, and the state that decisions are made from."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from dynamo.scaling.decide import TREND_SECONDS, Decision, LoadSample, ScaleRules, ScaleState, decide

MAX_SAMPLES: Final = 2_000  # of the longest spell considered, once a second


class ScaleFollower:
    """The memory between decisions. Times are of one clock, in seconds; a clock that was set back does no harm."""

    def __init__(self, rules: ScaleRules, aimed: int) -> None:
        self.rules = rules
        self.aimed = aimed
        self.start_seconds: float | None = None
        self._samples: deque[LoadSample] = deque(maxlen=MAX_SAMPLES)
        self._keep_seconds = max(TREND_SECONDS, rules.down_after_seconds) + 10.0
        self._changed_at = -math.inf
        self._failures = 0
        self._failed_at = -math.inf

    def sample(self, load: float, now: float) -> None:
        """Note the load, in workers."""
        samples = self._samples
        if samples and samples[-1].at > now:
            samples.clear()
        samples.append(LoadSample(now, load))
        while samples and now - samples[0].at > self._keep_seconds:
            samples.popleft()

    def decide(self, ready: int, now: float) -> Decision:
        """Return how many workers there should be; `ready` of those aimed at serve. Nothing is changed: see `aim`."""
        state = ScaleState(
            self.aimed,
            tuple(self._samples),
            max(0, self.aimed - ready),
            self.start_seconds,
            self._changed_at,
            self._failures,
            self._failed_at,
        )
        return decide(state, self.rules, now)

    def aim(self, workers: int, now: float) -> None:
        """Aim at so many workers from now on."""
        if workers != self.aimed:
            self.aimed, self._changed_at = workers, now

    def started(self, seconds: float) -> None:
        """Note a start that took so long."""
        self.start_seconds = seconds
        self._failures = 0

    def failed(self, now: float) -> None:
        """Note a start that failed."""
        self._failures += 1
        self._failed_at = now


# The load of a model's workers of one role as one number. Pure.
#
# 1.0: they are full, and what comes next waits. The number is the largest of four, as each of them alone misses a kind of
# overload: requests hold places long before caches fill where prompts are short, and caches fill long before places are taken
# where prompts are long. Blocks that are only cached do not count: a prefix cache is full on purpose.

QUEUE_AGE_TARGET_SECONDS: Final = 1.0
"""A queue alone counts as up to a whole load more, which it does once a request has waited so long for its first token."""

SMOOTHING_SECONDS: Final = 15.0  # of what outside autoscalers read, so that a single sample does not decide

Part = Literal["none", "running", "waiting", "kv_blocks", "prefill_tokens"]


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """What the workers of one role of a model have to do, added up over them. None: they did not report it."""

    ready: int  # workers that are there
    running: int = 0  # requests that are with them, or wait for one of them
    limit: int | None = None  # requests that they run at once, together
    waiting: int = 0  # of `running`: those that have had no token yet
    queue_age_seconds: float = 0.0  # of the oldest that waits, while more are running than run at once
    kv_blocks: int | None = None  # that running requests hold
    total_kv_blocks: int | None = None
    prefill_tokens: int | None = None  # of prompts that are not computed yet
    prefill_budget: int | None = None  # tokens of one step, of all workers together

    def __add__(self, other: RoleLoad) -> RoleLoad:
        """Return the load of the same workers as two processes see it: each has its own requests, and receives the same reports.

        The facts of the workers are those of `self`.
        """
        return RoleLoad(
            self.ready,
            self.running + other.running,
            self.limit,
            self.waiting + other.waiting,
            max(self.queue_age_seconds, other.queue_age_seconds),
            self.kv_blocks,
            self.total_kv_blocks,
            self.prefill_tokens,
            self.prefill_budget,
        )


class Saturation(NamedTuple):
    """A load, and which part of it is the largest."""

    value: float
    part: Part


def saturation_of(load: RoleLoad) -> Saturation:
    """Return how full the workers are. Without any worker, waiting requests count as a whole load."""
    if load.ready == 0:
        return Saturation(1.0, "waiting") if load.running else Saturation(0.0, "none")
    return max(_parts(load), default=Saturation(0.0, "none"), key=lambda found: found.value)


def _parts(load: RoleLoad) -> Iterator[Saturation]:
    if load.running:
        if load.limit:
            yield Saturation(load.running / load.limit, "running")
        if load.waiting and load.queue_age_seconds > 0 and (load.limit is None or load.running > load.limit):
            age = load.queue_age_seconds / QUEUE_AGE_TARGET_SECONDS
            # Without a limit it is not known whether a request waits for others or for its own prompt: a short wait is no queue.
            if load.limit is not None or age > 1:
                yield Saturation(1.0 + min(1.0, age), "waiting")
    if load.kv_blocks and load.total_kv_blocks:
        yield Saturation(load.kv_blocks / load.total_kv_blocks, "kv_blocks")
    if load.prefill_tokens and load.prefill_budget:
        yield Saturation(load.prefill_tokens / load.prefill_budget, "prefill_tokens")


class Smoothed:
    """A moving average that forgets exponentially; times are of one clock that never goes back."""

    __slots__ = ("_at", "_seconds", "value")

    def __init__(self, seconds: float = SMOOTHING_SECONDS) -> None:
        self._seconds = seconds
        self._at: float | None = None
        self.value = 0.0

    def take(self, value: float, now: float) -> float:
        """Take a new value and return the average."""
        weight = 1.0 if self._at is None else -math.expm1((self._at - now) / self._seconds)
        self.value += max(0.0, weight) * (value - self.value)
        self._at = now
        return self.value
