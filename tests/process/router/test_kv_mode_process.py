"""The kv router mode over real processes: a repeated prompt goes to its holder, and the holder's end costs nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.http_client import ask
from support.processes import Cluster, Frontend, Process, wait

EXPLAIN = {"x-dynamo-explain-routing": "1"}


async def complete(frontend: Frontend, text: str) -> dict[str, Any]:
    body = {"model": "m", "prompt": text, "max_tokens": 4}
    reply = await ask(frontend.port, "/v1/completions", json.dumps(body).encode(), headers=EXPLAIN)
    assert reply.status == 200, reply
    found: dict[str, Any] = reply.json()
    return found


def placed(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["nvext"]["routing"]["decode"]
    return found


async def test_a_repeated_prompt_goes_to_its_holder_and_the_others_serve_when_that_is_gone(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend", "--router-mode", "kv", "--router-policy", "default")
        holder = mocker(cluster, "one")
        frontend.wait_ready()
        wait(lambda: known(frontend) == 1, lambda: frontend.log)
        text = "a prompt of more than a few blocks. " * 20
        first = placed(await complete(frontend, text))
        mocker(cluster, "two")
        wait(lambda: known(frontend) == 2, lambda: frontend.log)
        for _ in range(4):
            last = placed(await complete(frontend, text))
            assert (last["trust"], last["worker_id"]) == ("exact", first["worker_id"])
            assert last["candidates"][0]["cached_blocks"]["device"] == last["prompt_blocks"] > 30
            assert [each["cached_blocks"]["device"] for each in last["candidates"][1:]] == [0]
        holder.kill()
        assert placed(await complete(frontend, text))["worker_id"] != first["worker_id"]


def known(frontend: Frontend) -> int:
    status, body = frontend.get("/v1/models/m/ready")
    if status != 200:
        return 0
    namespaces = json.loads(body)["namespaces"].values()
    return sum(role["workers"] for namespace in namespaces for role in namespace["worker_types"].values())


def mocker(cluster: Cluster, name: str) -> Process:
    flags = ["--block-size", "16", "--speedup-ratio", "50"]
    argv = [sys.executable, "-m", "dynamo.mocker", "--discovery-backend", "file", "--model-path", "m", *flags]
    return cluster.process(name, argv)
