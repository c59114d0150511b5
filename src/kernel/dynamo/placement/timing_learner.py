"""Learns how fast each rank is, from first tokens and ends of answers. Pure.

A curve is fitted by least squares of relative errors with three unknowns. Old samples fade. Beside a rank's own samples
stand a few of all ranks together, which decide while the rank has shown little, and the prior, which decides while no
rank has shown anything. A sample that is far off counts for less, so one slow request moves little. And what a rank has shown is
believed only as far as chance would not have shown it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Final, NamedTuple

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.prefill_pass import FinishedPasses
from dynamo.placement.rank_load import Booked, LoadOfRank
from dynamo.placement.timing import DEFAULT_CAPACITY_TOKENS, DEFAULT_TIMING, RankTiming, TimeCurve

FADE: Final = 0.98  # weight of a sample after each later one: about the last fifty count
POOL_SAMPLES: Final = 6.0  # that all ranks together count for at most
PRIOR_SAMPLES: Final = 0.1  # that the prior counts for
USUAL_ERROR: Final = 0.3  # relative; less is never far off
SPREAD_FADE: Final = 0.1  # how much a new error counts in what is usual for the rank
FITTED_EACH: Final = 8.0  # samples: up to so many each one is fitted at once
SAMPLES_PER_FIT: Final = 8  # after that; a fit takes some 20 us, and one sample of fifty moves little
UNSURE: Final = 5.0  # twice the error of a mean over a quarter of the samples, by their mean distance from it
SAME_SPEED: Final = (
    0.01  # a pool that moves less is taken to stand still: all its ranks would have to be computed again
)
LEVEL_FADE: Final = 0.2  # how much a new sample counts in how slow a rank is beside all ranks
LEVEL_STEP: Final = 0.5  # of a logarithm: no sample shows more than that beyond what is known
LEVEL_MOVED: Final = 0.4  # of a logarithm: samples from before a rank's speed changed by so much show little
FORGOTTEN: Final = 0.1  # what those count for
LEAST_MS: Final = 0.05  # a shorter sample shows nothing about an engine
FEWEST_STEPS: Final = 8  # of an answer whose steps are measured
OUTPUT_FADE: Final = 0.02  # how much a new answer's length counts, once there are many

KILO: Final = 1000.0  # tokens: the unit of a prefill's x while it is fitted

Row = tuple[float, float, float]


class _UsualErrors:
    """How far the samples of one curve usually are from its fit, relative to what the fit expects."""

    __slots__ = ("_lean", "_scatter", "_spread")

    def __init__(self) -> None:
        self._spread = 0.0  # the usual error
        self._lean = 0.0  # the same with its sign: where the fit is off
        self._scatter = 0.0  # how far the errors usually are from that

    def weigh(self, lean: float) -> float:
        """Take the error of a sample, with its sign; return what the sample counts for: less than 1 where it is far off."""
        # Comparisons in place of min, max and abs: this runs twice for every first token.
        error = lean if lean >= 0.0 else -lean
        limit = 3.0 * self._spread
        if limit <= USUAL_ERROR:
            limit = USUAL_ERROR
        if error > 3.0 * limit:
            lean = 3.0 * limit if lean > 0.0 else -3.0 * limit
        self._spread += SPREAD_FADE * ((lean if lean >= 0.0 else -lean) - self._spread)
        off = lean - self._lean
        self._lean += SPREAD_FADE * off
        self._scatter += SPREAD_FADE * ((off if off >= 0.0 else -off) - self._scatter)
        return limit / error if error > limit else 1.0

    def doubt(self, count: float) -> float:
        """Return how well a mean of `count` samples is known; as those of a crowd err alike, four count as one."""
        return self._scatter / (1.0 - math.pow(1.0 - SPREAD_FADE, count)) * min(1.0, UNSURE / math.sqrt(count))


class CurveFit:
    """The weighted samples of one curve, as sums. `pool` is added to a rank's own samples, with a limited weight."""

    __slots__ = ("_errors", "_level", "_pool", "_prior", "_sums", "_unfitted", "basis", "count", "row", "shared")

    def __init__(self, prior: Row, pool: CurveFit | None = None) -> None:
        self._prior, self._pool = prior, pool
        self._errors = _UsualErrors()
        self._level = self.basis = 0.0  # logarithm of how slow the rank is beside all ranks; the same, of its samples
        self._sums = [0.0] * 9  # of products of the parts with each other (6), and with the measured time (3)
        self._unfitted = 0  # samples since the last fit
        self.count = 0.0  # samples, each with its weight
        self.row = prior  # the fitted parts
        self.shared = prior  # of a pool: what its ranks are compared with

    def add(self, parts: Row, measured: float) -> None:
        """Take a sample: the amounts of the three parts, and the time they took together."""
        a, b, c = parts
        if self._pool is not None:
            self._pool.add(parts, measured)
            base, linear, square = self._pool.row
            apart = math.log(measured / max(LEAST_MS, a * base + b * linear + c * square)) - self._level
            share = max(LEVEL_FADE, 1.0 / (self.count + 2.0))
            self._level += share * max(-LEVEL_STEP, min(LEVEL_STEP, apart))
            if abs(self._level - self.basis) > LEVEL_MOVED:
                self._rebase()
        base, linear, square = self.row
        expected = a * base + b * linear + c * square
        if expected <= LEAST_MS:
            expected = LEAST_MS
        weight = self._errors.weigh((measured - expected) / expected) / (expected * measured)
        sums = self._sums
        fresh = (a * a, a * b, a * c, b * b, b * c, c * c, a * measured, b * measured, c * measured)
        self._sums = [FADE * old + weight * new for old, new in zip(sums, fresh, strict=True)]
        self.count = FADE * self.count + 1.0
        self._unfitted += 1
        if self.count < FITTED_EACH or self._unfitted >= SAMPLES_PER_FIT:
            self._unfitted = 0
            self.row = self._fitted()

    def follow(self, other: CurveFit) -> None:
        """Take the rank for as slow as the other curve of it shows, where that has moved further: its samples come sooner."""
        if abs(other._level - self._level) > LEVEL_MOVED and abs(other._level) > abs(self._level):
            self._level = other._level
            self._rebase()
            self.row = self._fitted()

    def _rebase(self) -> None:
        self._sums, self.basis = [FORGOTTEN * each for each in self._sums], self._level

    def share(self) -> bool:
        """Let the ranks of this pool compare themselves with its newest fit. False where that is nearly the last one."""
        if self.row is self.shared:
            return False
        new, old = self._at_samples(self.row), self._at_samples(self.shared)
        if old > 0.0 and abs(new / old - 1.0) <= SAME_SPEED:
            return False
        self.shared = self.row
        return True

    def believed(self) -> Row:
        """Return the parts that the rank is taken to have: its own as far as they differ from those of all ranks by more than
        its samples leave in doubt.

        Else chance would pass for the speed of the rank that it happened to, and all requests go to the others until it happens to
        those.
        """
        pool = self._pool
        if pool is None or not self.count:
            return self.row if pool is None else pool.shared
        own, theirs = self._at_samples(self.row), self._at_samples(pool.shared)
        if theirs <= 0.0:
            return self.row
        apart = abs(own / theirs - 1.0)
        doubt = self._errors.doubt(self.count)
        if apart <= doubt:
            return pool.shared
        share = 1.0 - (doubt / apart) ** 2
        x, y, z = (common + share * (mine - common) for mine, common in zip(self.row, pool.shared, strict=True))
        return x, y, z

    def _at_samples(self, row: Row) -> float:
        """Return what these parts make of the samples together."""
        a, b, c = self._sums[:3]
        return a * row[0] + b * row[1] + c * row[2]

    def _fitted(self) -> Row:
        # A rank's own samples are in the pool, too, so they count twice against the prior. The pool itself counts twice as
        # well: else the only rank that has shown anything would be believed further from the prior than all others.
        pool = self._pool or self
        share = min(1.0, POOL_SAMPLES / pool.count) if pool.count else 0.0
        # The samples of all ranks as this rank would have shown them, else those of a slow one would count for less.
        others = _slower(pool._sums, self._level)
        sums = [own + share * other for own, other in zip(self._sums, others, strict=True)]
        free = [at for at in range(3) if self._prior[at]]
        while free:
            found = self._solved(sums, free)
            wrong = [at for at in free if found[at] * self._prior[at] < 0.0]  # a part keeps the sign of its prior
            if not wrong:
                return found[0], found[1], found[2]
            free = [at for at in free if at not in wrong]
        return self._prior

    def _solved(self, sums: Sequence[float], free: Sequence[int]) -> list[float]:
        """Return the least-squares parts, where all but the `free` ones are 0."""
        table = []
        for i in free:
            row = [sums[_PLACE[i][j]] for j in free]
            strength = PRIOR_SAMPLES / max(abs(self._prior[i]), abs(self.row[i])) ** 2
            row[free.index(i)] += strength
            table.append([*row, sums[6 + i] + strength * self._prior[i]])
        _eliminate(table)
        found = [0.0, 0.0, 0.0]
        for at, row in zip(free, table, strict=True):
            found[at] = row[-1]
        return found


