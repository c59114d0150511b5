"""Discovery in memory that can be cut off, lose its lease, be stopped and be wiped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from dynamo.runtime.discovery.base import Change, Delete, Put, matches
from dynamo.runtime.discovery.feed import ChangeFeed
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryHub
from dynamo.testing.simulation.network import OrderedSet


class SimulatedDiscovery(MemoryDiscovery):
    """One process's view. While it is cut off, its last view stays, and what it writes waits for its return."""

    def __init__(self, hub: MemoryHub, *, lease_id: int) -> None:
        super().__init__(hub, lease_id=lease_id)
        self._watching = cast("set[ChangeFeed]", OrderedSet[ChangeFeed]())
        self._views: dict[ChangeFeed, tuple[str, dict[str, bytes]]] | None = None  # set while cut off
        self._cuts = 0
        self._is_dead = False

    def cut_off(self) -> None:
        """Lose the way to the store. Cuts nest."""
        self._cuts += 1
        if self._cuts > 1 or self._is_dead:
            return
        self._views = {}
        for feed in self._watching:
            prefix = self.hub._feeds.pop(feed, None)
            if prefix is not None:
                self._views[feed] = (prefix, self.hub._read(prefix))

    def reconnect(self) -> None:
        """Reconnect to the store: own keys are put back, and watches receive what they missed."""
        self._cuts -= 1
        if self._cuts or self._is_dead or self._closed:
            return
        views, self._views = self._views or {}, None
        stale = [
            key for key, (_, owner) in self.hub._records.items() if owner == self.lease_id and key not in self._own
        ]
        for key in stale:
            self.hub._remove(key)
        for key, value in self._own.items():
            if self.hub._records.get(key) != (value, self.lease_id):
                self.hub._write(key, value, self.lease_id)
        for feed, (prefix, seen) in views.items():
            if feed in self._watching:
                self.hub._feeds[feed] = prefix
                if changes := _difference(seen, self.hub._read(prefix)):
                    feed.post(changes)

    def lapse(self) -> None:
        """Expire the lease of a process that did not renew it in time: its keys vanish for the others."""
        if self._views is not None or self._is_dead:
            self.hub._drop(self.lease_id)

    def die(self) -> None:
        """Cut off a process that is gone: no later call of the process may reach the store."""
        self._is_dead = True
        for feed in self._watching:
            self.hub._feeds.pop(feed, None)

    async def put(self, key: str, value: bytes) -> None:
        if self._is_dead or self._views is not None:
            self._own[key] = value
            return
        await super().put(key, value)

    async def delete(self, key: str) -> None:
        if self._is_dead or self._views is not None:
            self._own.pop(key, None)
            return
        await super().delete(key)

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[list[Change]]]:
        async with super().watch(prefix) as feed:
            if self._views is not None:  # a watch that is set up during an outage begins with nothing new
                self._views[cast(ChangeFeed, feed)] = (prefix, self.hub._read(prefix))
                self.hub._feeds.pop(cast(ChangeFeed, feed), None)
            yield feed

    async def close(self) -> None:
        if not self._is_dead:
            await super().close()
            return
        self._closed = True
        for feed in self._watching:
            feed.close()

    def _lease_lost(self) -> None:
        if not self._is_dead:
            super()._lease_lost()


def wipe(hub: MemoryHub) -> None:
    """Empty the store, as after a restart without its data."""
    for lease_id in dict.fromkeys(owner for _, owner in list(hub._records.values())):
        hub._drop(lease_id)


def _difference(seen: dict[str, bytes], now: dict[str, bytes]) -> list[Change]:
    gone: list[Change] = [Delete(key) for key in seen if key not in now and matches("", key)]
    return gone + [Put(key, value) for key, value in now.items() if seen.get(key) != value]
