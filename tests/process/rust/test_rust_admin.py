"""The Worker Admin API of a worker in Rust: taken out of service and put back, with requests on their way."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import WorkerUnavailable
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.mux.client import MuxClient
from support.http_client import ask
from support.processes import Cluster, get, until
from support.rust_worker import NEEDS_ENGINE, RustWorker, body
from support.streams import read_all

pytestmark = NEEDS_ENGINE
SERVING = {
    "state": "serving",
    "inflight_requests": 0,
    "kv_transfers": "not_applicable",
    "safe_to_delete": False,
    "discovery_registered": True,
}


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RustWorker]:
    worker = RustWorker.start(tmp_path)
    yield worker
    worker.close()


@pytest.fixture
async def client() -> AsyncIterator[MuxClient]:
    client = MuxClient()
    yield client
    await client.close()


def call(worker: RustWorker, name: str) -> dict[str, Any]:
    status, answer = worker.get(f"/engine/{name}", method="GET" if name == "status" else "POST")
    assert status == 200, answer
    found: dict[str, Any] = json.loads(answer)
    return found


async def test_a_drained_worker_is_empty_and_comes_back(worker: RustWorker, client: MuxClient) -> None:
    instance = worker.instance()
    worker.wait_log("registered worker Admin API routes under /engine")
    assert call(worker, "status") == SERVING
    running = Context()
    stream = await client.open(instance, body(10**6), running)
    await stream.next_batch()
    drained = call(worker, "drain")
    assert drained == SERVING | {"state": "draining", "inflight_requests": 1, "discovery_registered": False}
    assert not [name for name in worker.records() if name.startswith("v1/instances/")]
    assert call(worker, "drain")["state"] == "draining"

    async def declined() -> bool:
        try:
            await read_all(await client.open(instance, body(1), Context()))
        except WorkerUnavailable as error:
            return "worker is not accepting new requests" in str(error)
        return False

    while not await declined():  # the grace of this test is zero, and still a moment of its own
        await asyncio.sleep(0.01)
    assert call(worker, "status")["inflight_requests"] == 1
    running.stop_generating()
    assert (await read_all(stream))[-1].finish_reason == "cancelled"
    await until(lambda: call(worker, "status")["state"] == "drained", lambda: f"a drain; log:\n{worker.log}")
    assert call(worker, "status")["safe_to_delete"] is True
    assert "worker drained and is safe to delete" in worker.log
    assert worker.get("/health")[0] == 503  # as with a worker in Python: it takes no requests

    assert call(worker, "resume") == SERVING
    assert (await read_all(await client.open(worker.instance(), body(2), Context())))[-1].finish_reason == "length"
    call(worker, "drain")
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_with_a_canary_a_drained_worker_is_ready_again_when_it_is_back_and_not_before(tmp_path: Path) -> None:
    env: dict[str, Any] = {
        "DYN_HEALTH_CHECK_ENABLED": "1",
        "DYN_HEALTH_CHECK_PAYLOAD": json.dumps(body(1)),
        "DYN_CANARY_WAIT_TIME": "0.02",
    }
    worker, client = RustWorker.start(tmp_path, **env), MuxClient()
    try:
        instance = worker.instance()
        await until(lambda: worker.get("/health")[0] == 200, lambda: worker.log)
        running = Context()
        stream = await client.open(instance, body(10**6), running)
        await stream.next_batch()
        call(worker, "drain")
        running.stop_generating()
        await read_all(stream)
        await until(lambda: call(worker, "status")["state"] == "drained", lambda: worker.log)
        for _ in range(20):  # probes come between
            status, answer = worker.get("/health")
            assert (status, json.loads(answer)["reason"]) == (503, "it takes no requests now")
        call(worker, "resume")
        await until(lambda: worker.get("/health")[0] == 200, lambda: worker.log)
    finally:
        await client.close()
        worker.close()


async def test_what_is_not_of_the_api_is_declined(worker: RustWorker) -> None:
    worker.wait_log("registered worker Admin API routes")
    port = int(worker.wait_log(r"status server on http://[^:\s]+:(\d+)")[1])
    for path, method in (("drain", "GET"), ("resume", "PUT"), ("status", "POST")):
        assert get(port, f"/engine/{path}", method=method)[0] == 405
    assert get(port, "/engine/other", method="POST")[0] == 404
    for sent, status, text in (
        (b"[]", 500, "worker Admin API request body must be a JSON object"),
        (b"{", 400, None),
        (b'{"any": 1}', 200, None),
    ):
        reply = await ask(port, "/engine/drain", sent)
        assert reply.status == status
        assert text is None or reply.json() == {"error": "Handler error", "message": text}
    foreign = await ask(port, "/engine/resume", b"{}", headers={"origin": "http://evil.example"})
    assert foreign.status == 403


async def test_frontends_send_what_comes_to_the_others(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend")
        first, second = (cluster.sample(name, "m", "--delay", "0.01") for name in ("first", "second"))
        cluster.wait_ready(frontend, first, second)

        async def complete() -> Any:
            request = json.dumps({"model": "m", "prompt": "a", "max_tokens": 20}).encode()
            reply = await ask(frontend.port, "/v1/completions", request)
            assert reply.status == 200, frontend.log
            return reply

        running = [asyncio.create_task(complete()) for _ in range(8)]
        await until(lambda: first.metric("dynamo_component_inflight_requests") > 0, lambda: "a request at the first")
        assert get(first.system_port, "/engine/drain", method="POST")[0] == 200
        await until(lambda: frontend.workers("m") == 1, lambda: f"the drain to be seen; log:\n{frontend.log}")
        await asyncio.gather(*running)
        before = first.metric("dynamo_component_requests_total")
        await asyncio.gather(*(complete() for _ in range(4)))
        assert first.metric("dynamo_component_requests_total") == before
        assert get(first.system_port, "/engine/resume", method="POST")[0] == 200
        await until(lambda: frontend.workers("m") == 2, lambda: f"the worker to be back; log:\n{frontend.log}")
