"""Policy classes between real processes: a backlog of two classes is served 4 to 1, and a full class is a 529."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.worker.registration import build_card
from support.http_client import ask
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, Frontend, wait

POLICY = """
default_policy_family: rest
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes:
  - {name: rest, policy_family: rest, cache_bucket: all, quantum: 1, prefill_busy_threshold: 0}
  - {name: gold, quantum: 40, prefill_busy_threshold: 0}
  - {name: silver, quantum: 10, prefill_busy_threshold: 0, request_queue_limit_per_worker: 40}
"""
EACH = 40  # requests of each class
TOKENS = 10  # of each prompt
CODES = {"rest": 1, "gold": 2, "silver": 3}


class OneAtATime:
    """A worker that answers one request after the other once it may; the classes of the requests in the order they came."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.may_begin = asyncio.Event()

    async def generate(self, body: Any, context: Context, sink: ResponseSink) -> None:
        self.served.append(next(name for name, code in CODES.items() if code == body["token_ids"][0]))
        await self.may_begin.wait()
        sink.send_tokens(list(b"z"), finish_reason="stop")


async def complete(frontend: Frontend, policy_class: str) -> int:
    body = json.dumps({"model": "m", "prompt": [CODES[policy_class]] * TOKENS, "max_tokens": 1}).encode()
    headers = {"x-dynamo-meta-policy-class": policy_class}
    reply = await ask(frontend.port, "/v1/completions", body, headers=headers)
    if reply.status == 529:
        assert reply.json()["details"] == {
            "policy_class": "silver", "limit_kind": "requests", "current": EACH, "limit": EACH,
        }  # fmt: skip
        assert int(reply.headers["retry-after"]) >= 1
    return reply.status


async def pending(frontend: Frontend) -> float:
    body = (await ask(frontend.port, "/metrics")).body.decode()
    lines = [line for line in body.splitlines() if line.startswith("dynamo_frontend_router_queue_pending_requests{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def test_classes_share_a_worker_four_to_one_and_a_full_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    worker = OneAtATime()
    discovery = FileDiscovery(tmp_path / "store")
    with Cluster(tmp_path) as cluster:
        flags = ["--router-mode", "kv", "--router-policy", "default", "--no-router-kv-events"]
        frontend = cluster.frontend("frontend", *flags, "--router-policy-config", str(tmp_path / "policy.yaml"))
        await asyncio.to_thread(frontend.wait_ready)
        async with (
            DistributedRuntime(None, None, "tcp", discovery=discovery) as runtime,
            asyncio.timeout(PATIENCE_SECONDS * 2),
        ):
            endpoint = runtime.endpoint("ns.backend.generate")
            await endpoint.start_serving(worker.generate)
            config = ModelRuntimeConfig(total_kv_blocks=1000, max_num_batched_tokens=100)
            await endpoint.publish_model(build_card("m", kv_cache_block_size=4, runtime_config=config).to_json())
            await asyncio.to_thread(wait, lambda: frontend.get("/v1/models/m/ready")[0] == 200, lambda: frontend.log)
            asked = [asyncio.ensure_future(complete(frontend, "rest"))]
            while not worker.served:
                await asyncio.sleep(0.01)
            for _ in range(EACH):
                asked += [asyncio.ensure_future(complete(frontend, name)) for name in ("gold", "silver")]
            while await pending(frontend) < 2 * EACH:
                await asyncio.sleep(0.02)
            assert await complete(frontend, "silver") == 529
            worker.may_begin.set()
            assert [await each for each in asked] == [200] * len(asked)
            assert await pending(frontend) == 0
    first = Counter(worker.served[1 : 1 + EACH])  # as long as both classes have a backlog
    assert first["gold"] / first["silver"] == pytest.approx(4.0, rel=0.05)
    assert Counter(worker.served) == {"rest": 1, "gold": EACH, "silver": EACH}
