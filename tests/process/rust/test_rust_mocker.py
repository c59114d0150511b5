"""The mock engine in Rust (`make test-rust` builds it) behind our frontend, alone and beside the one in Python."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance
from dynamo.runtime.calls.request_plane.mux.client import MuxClient
from support.http_client import ask
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, Frontend, Process, get, wait
from support.streams import read_all

MOCKER = os.environ.get("RUST_MOCKER", "")
pytestmark = pytest.mark.skipif(not MOCKER, reason="no mocker in Rust: `make test-rust` builds one (RUST_MOCKER)")
EXPLAIN = {"x-dynamo-explain-routing": "1"}
FLAGS = ("--block-size", "16", "--speedup-ratio=50")
TEXT = "a prompt of more than a few blocks. " * 20


async def complete(frontend: Frontend, text: str = TEXT, count: int = 4) -> dict[str, Any]:
    body = {"model": "m", "prompt": text, "max_tokens": count, "seed": 3}
    reply = await ask(frontend.port, "/v1/completions", json.dumps(body).encode(), headers=EXPLAIN)
    assert reply.status == 200, reply
    found: dict[str, Any] = reply.json()
    return found


def placed(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["nvext"]["routing"]["decode"]
    return found


def workers(frontend: Frontend) -> int:
    status, body = frontend.get("/v1/models/m/ready")
    if status != 200:
        return 0
    namespaces = json.loads(body)["namespaces"].values()
    return sum(role["workers"] for namespace in namespaces for role in namespace["worker_types"].values())


def mocker(cluster: Cluster, name: str, *flags: str, language: str = "rust", **env: str) -> Process:
    program = [MOCKER] if language == "rust" else [sys.executable, "-m", "dynamo.mocker"]
    return cluster.process(name, [*program, "--model-path", "m", "--discovery-backend", "file", *FLAGS, *flags], **env)


@pytest.mark.parametrize("other", ["rust", "python"])
async def test_a_repeated_prompt_goes_to_its_holder_in_rust(tmp_path: Path, other: str) -> None:
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend", "--router-mode", "kv", "--router-policy", "default")
        holder = mocker(cluster, "one")
        frontend.wait_ready()
        wait(lambda: workers(frontend) == 1, lambda: frontend.log + holder.log)
        first = placed(await complete(frontend))
        mocker(cluster, "two", language=other)
        wait(lambda: workers(frontend) == 2, lambda: frontend.log)
        for _ in range(4):
            last = placed(await complete(frontend))
            assert (last["trust"], last["worker_id"]) == ("exact", first["worker_id"])
            assert last["candidates"][0]["cached_blocks"]["device"] == last["prompt_blocks"] > 30
            assert [each["cached_blocks"]["device"] for each in last["candidates"][1:]] == [0]
        holder.kill()
        assert placed(await complete(frontend))["worker_id"] != first["worker_id"]


async def test_a_router_that_comes_late_asks_for_what_it_missed(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        early = cluster.frontend("early", "--router-mode", "kv", "--router-policy", "default")
        mocker(cluster, "one")
        early.wait_ready()
        wait(lambda: workers(early) == 1, lambda: early.log)
        await complete(early)
        late = cluster.frontend("late", "--router-mode", "kv", "--router-policy", "default")
        late.wait_ready()
        wait(lambda: workers(late) == 1, lambda: late.log)
        # The blocks of TEXT are published once, before this router was there: each of its own prompts adds others.
        async with asyncio.timeout(PATIENCE_SECONDS):
            number = 0
            while placed(await complete(late, f"{TEXT}{number}"))["candidates"][0]["cached_blocks"]["device"] < 30:
                number += 1


async def test_prompts_are_handed_over_between_languages(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend")
        decode = mocker(cluster, "decode", "--disaggregation-mode", "decode")
        prefill = mocker(cluster, "prefill", "--disaggregation-mode", "prefill", language="python")
        frontend.wait_ready()
        wait(lambda: workers(frontend) == 2, lambda: frontend.log + decode.log + prefill.log)
        answer = await complete(frontend, count=6)
        assert answer["usage"]["completion_tokens"] == 6
        prefill.terminate()
        assert await prefill.ended() == 0
        mocker(cluster, "prefill in rust", "--disaggregation-mode", "prefill")
        wait(lambda: workers(frontend) == 2, lambda: frontend.log)
        assert (await complete(frontend, count=6))["choices"] == answer["choices"]


async def test_several_workers_of_a_process_are_workers_of_their_own(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend")
        process = mocker(cluster, "three", "--num-workers", "3", DYN_SYSTEM_PORT="0", DYN_SYSTEM_HOST="127.0.0.1")
        frontend.wait_ready()
        wait(lambda: workers(frontend) == 3, lambda: process.log)
        for _ in range(6):
            await complete(frontend)
        ports = re.findall(r"status server on \S+:(\d+)", process.log)
        pages = [get(int(port), "/metrics")[1].decode() for port in ports]
        counts = [
            re.findall(r'^vllm:time_to_first_token_seconds_count{model_name="m"} (\d+)$', page, re.M) for page in pages
        ]
        assert counts == [["2"]] * 3
        process.terminate()
        assert await process.ended() == 0
        assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file() and "mdc" in str(path)]


async def test_an_answer_has_the_length_that_the_request_must_say(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        worker = mocker(cluster, "one")
        worker.wait_log("Serving ")
        folder = tmp_path / "store" / "v1" / "instances"
        wait(lambda: any("generate" in path.name for path in folder.glob("*")), lambda: worker.log)
        (record,) = [path for path in folder.glob("*") if "generate" in path.name]
        members = json.loads(record.read_text())
        fields = {
            name: members[name] for name in ("namespace", "component", "endpoint", "instance_id", "transport", "mux")
        }
        client = MuxClient()
        try:
            body = {"token_ids": [1, 2, 3], "stop_conditions": {"max_tokens": 10}}
            wrong = await client.open(Instance(**fields), {"token_ids": [1]}, Context())
            with pytest.raises(Exception, match="max_tokens"):
                await read_all(wrong)
            items = await read_all(await client.open(Instance(**fields), body, Context()))
            assert [item.finish_reason for item in items][-1] == "length"
            assert sum(len(item.token_ids) for item in items) == 10
        finally:
            await client.close()
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0
