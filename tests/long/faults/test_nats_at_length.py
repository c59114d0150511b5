"""NATS is gone for a minute, under load: no request notices, no process ends, and its events come again."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from support.http_client import CHAT, ask, chat
from support.nats_server import nats_server
from support.processes import Cluster, Worker, until

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif("FAULTS" not in os.environ, reason="make test-faults"),
    pytest.mark.timeout(300),
]

DOWN_SECONDS = 60.0
TWO_LEASE_PERIODS = 20.0


def has_come_back(worker: Worker) -> bool:
    return re.search(r"NATS at \S+ is back", worker.log) is not None


async def test_a_minute_without_nats_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        nats_server() as server,
        Cluster(tmp_path, DYN_EVENT_PLANE="nats", NATS_SERVER=server.url) as cluster,
    ):
        frontend = cluster.frontend("frontend")
        workers = [cluster.sample(name, "m", "--delay", "0.002") for name in ("one", "two")]
        cluster.wait_ready(frontend, *workers)
        answers: Counter[tuple[int, bool]] = Counter()

        async def load(seconds: float) -> None:
            ends_at = time.monotonic() + seconds
            while time.monotonic() < ends_at:
                reply = await ask(frontend.port, CHAT, chat("m", stream=True, max_tokens=20))
                answers[reply.status, "error" in reply.body.decode()] += 1
                await asyncio.sleep(0.05)

        async def clients(seconds: float) -> None:
            await asyncio.gather(*(load(seconds) for _ in range(8)))

        await clients(2.0)
        server.kill()
        await clients(DOWN_SECONDS)
        assert not any(has_come_back(each) for each in workers)
        back_at = time.monotonic()
        server.start()
        loading = asyncio.create_task(clients(5.0))
        ends_at = back_at + TWO_LEASE_PERIODS
        await until(lambda: all(has_come_back(each) for each in workers) or time.monotonic() > ends_at)
        took = time.monotonic() - back_at
        await loading
        assert all(has_come_back(each) for each in workers)
        assert not any(each.has_ended for each in (*workers, frontend))
        with capsys.disabled():
            print(f"\n  {sum(answers.values())} answers, {dict(answers)}; back after {took:.2f} s", end="", flush=True)
        assert list(answers) == [(200, False)]
        assert took < TWO_LEASE_PERIODS
