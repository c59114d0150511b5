"""Each loop of the etcd store that fails once goes on, and its failure is counted and shown."""

from __future__ import annotations

import pytest

from dynamo.runtime.base.settings import EtcdSettings
from dynamo.runtime.discovery import Put
from dynamo.runtime.discovery.etcd import EtcdDiscovery
from support.discovery_rigs import collect
from support.etcd_server import EtcdServer
from support.fails_once import BrokenSteps

KEY = "v1/instances/ns/c/e/1f"
STORE = "dynamo.runtime.discovery.etcd"
CLIENT = f"{STORE}.client:EtcdClient"


async def test_each_loop_of_the_store_goes_on(etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    etcd_server.clear()
    store = EtcdDiscovery(EtcdSettings(endpoints=etcd_server.url, lease_ttl_seconds=2.0))
    steps = BrokenSteps(
        monkeypatch,
        f"{CLIENT}.keep_alive",
        f"{CLIENT}.leased_keys",
        f"{STORE}.views:_FollowedBucket._read",
        f"{STORE}.records:OwnRecords._until_other",
    )
    await store.start()
    await store.put(KEY, b"{}")
    async with store.watch(KEY) as changes:
        assert Put(KEY, b"{}") in await collect(changes, Put(KEY, b"{}"))
        etcd_server.delete(KEY)
        await steps.run_again("etcd: lease", "etcd: follow v1/instances", "etcd: repair", "etcd: own records")
    await store.close()
