"""How many workers there should be, by what their load was in the last minutes. Pure: the caller has the clock.

Loads are counted in workers: a saturation of 0.5 of four workers is a load of 2. So a load stays what it is when workers come
and go, and earlier samples can be compared with later ones.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dynamo.errors import InvalidArgument

LONGEST_GAP_SECONDS: Final = 5.0  # between samples; what was before a longer one is not known
TREND_SECONDS: Final = 60.0
LEAST_TREND_SAMPLES: Final = 10
TRUSTED_ERRORS: Final = 3.0  # a slope counts when it is so many times its own standard error
START_SECONDS: Final = 5.0  # where no start was measured yet
FIRST_COOLDOWN_SECONDS: Final = 5.0
LONGEST_COOLDOWN_SECONDS: Final = 300.0


class LoadSample(NamedTuple):
    """The load at one time."""

    at: float  # seconds
    load: float  # in workers


@dataclass(frozen=True, slots=True)
class ScaleRules:
    """The limits, and how soon to act."""

    min_workers: int = 1
    max_workers: int = 1
    target: float = 0.7
    """How full the workers are meant to be; the rest is for what comes while another one starts."""
    up_after_seconds: float = 5.0
    down_after_seconds: float = 120.0
    survivor_share: float = 0.8
    """A worker goes only if the others stay below this part of the target: else it would be missed again."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_workers <= self.max_workers or self.max_workers < 1:
            raise InvalidArgument(
                f"the workers must be at least 0 and at most {self.max_workers}, got {self.min_workers}..{self.max_workers}"
            )
        if not 0 < self.target <= 1:
            raise InvalidArgument(f"scale target must be above 0 and at most 1, got {self.target:g}")


@dataclass(frozen=True, slots=True)
class ScaleState:
    """What a decision is made from."""

    aimed: int  # workers that serve or are being started: the target of the last decision
    samples: Sequence[LoadSample] = ()  # in order of time
    starting: int = 0  # of `aimed`: those that do not serve yet
    start_seconds: float | None = None  # how long the last start took; None: not known
    changed_at: float = -math.inf  # when `aimed` was last another number
    failures: int = 0  # starts in a row that failed
    failed_at: float = -math.inf


class ScaleReason(enum.StrEnum):
    """Which rule decided."""

    HOLD = "hold"
    BELOW_MINIMUM = "below_minimum"
    ABOVE_MAXIMUM = "above_maximum"
    FIRST_REQUEST = "first_request"  # there is no worker, and a request waits
    FULL = "full"  # for so long that it is no blip
    PILED_UP = "piled_up"  # more work waits than a new worker would have done while it started
    TREND = "trend"  # full by the time that a worker started now would serve
    IDLE = "idle"  # nothing to do: the last worker may go
    SPARE = "spare"  # the others can do it
    COOLDOWN = "cooldown"  # the last start failed
    AT_MAXIMUM = "at_maximum"


class Decision(NamedTuple):
    """How many workers there should be, and why."""

    target: int
    reason: ScaleReason
    text: str  # the reason with its figures


def cooldown_seconds(failures: int) -> float:
    """Return how long no worker is started after so many failed starts in a row."""
    return (
        0.0 if failures <= 0 else min(LONGEST_COOLDOWN_SECONDS, FIRST_COOLDOWN_SECONDS * 2.0 ** min(failures - 1, 16))
    )


def decide(state: ScaleState, rules: ScaleRules, now: float) -> Decision:
    """Return how many workers there should be.

    Up at once by as many as are needed, at most twice as many as there are; down one at a time, after a long spell in which
    the others would have been enough. The result is never outside the limits of `rules`, except that of too many workers one
    goes at a time.
    """
    aimed = state.aimed
    if aimed > rules.max_workers:
        return Decision(aimed - 1, ScaleReason.ABOVE_MAXIMUM, f"{aimed} workers, at most {rules.max_workers}")
    samples = _unbroken(state.samples, now)
    wanted = _more(state, rules, samples)
    if wanted is not None:
        return _allowed(wanted, state, rules, now)
    return _fewer(state, rules, samples, now) or Decision(aimed, ScaleReason.HOLD, _figures(samples, aimed))


def _unbroken(samples: Sequence[LoadSample], now: float) -> Sequence[LoadSample]:
    """Return the newest samples that have no long gap between them, nor after them."""
    begin = end = len(samples)
    while end and samples[end - 1].at > now:  # the clock was set back
        end -= 1
    begin, later = end, now
    while begin and later - samples[begin - 1].at <= LONGEST_GAP_SECONDS:
        begin -= 1
        later = samples[begin].at
    return samples[begin:end]


# -- up ----------------------------------------------------------------------------------------------------------------


