"""How many streams are open at each worker. Pure.

A booking is released exactly once, however many paths release it, so a count can neither leak nor fall below the truth.
"""

from __future__ import annotations

from msgspec import Struct


class LoadBook:
    """Open streams by worker id. Bounded by the streams in flight."""

    __slots__ = ("by_worker", "changed")

    def __init__(self) -> None:
        self.by_worker: dict[int, int] = {}  # absent: no stream
        self.changed: list[set[int]] = []
        """Sets that get the id of each worker whose count changes; their owners empty them."""

    def book(self, instance_id: int) -> Booking:
        """Count one stream. Book before awaiting, or two requests of one turn of the loop see the same load."""
        self.by_worker[instance_id] = self.by_worker.get(instance_id, 0) + 1
        for changed in self.changed:
            changed.add(instance_id)
        return Booking(self, instance_id)

    def in_flight(self, instance_id: int) -> int:
        """Return how many streams are open at one worker."""
        return self.by_worker.get(instance_id, 0)

    @property
    def total(self) -> int:
        """How many streams are open at all workers together, also at those that have vanished."""
        return sum(self.by_worker.values())

    def _release(self, instance_id: int) -> None:
        for changed in self.changed:
            changed.add(instance_id)
        left = self.by_worker[instance_id] - 1
        if left:
            self.by_worker[instance_id] = left
        else:
            del self.by_worker[instance_id]


class Booking(Struct, eq=False):
    """One stream of a `LoadBook`."""

    _book: LoadBook | None
    _instance_id: int

    def release(self) -> bool:
        """Give the booking back; return whether this call did, as only the first one does."""
        book, self._book = self._book, None
        if book is None:
            return False
        book._release(self._instance_id)
        return True
