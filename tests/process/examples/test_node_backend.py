"""The Node.js worker, called over its own wire: what docs/wire.md promises is enough to write a worker."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.errors import InvalidArgument, ResponseTimeout, WorkerUnavailable
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import INITIAL_CREDITS, Instance
from dynamo.runtime.calls.request_plane.mux.client import MuxClient
from support.streams import read_all

SERVER = Path(__file__).parents[3] / "examples" / "node-backend" / "server.js"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")


class Worker:
    def __init__(self, process: asyncio.subprocess.Process, instance: Instance, store: Path) -> None:
        self.process, self.instance, self.store = process, instance, store

    def records(self) -> list[Path]:
        return [path for path in self.store.rglob("*") if path.is_file()]


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    env = {**os.environ, "DYN_FILE_KV": str(tmp_path), "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.01"}
    process = await asyncio.create_subprocess_exec(
        NODE or "", str(SERVER), "--delay", "0.001", stdout=subprocess.PIPE, env=env
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line.startswith(b"Serving node-model on dynamo.node.generate")
    (path,) = (tmp_path / "v1/instances").iterdir()
    record = json.loads(path.read_text())
    assert record.pop("type") == "Endpoint"
    yield Worker(process, msgspec.convert(record, Instance), tmp_path)
    if process.returncode is None:
        process.kill()
    await process.wait()
    process._transport.close()  # type: ignore[attr-defined]  # asyncio closes it only at the next turn


@pytest.fixture
async def client() -> AsyncIterator[MuxClient]:
    client = MuxClient()
    yield client
    await client.close()


def body(tokens: int, prompt: int = 3) -> dict[str, Any]:
    return {"token_ids": list(range(prompt)), "stop_conditions": {"max_tokens": tokens}}


async def test_the_record_it_writes_is_named_by_its_key(worker: Worker) -> None:
    names = {path.relative_to(worker.store).as_posix() for path in worker.records()}
    encoded = worker.instance.key.replace("/", "%2F")
    assert names == {f"v1/instances/{encoded}", f"v1/mdc/{encoded}"}


async def test_it_serves_the_sample_behaviour(worker: Worker, client: MuxClient) -> None:
    items = await read_all(await client.open(worker.instance, body(5), Context()))
    assert [i for item in items for i in item.token_ids] == [1, 2, 3, 4, 5]
    assert items[-1].finish_reason == "length"
    assert items[-1].extra == {"completion_usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}}


async def test_it_obeys_credits_and_large_bodies_over_many_streams(worker: Worker, client: MuxClient) -> None:
    count = INITIAL_CREDITS + 50
    streams = [await client.open(worker.instance, body(count if n == 0 else 20, 60_000), Context()) for n in range(20)]
    answers = await asyncio.gather(*map(read_all, streams))
    assert [sum(len(i.token_ids) for i in items) for items in answers] == [count] + [20] * 19


@pytest.mark.parametrize("kill", [False, True])
async def test_it_obeys_stop_and_kill(worker: Worker, client: MuxClient, kill: bool) -> None:
    context = Context()
    stream = await client.open(worker.instance, body(10**6), context)
    await stream.next_batch()
    (context.kill if kill else context.stop_generating)()
    rest = await read_all(stream)
    assert (rest[-1].finish_reason == "cancelled") if not kill else rest == []


async def test_its_errors_are_typed(worker: Worker, client: MuxClient) -> None:
    with pytest.raises(InvalidArgument, match="no token_ids"):
        await read_all(await client.open(worker.instance, {}, Context()))
    elsewhere = msgspec.structs.replace(worker.instance, transport={"tcp": worker.instance.transport["tcp"] + "x"})
    with pytest.raises(WorkerUnavailable, match="unknown endpoint"):
        await read_all(await client.open(elsewhere, body(1), Context()))
    late = Context(deadline=asyncio.get_running_loop().time() + 0.05)
    with pytest.raises(ResponseTimeout):
        await read_all(await client.open(worker.instance, body(10**6), late))


async def test_it_leaves_politely(worker: Worker, client: MuxClient) -> None:
    stream = await client.open(worker.instance, body(100), Context())
    await stream.next_batch()
    worker.process.send_signal(signal.SIGTERM)
    items = await read_all(stream)
    assert items[-1].finish_reason == "length"
    assert await worker.process.wait() == 0
    assert worker.records() == []
