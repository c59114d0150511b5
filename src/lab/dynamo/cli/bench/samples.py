"""What a run remembers: histograms, a timeline and counters, all of a size that does not depend on its length. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

GROWTH: Final = 1.005  # each bucket's width: a quantile is within half a percent
LOWEST_SECONDS: Final = 1e-6
BUCKETS: Final = 4500  # reaches 1.5 hours
_SCALE: Final = 1 / math.log(GROWTH)

MAX_INTERVALS: Final = 600  # a plot shows no more; then two become one
MAX_FAILURE_KINDS: Final = 50
OTHER_FAILURES: Final = "other failures"

_log = math.log


class SampleHistogram:
    """Durations in seconds, in log-spaced buckets of one fixed array."""

    __slots__ = ("_counts", "count", "highest", "lowest", "total")

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS
        self.count = 0
        self.total = 0.0
        self.lowest = math.inf
        self.highest = 0.0

    def add(self, seconds: float) -> None:
        """Count one sample. A sample beyond the last bucket counts in the last bucket; `highest` is exact."""
        index = int(_log(seconds * 1e6) * _SCALE) if seconds > LOWEST_SECONDS else 0
        self._counts[index if index < BUCKETS else -1] += 1
        self.count += 1
        self.total += seconds
        if seconds > self.highest:
            self.highest = seconds
        if seconds < self.lowest:
            self.lowest = seconds

    @property
    def mean(self) -> float:
        """0 without samples."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """Return the value that a share `q` of the samples does not exceed, to half a percent; 0 without samples."""
        if not self.count:
            return 0.0
        rank = max(1, math.ceil(q * self.count))
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if seen >= rank:
                middle = LOWEST_SECONDS * math.exp((index + 0.5) / _SCALE)
                return min(max(middle, self.lowest), self.highest)
        return self.highest

    def cumulative(self) -> Iterator[tuple[float, float]]:
        """Yield (seconds, share of the samples up to there), rising, one point per bucket that has samples."""
        seen = 0
        for index, count in enumerate(self._counts):
            if count:
                seen += count
                yield min(LOWEST_SECONDS * math.exp((index + 1) / _SCALE), self.highest), seen / self.count


@dataclass(slots=True)
class Interval:
    """One stretch of the timeline."""

    answered: int = 0
    failed: int = 0
    tokens: int = 0
    first_token_total: float = 0.0  # seconds, summed over `first_tokens` requests
    first_tokens: int = 0
    slowest: float = 0.0  # the longest request that ended here, in seconds

    def absorb(self, other: Interval) -> None:
        """Make one of two."""
        self.answered += other.answered
        self.failed += other.failed
        self.tokens += other.tokens
        self.first_token_total += other.first_token_total
        self.first_tokens += other.first_tokens
        self.slowest = max(self.slowest, other.slowest)


class Timeline:
    """Intervals of equal width since the start; the width doubles whenever there would be too many."""

    def __init__(self, width_seconds: float = 0.25) -> None:
        self.width_seconds = width_seconds
        self.intervals: list[Interval] = []

    def at(self, seconds: float) -> Interval:
        """Return the interval in which a moment lies, `seconds` after the start."""
        while (index := int(seconds / self.width_seconds)) >= MAX_INTERVALS:
            self._halve()
        while len(self.intervals) <= index:
            self.intervals.append(Interval())
        return self.intervals[index]

    def _halve(self) -> None:
        for left, right in zip(self.intervals[::2], self.intervals[1::2], strict=False):
            left.absorb(right)
        self.intervals = self.intervals[::2]
        self.width_seconds *= 2


@dataclass(slots=True)
class FailureSample:
    """One kind of failure."""

    count: int = 0
    example: str = ""  # the text of the first one


@dataclass(slots=True)
class Recorder:
    """Everything a load window saw. Times are seconds; `begun` and `ended` are on the clock of the load."""

    begun: float = 0.0
    ended: float = 0.0
    sent: int = 0
    answered: int = 0
    unfinished: int = 0  # in flight when the run was interrupted
    output_tokens: int = 0
    output_estimated: int = 0  # answers without usage: their tokens are counted as events
    input_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, as usage reported
    input_counted: int = 0  # answers whose usage had the prompt's length
    text_events: int = 0
    received_bytes: int = 0
    connections: int = 0
    first_token: SampleHistogram = field(default_factory=SampleHistogram)  # request written -> first text, streams only
    gap: SampleHistogram = field(default_factory=SampleHistogram)  # between two reads of one stream that brought text
    # Of one stream: (last text - first text) / (tokens - 1).
    per_token: SampleHistogram = field(default_factory=SampleHistogram)
    whole: SampleHistogram = field(default_factory=SampleHistogram)  # request written -> answer complete
    # Open loop: how long after its time a request was sent.
    late: SampleHistogram = field(default_factory=SampleHistogram)
    failures: dict[str, FailureSample] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def failed(self) -> int:
        """How many requests failed."""
        return sum(failure.count for failure in self.failures.values())

    @property
    def seconds(self) -> float:
        """The window, from the first request to the last answer."""
        return max(self.ended - self.begun, 1e-9)

    def fail(self, kind: str, example: str, now: float) -> None:
        """Count a request that was not answered. The number of kinds is bounded: a new kind beyond the limit counts
        as "other failures".
        """
        if kind not in self.failures and len(self.failures) >= MAX_FAILURE_KINDS:
            kind = OTHER_FAILURES
        failure = self.failures.setdefault(kind, FailureSample(example=example))
        failure.count += 1
        self.timeline.at(now - self.begun).failed += 1
