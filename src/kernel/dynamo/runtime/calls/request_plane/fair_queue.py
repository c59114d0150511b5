"""Requests that wait for a place, one line per connection: the lines are served in turn, and a full queue shrinks the longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["FairQueue"]


Item = TypeVar("Item", bound=Hashable)


class FairQueue(Generic[Item]):
    """First come, first served within a line; round-robin over the lines. Adding and taking cost the same at any length."""

    __slots__ = ("_count", "_lines")

    def __init__(self) -> None:
        # Ordered dictionaries: the front of a plain one is found by stepping over everything that was taken before.
        self._lines: OrderedDict[Hashable, OrderedDict[Item, None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Item]:
        """Iterate over all items, line by line."""
        for line in list(self._lines.values()):
            yield from list(line)

    def first_of_each_line(self) -> list[Item]:
        """Return the longest-waiting item of every line."""
        return [next(iter(line)) for line in self._lines.values()]

    def add(self, owner: Hashable, item: Item) -> None:
        """Put an item at the end of its owner's line."""
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = OrderedDict()
        line[item] = None
        self._count += 1

    def pop(self) -> Item:
        """Take the first item of the line whose turn it is. Raises KeyError when nothing waits."""
        owner, line = self._lines.popitem(last=False)
        item, _ = line.popitem(last=False)
        self._count -= 1
        if line:
            self._lines[owner] = line  # behind the other lines
        return item

    def remove(self, owner: Hashable, item: Item) -> bool:
        """Take one item out of its line; whether it was there."""
        line = self._lines.get(owner)
        if line is None or item not in line:
            return False
        del line[item]
        self._count -= 1
        if not line:
            del self._lines[owner]
        return True

    def displace_for(self, owner: Hashable) -> Item | None:
        """Take out the newest item of the longest line, to make room for one of `owner`; None where the owner has its share.

        A line shorter than the average gains a place as long as some line is longer than it. So one connection can use the
        whole queue while it is alone, and cannot keep others out.
        """
        own = len(self._lines.get(owner, ()))
        sharing = len(self._lines) + (own == 0)
        if (own + 1) * sharing > self._count:
            return None  # also keeps a flood from searching for the longest line with every request
        longest = max(self._lines, key=lambda each: len(self._lines[each]))
        item = next(reversed(self._lines[longest]))
        self.remove(longest, item)
        return item