def _slower(sums: Sequence[float], level: float) -> list[float]:
    """Return the sums of samples whose times are all longer by a factor, of which `level` is the logarithm."""
    slow = math.exp(level)
    return [each / (slow * slow) for each in sums[:6]] + [each / slow for each in sums[6:]]


_PLACE: Final = ((0, 1, 2), (1, 3, 4), (2, 4, 5))


def _eliminate(table: list[list[float]]) -> None:
    """Solve a small symmetric positive system in place: its last column becomes the solution."""
    for at, pivot in enumerate(table):
        scale = pivot[at]
        pivot[:] = [value / scale for value in pivot]
        for other in table:
            if other is not pivot and other[at]:
                factor = other[at]
                other[:] = [value - factor * lead for value, lead in zip(other, pivot, strict=True)]


def _prefill_curve(row: Row) -> TimeCurve:
    base, linear, square = row
    return TimeCurve(base, linear / KILO, square / (KILO * KILO))


class _RankFits:
    __slots__ = ("basis", "capacity", "decode", "prefill", "timing", "unsettled")

    def __init__(self, prefill: CurveFit, decode: CurveFit, timing: RankTiming) -> None:
        self.prefill, self.decode, self.timing = prefill, decode, timing
        self.basis: tuple[object, ...] = (None,) * 5  # what `timing` was made from
        self.capacity = DEFAULT_CAPACITY_TOKENS
        self.unsettled: _Unsettled | None = None  # the last sample of prefills


