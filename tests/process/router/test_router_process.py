"""`python -m dynamo.router` in front of mock engines: what it answers, and how it ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dynamo.runtime.calls.context import Context
from dynamo.runtime.client import Client
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster

BLOCK = 16
PROMPT = list(range(10 * BLOCK + 3))


class Caller:
    """Calls the endpoints of the router."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._clients: dict[str, Client] = {}

    async def ask(self, endpoint: str, body: Any) -> list[Any]:
        client = self._clients.get(endpoint)
        if client is None:
            client = self._clients[endpoint] = await self._runtime.endpoint(f"dynamo.router.{endpoint}").client()
        async with asyncio.timeout(PATIENCE_SECONDS):
            (instance_id,) = await client.wait_for_instances()
            stream = await client.open(client.named(instance_id), body, Context())
            try:
                found: list[Any] = []
                while items := await stream.next_batch():
                    found += items
                return found
            finally:
                stream.close()

    async def scores(self) -> list[dict[str, int]]:
        (item,) = await self.ask("get_overlap_scores", {"token_ids": PROMPT})
        return list(item.extra["data"]["workers"])


@asynccontextmanager
async def caller(tmp_path: Path) -> AsyncIterator[Caller]:
    async with DistributedRuntime(None, None, "tcp", discovery=FileDiscovery(tmp_path / "store")) as runtime:
        yield Caller(runtime)


async def test_a_prompt_goes_back_to_its_holder_and_the_router_leaves_with_its_workers(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        python, store = sys.executable, ["--discovery-backend", "file"]
        flags = ["--model-path", "m", "--num-workers", "2", "--block-size", str(BLOCK), "--speedup-ratio", "20"]
        cluster.process("mocker", [python, "-m", "dynamo.mocker", *store, *flags])
        argv = [python, "-m", "dynamo.router", *store, "--endpoint", "dynamo.backend.generate"]
        router = cluster.process("router", [*argv, "--router-block-size", str(BLOCK), "--router-replica-sync"])
        async with caller(tmp_path) as calls, asyncio.timeout(PATIENCE_SECONDS):
            while len(await calls.scores()) < 2:
                await asyncio.sleep(0.05)
            body = {
                "token_ids": PROMPT, "model": "m", "stop_conditions": {"max_tokens": 4}, "sampling_options": {},
                "output_options": {},
            }  # fmt: skip
            items = await calls.ask("generate", body)
            assert sum(len(item.token_ids) for item in items) == 4
            holder = items[0].extra["routing_data"]["worker_id"]["decode_worker_id"]
            while max(each["device_blocks"] for each in await calls.scores()) < 10:
                await asyncio.sleep(0.02)
            assert {each["worker_id"]: each["device_blocks"] for each in await calls.scores()}[holder] == 10
            for _ in range(4):
                (item,) = await calls.ask("best_worker_id", PROMPT)
                assert item.extra == {"data": holder}
        router.terminate()
        assert router.exit_code() == 0, router.log


def test_the_endpoint_is_needed_and_help_reaches_for_nothing(tmp_path: Path) -> None:
    missing = subprocess.run([sys.executable, "-m", "dynamo.router"], capture_output=True, text=True, check=False)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "--endpoint is needed" in missing.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "dynamo.router", "--help"], capture_output=True, text=True, check=True
    )
    assert "--router-block-size" in shown.stdout
