"""Positions of a list that are left out. What it costs follows from how many those are, and hardly from the length of the list. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, TypeVar, overload

_Item = TypeVar("_Item")


class Gaps:
    """The positions that are left out of a list of a known length."""

    __slots__ = ("_kept", "_shifted", "at")

    def __init__(self, at: Sequence[int], length: int) -> None:
        """`at`: the positions, in order."""
        self.at = at
        # Where few are left, those are the shorter list.
        self._kept = [*sorted({*range(length)}.difference(at))] if 2 * len(at) > length else None
        self._shifted = [gap - before for before, gap in enumerate(at)]

    @overload
    def left(self, items: bytearray) -> bytearray: ...
    @overload
    def left(self, items: list[_Item]) -> list[_Item]: ...
    def left(self, items: list[_Item] | bytearray) -> list[_Item] | bytearray:
        """Return the items that are left: a new list, or bytes."""
        if self._kept is not None:
            kept: list[Any] = [items[at] for at in self._kept]
            return bytearray(kept) if isinstance(items, bytearray) else kept
        left = items[:]
        for at in reversed(self.at):
            del left[at]
        return left

    def place(self, at: int) -> int:
        """Return where the item of a position is among those that are left; -1: it is not."""
        before = bisect_left(self.at, at)
        return -1 if before < len(self.at) and self.at[before] == at else at - before

    def origin(self, place: int) -> int:
        """Return the position of an item that is left."""
        return place + bisect_right(self._shifted, place)


NO_GAPS = Gaps((), 0)
