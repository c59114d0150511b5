"""A watcher's mailbox, shared by every discovery backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dynamo.runtime.base.tasks import OneWaiter
from dynamo.runtime.discovery.base import Change, Put


class ChangeFeed:
    """The snapshot, then whatever changed since the last read: the newest change of each key, in order.

    A slow reader costs one entry for each key of the store, never one for each change. Use it on one event loop.
    """

    def __init__(self) -> None:
        self._snapshot: list[Change] | None = None
        self._pending: dict[str, Change] = {}
        self._waiter = OneWaiter()
        self._closed = False

    def open(self, snapshot: Mapping[str, bytes]) -> None:
        """Give the first batch; call it once, before any `post`."""
        self._snapshot = [Put(key, value) for key, value in snapshot.items()]
        self._waiter.wake()

    def post(self, changes: Iterable[Change]) -> None:
        """Add changes; an older unread change of the same key is forgotten."""
        for change in changes:
            self._pending.pop(change.key, None)  # re-inserted at the end, so that the order is that of the last change
            self._pending[change.key] = change
        self._waiter.wake()

    def close(self) -> None:
        """End the iteration once everything posted was read."""
        self._closed = True
        self._waiter.wake()

    def __aiter__(self) -> ChangeFeed:
        return self

    async def __anext__(self) -> list[Change]:
        while True:
            if self._snapshot is not None:
                snapshot, self._snapshot = self._snapshot, None
                return snapshot
            if self._pending:
                batch, self._pending = list(self._pending.values()), {}
                return batch
            if self._closed:
                raise StopAsyncIteration
            await self._waiter.wait()
