"""The costs of the policy `time` among very many ranks: the same sums as in `kv_time`, all ranks at once, with NumPy.

NumPy is no requirement of this package. Where it is not installed, the loop of `kv_time` computes the same, in longer time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from numpy import float64, intp
    from numpy.typing import NDArray

ARRAYS_FROM: Final = 128
"""Ranks from which on this is quicker than the loop."""

# Rows of the table.
_PASS_TOKENS: Final = 0
_TIMED: Final = slice(6, 12)  # what a wait that is known is made of
_BUDGET: Final = 15
_WAITING: Final = 16
_ROOM: Final = 22
_FREE: Final = 23


class TimeConstants(NamedTuple):
    """Constants of the policy."""

    most_steps: float
    least_idle_seconds: float
    most_idle_ratio: float
    tail: float  # of a cubed ms of the request's own time


class TimePrompt(NamedTuple):
    """What the costs of one decision have in common."""

    tokens: int
    needed: float  # blocks, with those of the answer
    output: float
    added: float  # tokens of context that the request adds, in the mean of its life
    credit: float  # of a held block
    is_computed: bool  # False: the prompt is computed elsewhere
    has_space: bool  # every rank has space for the blocks: nothing is evicted, and `mean_idle` not known
    mean_idle: float  # seconds since the oldest block of a rank was used, in the mean of the ranks
    decode_weight: float
    block_weight: float  # of a ms that it takes to compute an evicted block again


def numpy() -> ModuleType | None:
    """Return NumPy; None where it is not installed."""
    try:
        import numpy as found
    except ImportError:
        return None
    return found


class TimeArrays:
    """The figures of all ranks, a row for each figure. Kept between decisions, and changed where a rank has changed."""

    __slots__ = ("_is_exact", "_left", "_limits", "_rows", "_scratch", "_space", "_table", "np", "stale")

    def __init__(self, np: ModuleType, rows: Sequence[Sequence[float]], limits: TimeConstants) -> None:
        """`rows`: of each rank, in the order of `costs`."""
        self.np, self._limits = np, limits
        self.stale: set[int] = set()  # positions of ranks that have changed
        self._take(np.array(rows, dtype=np.float64).T.copy())

    def _take(self, table: NDArray[float64]) -> None:
        self._table = table
        self._rows: tuple[NDArray[float64], ...] = (*table,)
        # Four results at a time, in the same places for each decision: new arrays would take longer than most sums.
        self._scratch: tuple[NDArray[float64], ...] = (*self.np.empty((4, table.shape[1])),)
        # No rank has less space than this, and none has less of its budget left; and whether one has just so much.
        self._space = self._left = -inf
        self._is_exact = False

    def reorder(self, gone: Sequence[int], new: Sequence[int]) -> None:
        """Take other ranks, see `reordered`. The new ones are stale."""
        self._take(reordered(self.np, self._table, gone, new))

    def change(self, at: int, row: Sequence[float]) -> None:
        """Take the figures of a rank that has changed."""
        self._table[:, at] = row
        self._space = min(self._space, row[_ROOM], row[_FREE])
        self._left = min(self._left, row[_BUDGET] - row[_WAITING] - row[_PASS_TOKENS])
        self._is_exact = False

    def have_space(self, blocks: float) -> bool:
        """Return whether every rank has space for so many blocks, as nearly always in a fleet whose caches are not full."""
        if blocks > self._space and not self._is_exact:
            self._measure()
        return blocks <= self._space

    def _are_short(self, tokens: float) -> bool:
        """Return whether so many more tokens fit into the next pass of every rank."""
        if tokens > self._left and not self._is_exact:
            self._measure()
        return tokens <= self._left

    def _measure(self) -> None:
        rows = self._rows
        self._space = float(min(rows[_ROOM].min(), rows[_FREE].min()))
        self._left = float((rows[_BUDGET] - rows[_WAITING] - rows[_PASS_TOKENS]).min())
        self._is_exact = True

    def costs(self, now: float, one: TimePrompt, held: Mapping[int, tuple[float, float, float]]) -> NDArray[float64]:
        """Return the cost of each rank, as an array that is good until the next call; `held`, by position: tokens to compute,
        blocks missing, blocks over."""
        (
            pass_tokens, waiting_with_pass_ms, block_ms, oldest, room_ms, known_until, idle_own, _, _, begins_at, _, _,
            base, linear, square, budget, waiting, waiting_ms, step, others, decode, growth, room, free,
        ) = self._rows  # fmt: skip
        np, (computed, own, cost, work) = self.np, self._scratch
        fresh = float(max(1, one.tokens))
        np.add(waiting, fresh, computed)
        for at, (uncached, _, _) in held.items():
            computed[at] = waiting[at] + uncached
        np.copyto(own, idle_own)
        timed = (known_until > now).nonzero()[0]
        if len(timed):  # of few ranks more is known than how long a step takes
            own[timed] = self._known_own(now, timed)
        later = timed[begins_at[timed] > now]
        if len(later):
            computed[later] += pass_tokens[later]
        np.multiply(growth, one.added, cost)
        cost += decode
        cost *= one.output * one.decode_weight
        if one.is_computed:
            np.multiply(square, computed, work)
            work += linear
            work *= computed
            work += base
            if not self._are_short(fresh) and (is_long := computed > budget).any():
                whole, rest = np.divmod(computed, budget)
                passes = whole * (base + (linear + square * budget) * budget)
                passes += np.where(rest != 0.0, base + (linear + square * rest) * rest, 0.0)
                work, step = np.where(is_long, passes, work), np.where(is_long, step * (whole + 1), step)
            added = np.subtract(work, waiting_ms, computed)  # which is not read any more
            if len(later):
                added[later] = work[later] - waiting_with_pass_ms[later]
            added *= others
            cost += added
            work += step
            own += work
        tail = np.multiply(own, self._limits.tail, work)
        tail *= own
        tail *= own
        own += tail
        cost += own
        if one.has_space:
            return cost
        with np.errstate(invalid="ignore"):  # what is infinite is left out
            lost, over = one.needed - free, one.needed - room
            for at, (_, lacking, beyond) in held.items():
                lost[at], over[at] = lacking - free[at], beyond - room[at]
            if (lost > 0.0).any():
                price = lost * block_ms * one.block_weight
                if one.mean_idle > 0.0:
                    ratio = one.mean_idle / np.maximum(self._limits.least_idle_seconds, now - oldest)
                    price *= np.where(oldest != 0.0, np.minimum(self._limits.most_idle_ratio, ratio * ratio), 1.0)
                cost = np.where(lost > 0.0, cost + price, cost)
            is_over = over > 0.0
            return np.where(is_over, cost + over * room_ms * one.output, cost) if is_over.any() else cost

    def _known_own(self, now: float, timed: NDArray[intp]) -> NDArray[float64]:
        """Return the ms until the next pass can take the prompt, at ranks of which more is known than how long a step takes."""
        np, limits = self.np, self._limits
        idle, turn, seat, begins_at, ends_at, boundary_at = self._table[_TIMED].take(timed, axis=1)
        since = (now - boundary_at) * 1000.0
        own = np.where(since < limits.most_steps * turn, turn - since % turn + seat, idle)
        until = np.where(begins_at > now, begins_at, ends_at)
        found: NDArray[float64] = np.where(ends_at != 0.0, np.maximum((until - now) * 1000.0, 0.0) + seat, own)
        return found


def reordered(np: ModuleType, table: NDArray[float64], gone: Sequence[int], new: Sequence[int]) -> NDArray[float64]:
    """Return a table of ranks without the columns at the positions `gone`, and with columns of zeros at the positions `new`."""
    if gone:
        starts = [0, *(at + 1 for at in gone)]
        table = np.concatenate([table[:, at:to] for at, to in zip(starts, [*gone, None], strict=True)], axis=1)
    if new:
        starts = [at - before for before, at in enumerate(new)]
        parts = [table[:, at:to] for at, to in zip([0, *starts], [*starts, None], strict=True)]
        column = np.zeros((len(table), 1))
        table = np.concatenate([parts[0], *chain.from_iterable((column, part) for part in parts[1:])], axis=1)
    return table


def lowest_of(costs: NDArray[float64], draw: float) -> tuple[int, float, int]:
    """Return where the lowest cost is, the cost, and how many share it. Among those `draw` in [0, 1) decides, evenly."""
    at = int(costs.argmin())
    lowest = costs[at]
    places = (costs == lowest).nonzero()[0]
    tied = len(places)
    if tied > 1:
        at = int(places[min(int(draw * tied), tied - 1)])
    return at, float(lowest), tied
