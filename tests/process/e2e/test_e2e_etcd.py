"""Processes that find each other through a real etcd, and go on without it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.etcd_server import EtcdServer
from support.http_client import CHAT, ask, chat
from support.ports import free_ports
from support.processes import Cluster, until

TTL_SECONDS = 2


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
def cluster(tmp_path: Path, etcd: EtcdServer) -> Iterator[Cluster]:
    with Cluster(tmp_path, "etcd", ETCD_ENDPOINTS=etcd.url, ETCD_LEASE_TTL=str(TTL_SECONDS)) as cluster:
        yield cluster


async def test_requests_are_answered_whatever_becomes_of_etcd(cluster: Cluster, etcd: EtcdServer) -> None:
    frontend = cluster.frontend("frontend")
    workers = [cluster.sample(name, "m", "--delay", "0.001") for name in ("one", "two")]
    cluster.wait_ready(frontend, *workers)
    before = etcd.keys()
    assert all(lease for _, lease in before.values())

    async def all_is_well(seconds: float = 0.0) -> None:
        ends_at = time.monotonic() + seconds
        while True:
            assert (await ask(frontend.port, CHAT, chat("m", max_tokens=3))).status == 200
            if time.monotonic() >= ends_at:
                return

    await all_is_well()
    etcd.kill()
    await all_is_well(TTL_SECONDS * 1.25)
    etcd.wipe()
    await asyncio.to_thread(etcd.start)
    # The same leases, and with them the same instances. A record that a process wrote only after `before` may be there, too.
    await until(lambda: before.items() <= etcd.keys().items(), lambda: f"{sorted(before)} in {sorted(etcd.keys())}")
    await all_is_well(0.5)
    assert frontend.workers("m") == 2
    workers[0].terminate()
    assert await workers[0].ended() == 0
    await until(lambda: frontend.workers("m") == 1)
    await all_is_well()
    assert not frontend.has_ended
    assert not workers[1].has_ended


async def test_a_process_without_its_etcd_ends_with_a_sentence(tmp_path: Path) -> None:
    (nobody,) = free_ports(1)
    url = f"http://127.0.0.1:{nobody}"
    variables = {"ETCD_ENDPOINTS": url, "ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS": "0.5"}
    with Cluster(tmp_path, "etcd", **variables) as cluster:
        processes = [cluster.frontend("frontend"), cluster.sample("worker", "m")]
        for process in processes:
            assert await process.ended() == 1
            assert f"cannot use etcd at {url} (ETCD_ENDPOINTS)" in process.log
            assert "--discovery-backend" in process.log
            assert "Traceback" not in process.log