class _Unsettled(NamedTuple):
    """What the passes took that ended last, until no further first token can belong to them."""

    passes: FinishedPasses
    measured: float
    settled_at: float


class TimingLearner:
    """The speed of every rank. Bounded by the ranks: `change` forgets those that are gone.

    What one rank shows changes what is believed of the others; `moved` names them, for callers that keep what `timing` returned, and is
    emptied by its reader.
    """

    __slots__ = ("_answers", "_decode", "_output_tokens", "_prefill", "_ranks", "moved")

    def __init__(self) -> None:
        self.moved: set[WorkerRank] = set()
        prefill, decode = DEFAULT_TIMING.prefill, DEFAULT_TIMING.decode
        self._prefill = CurveFit((prefill.base, prefill.linear * KILO, prefill.square * KILO * KILO))
        self._decode = CurveFit((decode.base, decode.linear, DEFAULT_TIMING.stream_ms))
        self._ranks: dict[WorkerRank, _RankFits] = {}
        self._output_tokens = DEFAULT_TIMING.output_tokens
        self._answers = 0

    def change(self, gone: Iterable[WorkerRank], capacities: Mapping[WorkerRank, int | None]) -> None:
        """Forget ranks that are gone, and take the tokens that the caches of others hold, which may be new."""
        for rank in gone:
            self._ranks.pop(rank, None)
            self.moved.discard(rank)
        for rank, capacity in capacities.items():
            self._of(rank).capacity = capacity or DEFAULT_CAPACITY_TOKENS

    def timing(self, rank: WorkerRank) -> RankTiming:
        """Return the speed of a rank as it is believed to be now."""
        fits = self._of(rank)
        basis = (fits.prefill.row, self._prefill.shared, fits.decode.row, self._decode.shared, self._output_tokens)
        if not all(map(is_, basis, fits.basis)):
            fits.basis = basis
            base, linear, stream_ms = fits.decode.believed()
            fits.timing = RankTiming(
                _prefill_curve(fits.prefill.believed()), TimeCurve(base, linear), self._output_tokens, stream_ms
            )
        return fits.timing

    def prefilled(self, rank: WorkerRank, load: LoadOfRank, passes: FinishedPasses, now: float) -> None:
        """Take what a first token has shown at `now`. It counts once no correction of it can come."""
        fits = self._of(rank)
        unsettled = fits.unsettled
        if passes.is_corrected:
            if unsettled is not None:
                fits.unsettled = unsettled._replace(passes=passes)
            return
        if unsettled is not None:
            self._settle(rank, fits, unsettled)
        others = load.clock.streams - 1  # streams that made steps meanwhile
        fill = min(1.0, load.clock.context_tokens / fits.capacity)
        step = fits.timing.step_ms(fill, others) if others > 0 else 0.0
        # An arrival finds the step that runs half done; then every pass does one step beside the prompts.
        measured = passes.seconds * 1000.0 - step * (passes.passes + (0.5 if passes.was_idle else 0.0))
        if measured >= LEAST_MS and passes.tokens > 0:
            fits.unsettled = _Unsettled(passes, measured, now + passes.moment_seconds)

    def _settle(self, rank: WorkerRank, fits: _RankFits, unsettled: _Unsettled) -> None:
        """Learn from the passes that ended last."""
        fits.unsettled = None
        passes = unsettled.passes
        parts = (float(passes.passes), passes.tokens / KILO, passes.squares / (KILO * KILO))
        basis = fits.prefill.basis
        fits.prefill.add(parts, unsettled.measured)
        if fits.prefill.basis != basis:
            fits.decode.follow(fits.prefill)
        if self._prefill.share():
            self.moved |= self._ranks.keys() - {rank}

    def ended(self, booked: Booked, load: LoadOfRank, now: float) -> None:
        """Take what the end of an answer has shown."""
        fits = self._of(booked.rank)
        unsettled = fits.unsettled
        if unsettled is not None and now > unsettled.settled_at:
            self._settle(booked.rank, fits, unsettled)
        tokens, begun = booked.output.tokens, booked.first_token
        if begun is None or tokens < 1:
            return
        self._answers += 1
        share = 1.0 / (1 + self._answers)
        self._output_tokens += (tokens - self._output_tokens) * (share if share > OUTPUT_FADE else OUTPUT_FADE)
        seconds = now - begun.at
        if seconds <= 0.0:
            return
        # What it generated beside prompts is left out, with the time of those passes.
        clock = load.clock
        steps = tokens - 1 - (clock.pass_steps - begun.pass_steps)
        if steps < FEWEST_STEPS:
            return
        step = 1000.0 * (seconds - (clock.pass_seconds - begun.pass_seconds)) / steps
        if step < LEAST_MS:
            return
        fill = min(1.0, (clock.area - begun.area) / seconds / fits.capacity)
        fits.decode.add((1.0, fill, (clock.stream_seconds - begun.stream_seconds) / seconds), step)
        if self._decode.share():
            self.moved |= self._ranks.keys() - {booked.rank}

    def _of(self, rank: WorkerRank) -> _RankFits:
        fits = self._ranks.get(rank)
        if fits is None:
            prefill, decode = DEFAULT_TIMING.prefill, DEFAULT_TIMING.decode
            fits = self._ranks[rank] = _RankFits(
                CurveFit((prefill.base, prefill.linear * KILO, prefill.square * KILO * KILO), self._prefill),
                CurveFit((decode.base, decode.linear, DEFAULT_TIMING.stream_ms), self._decode),
                DEFAULT_TIMING,
            )
        return fits
