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
            room, free, seat, pass_tokens, waiting_with_pass_ms, block_ms, oldest, room_ms,
        ) = self._table  # fmt: skip
        np, limits, where = self.np, self._limits, self.np.where
        computed = waiting + float(max(1, one.tokens))
        missing = over = one.needed
        if held:
            missing, over = np.full(len(waiting), one.needed), np.full(len(waiting), one.needed)
            for at, (uncached, lost, beyond) in held.items():
                computed[at], missing[at], over[at] = waiting[at] + uncached, lost, beyond
        begins_later = begins_at > now
        since = (now - boundary_at) * 1000.0
        wait = where(
            (boundary_at != 0.0) & (step != 0.0) & (since < limits.most_steps * step), step - since % step, idle_wait
        )
        wait = where(ends_at != 0.0, np.maximum((ends_at - now) * 1000.0, 0.0), wait)
        if begins_later.any():
            wait = where(begins_later, (begins_at - now) * 1000.0, wait)
            computed = where(begins_later, computed + pass_tokens, computed)
            waiting_ms = where(begins_later, waiting_with_pass_ms, waiting_ms)
        own, cost = wait + seat, one.output * one.decode_weight * (decode + growth * one.added)
        if one.is_computed:
            work = base + (linear + square * computed) * computed
            is_long = computed > budget
            if is_long.any():
                whole, rest = np.divmod(computed, budget)
                passes = whole * (base + (linear + square * budget) * budget)
                passes = passes + where(rest != 0.0, base + (linear + square * rest) * rest, 0.0)
                work, step = where(is_long, passes, work), where(is_long, step * (whole + 1), step)
            own, cost = own + (work + step), cost + others * (work - waiting_ms)
        cost = cost + (own + limits.tail * own * own * own)
        lost = missing - free
        if (lost > 0.0).any():
            price = lost * block_ms * one.block_weight
            if one.mean_idle > 0.0:
                ratio = one.mean_idle / np.maximum(limits.least_idle_seconds, now - oldest)
                price = price * where(oldest != 0.0, np.minimum(limits.most_idle_ratio, ratio * ratio), 1.0)
            cost = where(lost > 0.0, cost + price, cost)
        is_over = (beyond := over - room) > 0.0
        found: NDArray[float64] = where(is_over, cost + beyond * room_ms * one.output, cost) if is_over.any() else cost
        return found


def reordered(np: ModuleType, table: NDArray[float64], gone: Sequence[int], new: Sequence[int]) -> NDArray[float64]:
    """Return a table of ranks without the columns at the positions `gone`, and with columns of zeros at the positions `new`."""
    left = np.delete(table, gone, axis=1) if gone else table
    found: NDArray[float64] = (
        np.insert(left, [at - before for before, at in enumerate(new)], 0.0, axis=1) if new else left
    )
    return found


def lowest_of(np: ModuleType, costs: NDArray[float64], draw: float) -> tuple[int, float, int]:
    """Return where the lowest cost is, the cost, and how many share it. Among those `draw` in [0, 1) decides, evenly."""
    at = int(costs.argmin())
    lowest = costs[at]
    is_lowest = costs == lowest
    tied = int(np.count_nonzero(is_lowest))
    if tied > 1:
        at = int(np.flatnonzero(is_lowest)[min(int(draw * tied), tied - 1)])
    return at, float(lowest), tied
