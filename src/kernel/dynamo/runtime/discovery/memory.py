"""Discovery inside one process: a map, and nothing that can fail."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from dynamo.runtime.discovery.base import Change, Delete, Put, matches
from dynamo.runtime.discovery.feed import ChangeFeed
from dynamo.runtime.discovery.keys import new_lease_id, split_bucket, split_key

NO_LEASE: Final = 0  # of records that stay when their writer ends


class MemoryHub:
    """The store that several runtimes of one event loop share. Not thread-safe."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[bytes, int]] = {}  # key -> (value, lease)
        self._feeds: dict[ChangeFeed, str] = {}  # -> its prefix
        self._members: dict[int, MemoryDiscovery] = {}

    def expire(self, lease_id: int) -> None:
        """Lose a lease, as a store does that received nothing from a process in time. A living member puts its keys
        again.
        """
        self._drop(lease_id)
        if (member := self._members.get(lease_id)) is not None:
            member._lease_lost()

    def kill(self, lease_id: int) -> None:
        """Drop the keys of a process that died: the others see them vanish, and no process puts them again."""
        self._members.pop(lease_id, None)
        self._drop(lease_id)

    def _write(self, key: str, value: bytes, lease_id: int) -> None:
        self._records[key] = (value, lease_id)
        self._tell([Put(key, value)])

    def _remove(self, key: str) -> None:
        if self._records.pop(key, None) is not None:
            self._tell([Delete(key)])

    def _drop(self, lease_id: int) -> None:
        lost = [key for key, (_, owner) in self._records.items() if owner == lease_id]
        for key in lost:
            del self._records[key]
        self._tell([Delete(key) for key in lost])

    def _tell(self, changes: list[Change]) -> None:
        for feed, prefix in self._feeds.items():
            if wanted := [change for change in changes if matches(prefix, change.key)]:
                feed.post(wanted)

    def _read(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, (value, _) in self._records.items() if matches(prefix, key)}


_hubs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, MemoryHub] = weakref.WeakKeyDictionary()


def shared_hub(loop: asyncio.AbstractEventLoop) -> MemoryHub:
    """Return the hub that runtimes with the `mem` backend share when they run on the same loop."""
    hub = _hubs.get(loop)
    if hub is None:
        hub = _hubs[loop] = MemoryHub()
    return hub


class MemoryDiscovery:
    """One runtime's lease in a hub; keeps the promises of `base.Discovery`."""

    def __init__(self, hub: MemoryHub, *, lease_id: int | None = None) -> None:
        self.hub = hub
        self._lease_id = lease_id if lease_id is not None else new_lease_id()
        self._own: dict[str, bytes] = {}
        self._watching: set[ChangeFeed] = set()
        self._closed = False

    @property
    def lease_id(self) -> int:
        return self._lease_id

    def trouble(self) -> str | None:
        return None

    async def start(self) -> None:
        self._check_open()
        self.hub._members[self._lease_id] = self

    async def put(self, key: str, value: bytes) -> None:
        self._check_open()
        split_key(key)
        self._own[key] = value
        self.hub._write(key, value, self._lease_id)

    async def put_new(self, key: str, value: bytes) -> bool:
        if key in self.hub._records:
            return False
        await self.put(key, value)
        return True

    async def delete(self, key: str) -> None:
        split_key(key)
        self._own.pop(key, None)
        self.hub._remove(key)

    async def swap(self, key: str, expected: bytes | None, value: bytes) -> bool:
        self._check_open()
        split_key(key)
        found = self.hub._records.get(key)
        if (None if found is None else found[0]) != expected:
            return False
        self.hub._write(key, value, NO_LEASE)
        return True

    async def lose_lease(self) -> None:
        """Drop this process's records as if it were dead, for fault injection. The process then puts them again."""
        self.hub.expire(self._lease_id)

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        split_bucket(prefix)
        return self.hub._read(prefix)

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[list[Change]]]:
        self._check_open()
        split_bucket(prefix)
        feed = ChangeFeed()
        feed.open(self.hub._read(prefix))
        self.hub._feeds[feed] = prefix
        self._watching.add(feed)
        try:
            yield feed
        finally:
            self.hub._feeds.pop(feed, None)
            self._watching.discard(feed)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._own.clear()
        self.hub.kill(self._lease_id)
        for feed in self._watching:
            self.hub._feeds.pop(feed, None)
            feed.close()

    def _lease_lost(self) -> None:
        for key, value in self._own.items():
            self.hub._write(key, value, self._lease_id)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this discovery store is closed")
