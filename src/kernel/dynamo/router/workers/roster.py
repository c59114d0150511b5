"""Workers of a group as a reader took them over last: what has changed since costs a step, the rest of the group none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Roster(Generic[T]):
    """The members as they were taken over last. A member that has changed is another object."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, T] = {}  # by identity; what is kept here keeps its identity

    def __len__(self) -> int:
        return len(self._known)

    def update(self, members: Iterable[T]) -> tuple[list[T], list[T]]:
        """Take over the members there are now; return those that have gone, and those that are new."""
        former = self._known
        now = self._known = {id(each): each for each in members}
        gone = [former[key] for key in former.keys() - now.keys()]
        new = now.keys() - former.keys()
        return gone, [each for key, each in now.items() if key in new] if new else []
