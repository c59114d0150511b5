"""Follows one role of one model over time: keeps the samples, and the state that decisions are made from."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

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