def _more(state: ScaleState, rules: ScaleRules, samples: Sequence[LoadSample]) -> Decision | None:
    """Return the decision for more workers, whether they may be had or not; None: there are enough."""
    aimed = state.aimed
    if aimed < rules.min_workers:
        return Decision(rules.min_workers, ScaleReason.BELOW_MINIMUM, f"{aimed} workers, at least {rules.min_workers}")
    if not samples:
        return None
    load = samples[-1].load
    if aimed == 0:
        if load <= 0:
            return None
        return Decision(1, ScaleReason.FIRST_REQUEST, "a request waits, and no worker is there")
    start_seconds = START_SECONDS if state.start_seconds is None else state.start_seconds
    full_since = _full_since(samples, aimed)
    if full_since is not None:
        seconds = samples[-1].at - full_since
        piled = _piled_up(samples, aimed, full_since)
        if piled >= start_seconds:
            reason = f"load {load:.1f} of {aimed} workers; {piled:.1f} worker-seconds of work wait, a start takes "
            return Decision(_size(load, aimed, rules), ScaleReason.PILED_UP, reason + f"{start_seconds:.1f} s")
        if seconds >= rules.up_after_seconds:
            return Decision(
                _size(load, aimed, rules), ScaleReason.FULL, f"load {load:.1f} of {aimed} workers, for {seconds:.0f} s"
            )
    expected = _expected(samples, start_seconds)
    if expected is not None and expected > aimed and load > rules.target * aimed:
        reason = f"load {load:.1f} of {aimed} workers, and {expected:.1f} in {start_seconds:.1f} s, the time of a start"
        return Decision(_size(expected, aimed, rules), ScaleReason.TREND, reason)
    return None


def _size(load: float, aimed: int, rules: ScaleRules) -> int:
    return max(aimed + 1, min(math.ceil(load / rules.target), 2 * aimed))


def _full_since(samples: Sequence[LoadSample], aimed: int) -> float | None:
    """Return since when the load is above what the workers can do, those that start included; None: it is not."""
    since = None
    for sample in reversed(samples):
        if sample.load <= aimed:
            break
        since = sample.at
    return since


def _piled_up(samples: Sequence[LoadSample], aimed: int, since: float) -> float:
    """Return the work that came since then beyond what the workers can do, in worker-seconds."""
    piled, before = 0.0, since
    for sample in samples:
        if sample.at > since:
            piled += (sample.load - aimed) * (sample.at - before)
            before = sample.at
    return piled


def _expected(samples: Sequence[LoadSample], ahead: float) -> float | None:
    """Return the load at a time ahead, by the line through the last minute; None: there is no line to trust, or it falls."""
    newest = samples[-1].at
    recent = [sample for sample in samples if newest - sample.at <= TREND_SECONDS]
    count = len(recent)
    if count < LEAST_TREND_SAMPLES:
        return None
    middle_at = math.fsum(sample.at for sample in recent) / count
    middle = math.fsum(sample.load for sample in recent) / count
    spread = math.fsum((sample.at - middle_at) ** 2 for sample in recent)
    if spread <= 0:
        return None
    slope = math.fsum((sample.at - middle_at) * (sample.load - middle) for sample in recent) / spread
    if slope <= 0:
        return None
    off = math.fsum((sample.load - middle - slope * (sample.at - middle_at)) ** 2 for sample in recent)
    if slope < TRUSTED_ERRORS * math.sqrt(off / (count - 2) / spread):
        return None
    return middle + slope * (newest + ahead - middle_at)


def _allowed(wanted: Decision, state: ScaleState, rules: ScaleRules, now: float) -> Decision:
    left = state.failed_at + cooldown_seconds(state.failures) - now
    if state.failures and 0 < left <= LONGEST_COOLDOWN_SECONDS:  # more: the clock was set back
        reason = f"{wanted.text}; the last {state.failures} start(s) failed, the next one may be in {left:.0f} s"
        return Decision(state.aimed, ScaleReason.COOLDOWN, reason)
    if state.aimed >= rules.max_workers:
        return Decision(state.aimed, ScaleReason.AT_MAXIMUM, f"{wanted.text}; {rules.max_workers} are the most")
    return wanted._replace(target=min(wanted.target, rules.max_workers))


# -- down --------------------------------------------------------------------------------------------------------------


def _fewer(state: ScaleState, rules: ScaleRules, samples: Sequence[LoadSample], now: float) -> Decision | None:
    """Return the decision for one worker less; None: all are needed, or it is too early to decide."""
    aimed, seconds = state.aimed, rules.down_after_seconds
    if aimed <= rules.min_workers or state.starting or not samples:
        return None
    if state.changed_at <= now < state.changed_at + seconds or now - samples[0].at < seconds:
        return None
    most = max(sample.load for sample in samples if now - sample.at <= seconds)
    if aimed == 1:
        if most > 0:
            return None
        return Decision(0, ScaleReason.IDLE, f"nothing to do for {seconds:.0f} s")
    survivors = aimed - 1
    if most >= rules.survivor_share * rules.target * survivors:
        return None
    expected = _expected(samples, START_SECONDS if state.start_seconds is None else state.start_seconds)
    if expected is not None and expected >= rules.target * survivors:
        return None
    return Decision(survivors, ScaleReason.SPARE, f"load at most {most:.1f} of {aimed} workers for {seconds:.0f} s")


def _figures(samples: Sequence[LoadSample], aimed: int) -> str:
    return f"load {samples[-1].load:.1f} of {aimed} workers" if samples else "no load is known yet"
