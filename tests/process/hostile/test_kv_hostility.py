"""A hostile member of the cluster beside `--router-mode kv` and `python -m dynamo.router`, over real sockets.

Everything that it can publish costs itself: both routers go on to choose the holder of a prompt, and their memory is bounded.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from dynamo.runtime.calls.context import Context
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from support.http_client import ask
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, Frontend, Process, wait

BLOCK: Final = 16
PATH: Final = "dynamo.backend.generate"
DEEP: Final = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
DEEP_JSON: Final = b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
TEXT: Final = "a prompt of more than a few blocks. " * 20


def stored(worker_id: int, rank: int, event_id: int, names: range) -> dict[str, Any]:
    blocks = [{"block_hash": name, "tokens_hash": name} for name in names]
    data = {"stored": {"parent_hash": None, "blocks": blocks}}
    return {"worker_id": worker_id, "event": {"event_id": event_id, "data": data, "dp_rank": rank}}


def kv_events(victim: int) -> Iterator[bytes]:
    encode = msgspec.msgpack.encode
    yield DEEP
    yield b"\x91" + DEEP
    yield bytes(9 * 1024 * 1024)
    yield encode([stored(victim, 0, 2**63, range(1))])
    yield encode([stored(victim, 0, 10**6, range(300_000))])
    yield encode([stored(victim, 77, 1, range(1000))])
    for number in range(200):
        yield encode([stored(2**40 + number * 100 + each, each % 7, 1, range(5)) for each in range(100)])
    for number in range(300):
        yield encode(
            [{"worker_id": victim, "event": {"event_id": 10**7 + number, "data": "cleared", "dp_rank": 0}}] * 100
        )


def bookings(victim: int) -> Iterator[bytes]:
    encode = msgspec.msgpack.encode
    yield DEEP
    worker = {"worker_id": victim, "dp_rank": 0}
    for number in range(50):
        data = {
            "AddRequest": {
                "token_sequence": list(range(5000)),
                "prefill_load_hint": {"initial_effective_prefill_tokens": 9},
            }
        }
        event = {"request_id": str(number), "worker": worker, "data": data, "router_id": number}
        yield encode({"events": [event]})
        yield encode({"events": [{**event, "worker": {"worker_id": number, "dp_rank": each}} for each in range(20)]})
    hint = {"initial_effective_prefill_tokens": 2**64 - 1}
    longest: Any = {"AddRequest": {"token_sequence": None, "prefill_load_hint": hint}}
    yield encode({"events": [{"request_id": "x", "worker": worker, "data": longest, "router_id": 5}]})


async def attack(runtime: DistributedRuntime, victim: int) -> None:
    endpoint = runtime.endpoint(PATH)
    scope = endpoint.event_scope
    for topic, payloads in (
        ("kv-events", kv_events(victim)),
        ("active_sequences_events", bookings(victim)),
        ("kv_metrics", iter([DEEP, b"\x81\xa4\xff\xff\xff\xff\x01"])),
        ("session_affinity_events", iter([DEEP])),
    ):
        publisher = await runtime.events.publisher(scope, topic)
        await asyncio.sleep(
            0.5
        )  # subscribers connect to a new publisher in their own time; what they miss proves nothing
        for payload in payloads:
            publisher.publish(payload)
            await asyncio.sleep(0)
    for key in (
        f"v1/event_sources/{scope.path_encoded}/topic/kv-events/1",
        f"v1/event_channels/{scope.path_encoded}/topic/kv-events/2",
        f"v1/instances/{PATH.replace('.', '/')}/3",
        f"v1/mdc/{PATH.replace('.', '/')}/4",
    ):
        await runtime.discovery.put(key, DEEP_JSON)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_EVENT_PLANE_HOST", "127.0.0.1")


async def test_what_a_hostile_member_publishes_costs_itself(tmp_path: Path, here: None) -> None:
    with Cluster(tmp_path) as cluster:
        python, store = sys.executable, ["--discovery-backend", "file"]
        flags = ["--model-path", "m", "--num-workers", "2", "--block-size", str(BLOCK), "--speedup-ratio", "50"]
        cluster.process("mocker", [python, "-m", "dynamo.mocker", *store, *flags])
        argv = [python, "-m", "dynamo.router", *store, "--endpoint", PATH, "--router-block-size", str(BLOCK)]
        router = cluster.process("router", [*argv, "--router-replica-sync"])
        frontend = cluster.frontend(
            "frontend", "--router-mode", "kv", "--router-policy", "default", "--router-replica-sync"
        )
        frontend.wait_ready()
        wait(lambda: frontend.get("/v1/models/m/ready")[0] == 200, lambda: frontend.log)
        first = await complete(frontend)
        async with DistributedRuntime(None, None, "tcp", discovery=FileDiscovery(tmp_path / "store")) as runtime:
            before = [memory(process) for process in (router, frontend)]
            await attack(runtime, first["worker_id"])
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:  # the holder is degraded, asked again, and exact in the end
                    found = await complete(frontend)
                    (held,) = [each for each in found["candidates"] if each["worker_id"] == first["worker_id"]]
                    if held["cached_blocks"]["device"] > 30 and held["trust"] == "exact":
                        break
                    await asyncio.sleep(0.2)
                client = await runtime.endpoint("dynamo.router.get_overlap_scores").client()
                (instance_id,) = await client.wait_for_instances()
                stream = await client.open(client.named(instance_id), {"token_ids": list(range(64))}, Context())
                (item,) = await stream.next_batch()
                stream.close()
                await client.close()
            assert len((item.extra or {})["data"]["workers"]) == 2
            for process, memory_before in zip((router, frontend), before, strict=True):
                assert memory(process) - memory_before < 200 * 2**20, process.log
        for process in (router, frontend):  # 30,000 events in the name of a worker are not 30,000 questions
            assert process.log.count("not one of its own") < 30
        router.terminate()
        assert router.exit_code() == 0, router.log


async def complete(frontend: Frontend) -> dict[str, Any]:
    body = {"model": "m", "prompt": TEXT, "max_tokens": 4}
    headers = {"x-dynamo-explain-routing": "1"}
    reply = await ask(frontend.port, "/v1/completions", json.dumps(body).encode(), headers=headers)
    assert reply.status == 200, reply
    found: dict[str, Any] = reply.json()["nvext"]["routing"]["decode"]
    return found


def memory(process: Process) -> int:
    fields = Path(f"/proc/{process.pid}/statm").read_text().split()
    return int(fields[1]) * 4096
