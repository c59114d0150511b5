"""KV events of real workers, over the planes of a cluster; and a NATS that dies under load."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo.kv.events import RouterEvent
from dynamo.router import KvEventFeed
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from support.http_client import CHAT, ask
from support.nats_server import nats_server
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, until


class Seen:
    """What a router heard, and what each worker holds."""

    def __init__(self) -> None:
        self.events = 0
        self.held: dict[int, set[int]] = {}

    def apply(self, event: RouterEvent) -> None:
        self.events += 1
        held = self.held.setdefault(event.worker_id, set())
        data = event.event.data
        assert data != "cleared"
        if data.stored is not None:
            held.update(block.block_hash for block in data.stored.blocks)
        if data.removed is not None:
            held.difference_update(data.removed.block_hashes)

    def forget(self, worker_id: int, dp_rank: int) -> None:
        self.held[worker_id] = set()


async def load(port: int, model: str, count: int) -> list[int]:
    body = {"model": model, "messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 4}
    replies = await asyncio.gather(*(ask(port, CHAT, json.dumps(body).encode()) for _ in range(count)))
    return [reply.status for reply in replies]


async def test_a_nats_that_dies_under_load_costs_no_request_and_the_router_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nats_server() as server:
        env: dict[str, Any] = {"DYN_EVENT_PLANE": "nats", "NATS_SERVER": server.url}
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with Cluster(tmp_path, **env) as cluster:
            frontend = cluster.frontend("frontend")
            workers = [cluster.sample(name, "m", "--delay", "0.002", "--namespace", "e2e") for name in ("one", "two")]
            cluster.wait_ready(frontend, *workers)
            seen = Seen()
            store = FileDiscovery(tmp_path / "store")
            async with (
                DistributedRuntime(None, None, "tcp", discovery=store) as runtime,
                KvEventFeed(runtime.endpoint("e2e.m.generate"), seen),
            ):
                await until(lambda: len(seen.held) == 2)
                statuses = await load(frontend.port, "m", 20)
                await until(lambda: seen.events > 20)
                server.kill()
                statuses += await load(frontend.port, "m", 40)
                server.start()
                before, ends_at = seen.events, time.monotonic() + PATIENCE_SECONDS
                while seen.events == before or any(seen.held.values()):  # every request has ended: nothing is held
                    assert time.monotonic() < ends_at, (seen.events, seen.held)
                    statuses += await load(frontend.port, "m", 2)
                    await asyncio.sleep(0.1)
            assert set(statuses) == {200}
            assert not any(worker.has_ended for worker in (*workers, frontend))
            # The events may be those of one worker, which has connected sooner.
            await until(lambda: all(re.search(r"NATS at \S+ is back", worker.log) for worker in workers))


def test_a_worker_and_a_frontend_without_their_nats_say_so_and_end(tmp_path: Path) -> None:
    env = {
        "DYN_EVENT_PLANE": "nats",
        "NATS_SERVER": "nats://127.0.0.1:1",
        "NATS_STARTUP_CONNECT_TIMEOUT_SECONDS": "0.5",
    }
    with Cluster(tmp_path, **env) as cluster:
        processes = [cluster.frontend("frontend"), cluster.sample("worker", "m")]
        for process in processes:
            assert process.exit_code() == 1
            assert "NATS at nats://127.0.0.1:1 cannot be used" in process.log
            assert "--event-plane nats" in process.log
            assert "Traceback" not in process.log
