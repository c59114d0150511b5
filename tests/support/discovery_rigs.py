"""One rig for each discovery backend: opens stores that see each other, and does to them what a bad day does."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from dynamo.runtime.base.settings import EtcdSettings, KubernetesSettings
from dynamo.runtime.discovery import Change, Discovery, FileDiscovery, MemoryDiscovery, MemoryHub
from dynamo.runtime.discovery.etcd import EtcdDiscovery
from dynamo.runtime.discovery.keys import encode_name, split_key
from dynamo.runtime.discovery.kubernetes import KubernetesDiscovery
from support.etcd_server import EtcdServer
from support.fake_kubernetes import NAMESPACE, FakeKubernetes
from support.patience import PATIENCE_SECONDS

SHORT_TTL_SECONDS = 2.0


class Rig(Protocol):
    """What the contract tests need to know of a backend."""

    async def open(self) -> Discovery:
        """A started store; closed with the rig."""

    async def expire(self, owner: Discovery, key: str) -> None:
        """Let the lease that `key` hangs on run out although its owner is well."""

    async def take_away(self, key: str) -> None:
        """Remove a record behind its owner's back."""

    async def lose_store(self) -> None:
        """Make the store unreachable, and reachable again with its data, as far as that can happen to it."""

    async def wipe_store(self) -> None:
        """Make it forget everything."""


class MemoryRig:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack, self._hub = stack, MemoryHub()

    async def open(self) -> Discovery:
        return await started(self._stack, MemoryDiscovery(self._hub))

    async def expire(self, owner: Discovery, key: str) -> None:
        self._hub.expire(owner.lease_id)

    async def take_away(self, key: str) -> None:
        for lease_id in list(self._hub._members):
            self._hub.expire(lease_id)

    async def lose_store(self) -> None:
        """It is in the process: it cannot be lost."""

    async def wipe_store(self) -> None:
        await self.take_away("")


class FileRig:
    def __init__(self, stack: AsyncExitStack, root: Path) -> None:
        self._stack, self._root = stack, root

    async def open(self) -> Discovery:
        return await started(self._stack, FileDiscovery(self._root, ttl_seconds=SHORT_TTL_SECONDS, poll_seconds=0.005))

    async def expire(self, owner: Discovery, key: str) -> None:
        os.utime(self._path(key), (0, 0))

    async def take_away(self, key: str) -> None:
        self._path(key).unlink()

    async def lose_store(self) -> None:
        """Nothing short of a broken disk does that, and then there is nothing to come back."""

    async def wipe_store(self) -> None:
        gone = self._root.with_name("gone")
        self._root.rename(gone)  # at once, as a file system that was made anew
        shutil.rmtree(gone)

    def _path(self, key: str) -> Path:
        bucket, inside = split_key(key)
        return self._root / bucket / encode_name(inside)


class EtcdRig:
    def __init__(self, stack: AsyncExitStack, server: EtcdServer) -> None:
        self._stack, self._server = stack, server
        server.clear()

    async def open(self) -> Discovery:
        settings = EtcdSettings(
            endpoints=self._server.url, lease_ttl_seconds=SHORT_TTL_SECONDS, keepalive_timeout_seconds=1.0
        )
        return await started(self._stack, EtcdDiscovery(settings))

    async def expire(self, owner: Discovery, key: str) -> None:
        self._server.call("lease/revoke", {"ID": owner.lease_id})

    async def take_away(self, key: str) -> None:
        self._server.delete(key)

    async def lose_store(self) -> None:
        self._server.kill()
        await asyncio.to_thread(self._server.start)

    async def wipe_store(self) -> None:
        self._server.kill()
        self._server.wipe()
        await asyncio.to_thread(self._server.start)


class KubernetesRig:
    """Against a fake of the API server; see there what that is worth."""

    def __init__(self, stack: AsyncExitStack, cluster: FakeKubernetes) -> None:
        self._stack, self._cluster = stack, cluster
        self._pods = 0

    async def open(self) -> Discovery:
        self._pods += 1
        name = f"worker-{self._pods}"
        await self._cluster.set_pod(name)
        settings = KubernetesSettings(pod_name=name, pod_namespace=NAMESPACE, pod_uid=f"uid-{name}")
        store = KubernetesDiscovery(
            settings, configuration=self._cluster.configuration(), debounce_seconds=0.005, keep_seconds=2.0
        )
        return await started(self._stack, store)

    async def expire(self, owner: Discovery, key: str) -> None:
        await self._cluster.remove_workers()

    async def take_away(self, key: str) -> None:
        await self._cluster.remove_workers()

    async def lose_store(self) -> None:
        await self._cluster.stop()
        self._cluster.forget()
        await self._cluster.start()

    async def wipe_store(self) -> None:
        await self._cluster.stop()
        await self._cluster.remove_workers()
        self._cluster.forget()
        await self._cluster.start()


async def started(stack: AsyncExitStack, store: Discovery) -> Discovery:
    stack.push_async_callback(store.close)
    await store.start()
    return store


async def collect(changes: AsyncIterator[list[Change]], *wanted: Change) -> list[Change]:
    """Return everything that a watch reports until it has reported all of `wanted`."""
    seen: list[Change] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not set(wanted) <= set(seen):
            seen += await anext(changes)
    return seen
