"""The costs of the policy `time` among very many ranks: the same sums as in `kv_time`, all ranks at once, with NumPy.

NumPy is no requirement of this package. Where it is not installed, the loop of `kv_time` computes the same, in longer time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

ARRAYS_FROM: Final = 128
"""Ranks from which on this is quicker than the loop."""


_ROOM_AND_FREE: Final = slice(14, 16)  # rows of the table


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

    __slots__ = ("_limits", "_table", "np", "stale")

    def __init__(self, np: ModuleType, rows: Sequence[Sequence[float]], limits: TimeConstants) -> None:
        """`rows`: of each rank, in the order of `costs`."""
        self.np, self._limits = np, limits
        self._table = np.array(rows, dtype=np.float64).T.copy()
        self.stale: set[int] = set()  # positions of ranks that have changed

    def reorder(self, gone: Sequence[int], new: Sequence[int]) -> None:
        """Take other ranks, see `reordered`. The new ones are stale."""
        self._table = reordered(self.np, self._table, gone, new)

    def change(self, at: int, row: Sequence[float]) -> None:
        """Take the figures of a rank that has changed."""
        self._table[:, at] = row

    def costs(self, now: float, one: TimePrompt, held: Mapping[int, tuple[float, float, float]]) -> NDArray[float64]:
        """Return the cost of each rank, as an array; `held`, by position: tokens to compute, blocks missing, blocks over."""
        with self.np.errstate(all="ignore"):  # what is infinite or not a number is left out
            return self._costs(now, one, held)

    def _costs(self, now: float, one: TimePrompt, held: Mapping[int, tuple[float, float, float]]) -> NDArray[float64]:
        (
            begins_at, ends_at, boundary_at, idle_wait, base, linear, square, budget, waiting, waiting_ms, step, others, decode, growth,
            room, free, seat, pass_tokens, waiting_with_pass_ms, block_ms, oldest, room_ms, known_until,
        ) = self._table  # fmt: skip
        np, limits, where = self.np, self._limits, self.np.where
        computed = waiting + float(max(1, one.tokens))
        for at, (uncached, _, _) in held.items():
            computed[at] = waiting[at] + uncached
        own: NDArray[float64] = idle_wait.copy()  # for now
        timed = (known_until > now).nonzero()[0]
        if len(timed):  # of few ranks more is known than how long a step takes
            begin, end, boundary, takes = begins_at[timed], ends_at[timed], boundary_at[timed], step[timed]
            since = (now - boundary) * 1000.0
            wait = where(since < limits.most_steps * takes, takes - since % takes, own[timed])
            wait = where(end != 0.0, np.maximum((end - now) * 1000.0, 0.0), wait)
            later = timed[begin > now]
            own[timed] = wait
            if len(later):
                own[later] = (begins_at[later] - now) * 1000.0
                computed[later] += pass_tokens[later]
                waiting_ms = waiting_ms.copy()
                waiting_ms[later] = waiting_with_pass_ms[later]
        own += seat
        cost: NDArray[float64] = one.output * one.decode_weight * (decode + growth * one.added)
        if one.is_computed:
            work = base + (linear + square * computed) * computed
            is_long = computed > budget
            if is_long.any():
                whole, rest = np.divmod(computed, budget)
                passes = whole * (base + (linear + square * budget) * budget)
                passes += where(rest != 0.0, base + (linear + square * rest) * rest, 0.0)
                work, step = where(is_long, passes, work), where(is_long, step * (whole + 1), step)
            own += work + step
            cost += others * (work - waiting_ms)
        cost += own + limits.tail * own * own * own
        if one.needed <= self._table[_ROOM_AND_FREE].min():  # as nearly always: there is space everywhere
            return cost
        missing, over = np.full(len(cost), one.needed), np.full(len(cost), one.needed)
        for at, (_, lacking, beyond) in held.items():
            missing[at], over[at] = lacking, beyond
        lost = missing - free
        if (lost > 0.0).any():
            price = lost * block_ms * one.block_weight
            if one.mean_idle > 0.0:
                ratio = one.mean_idle / np.maximum(limits.least_idle_seconds, now - oldest)
                price = price * where(oldest != 0.0, np.minimum(limits.most_idle_ratio, ratio * ratio), 1.0)
            cost = where(lost > 0.0, cost + price, cost)
        is_over = (beyond := over - room) > 0.0
        return where(is_over, cost + beyond * room_ms * one.output, cost) if is_over.any() else cost


def reordered(np: ModuleType, table: NDArray[float64], gone: Sequence[int], new: Sequence[int]) -> NDArray[float64]:
    """Return a table of ranks without the columns at the positions `gone`, and with columns of zeros at the positions `new`."""
    left = np.delete(table, gone, axis=1) if gone else table
    found: NDArray[float64] = (
        np.insert(left, [at - before for before, at in enumerate(new)], 0.0, axis=1) if new else left
    )
    return found


def lowest_of(costs: NDArray[float64], draw: float) -> tuple[int, float, int]:
    """Return where the lowest cost is, the cost, and how many share it. Among those `draw` in [0, 1) decides, evenly."""
    at = int(costs.argmin())
    lowest = costs[at]
    places = (costs == lowest).nonzero()[0]
    tied = len(places)
    if tied > 1:
        at = int(places[min(int(draw * tied), tied - 1)])
    return at, float(lowest), tied
