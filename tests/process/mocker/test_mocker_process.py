"""`python -m dynamo.mocker` behind a frontend: answers, KV events of two workers, disaggregation, and their end."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dynamo.kv.events import BlockUpdate, RouterEvent
from dynamo.router import KvEventFeed
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from support.http_client import CHAT, ask
from support.patience import PATIENCE_SECONDS
from support.ports import free_ports
from support.processes import Cluster, Frontend, Process, until, wait


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as made:
        yield made


def mocker(cluster: Cluster, name: str, *flags: str) -> Process:
    argv = [sys.executable, "-m", "dynamo.mocker", "--discovery-backend", "file", "--model-path", "m", *flags]
    return cluster.process(name, argv)


def serving(frontend: Frontend, model: str, workers: int) -> None:
    frontend.wait_ready()
    wait(lambda: known(frontend, model) == workers, lambda: f"{workers} workers; log:\n{frontend.log}")


def known(frontend: Frontend, model: str) -> int:
    status, body = frontend.get(f"/v1/models/{model}/ready")
    if status != 200:
        return 0
    namespaces = json.loads(body)["namespaces"].values()
    return sum(role["workers"] for namespace in namespaces for role in namespace["worker_types"].values())


class Held:
    """The blocks that each worker holds, as a router learns it."""

    def __init__(self) -> None:
        self.blocks: dict[int, set[int]] = {}

    def apply(self, event: RouterEvent) -> None:
        held = self.blocks.setdefault(event.worker_id, set())
        change = event.event.data
        assert isinstance(change, BlockUpdate)
        if change.stored is not None:
            held.update(block.block_hash for block in change.stored.blocks)
        if change.removed is not None:
            held.difference_update(change.removed.block_hashes)

    def forget(self, worker_id: int, dp_rank: int) -> None:
        self.blocks[worker_id] = set()


async def chat(frontend: Frontend, text: str, tokens: int = 8, seed: int | None = None) -> Any:
    body = {"model": "m", "max_tokens": tokens, "seed": seed, "messages": [{"role": "user", "content": text}]}
    reply = await ask(frontend.port, CHAT, json.dumps(body).encode())
    assert reply.status == 200, reply.body
    return reply.json()


@pytest.mark.parametrize("over_zmq", [False, True])
async def test_two_workers_of_one_process_answer_and_publish_their_blocks(
    cluster: Cluster, tmp_path: Path, over_zmq: bool
) -> None:
    flags = ["--num-workers", "2", "--block-size", "16", "--speedup-ratio", "20"]
    if over_zmq:
        flags += ["--zmq-kv-events-ports", ",".join(map(str, free_ports(2)))]
    frontend, workers = cluster.frontend("frontend"), mocker(cluster, "mocker", *flags)
    serving(frontend, "m", 2)
    held = Held()
    store = FileDiscovery(tmp_path / "store")
    async with (
        DistributedRuntime(None, None, "tcp", discovery=store) as runtime,
        KvEventFeed(runtime.endpoint("dynamo.backend.generate"), held),
    ):
        await until(lambda: len(held.blocks) == 2)
        answers = [await chat(frontend, "x" * 200), await chat(frontend, "x" * 200), await chat(frontend, "x" * 200)]
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [8, 8, 8]
        assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["length"] * 3
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached[0] == cached[1] == 0  # in turn, so the third finds the first one's blocks
        assert cached[2] >= 192
        await until(lambda: all(len(blocks) >= 12 for blocks in held.blocks.values()), lambda: str(held.blocks))
        first, second = held.blocks.values()
        assert len(first & second) >= 12
    workers.terminate()
    assert workers.exit_code() == 0, workers.log
    assert workers.log.count("Engine cleanup complete") == 2


async def test_a_kv_router_sends_a_prompt_to_the_worker_that_holds_it(cluster: Cluster) -> None:
    frontend = cluster.frontend("frontend", "--router-mode", "kv")
    mocker(cluster, "mocker", "--num-workers", "4", "--block-size", "16", "--speedup-ratio", "20")
    serving(frontend, "m", 4)

    async def cached() -> int:
        answer = await chat(frontend, "x" * 400)
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert await cached() == 0
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await cached() < 400:  # until the frontend has received what the first worker announces
            pass
    assert min([await cached() for _ in range(8)]) >= 400


async def test_an_answer_is_the_same_when_its_worker_dies_in_the_middle(cluster: Cluster) -> None:
    frontend = cluster.frontend("frontend")
    first, second = mocker(cluster, "first"), mocker(cluster, "second")
    serving(frontend, "m", 2)
    expected = await asyncio.gather(*(chat(frontend, "hello", 30, number) for number in range(6)))
    running = [asyncio.create_task(chat(frontend, "hello", 30, number)) for number in range(6)]
    await until(lambda: in_flight(frontend) == 6, lambda: frontend.log)
    first.kill()
    answers = await asyncio.gather(*running)
    assert [answer["choices"] for answer in answers] == [answer["choices"] for answer in expected]
    assert not second.has_ended


def in_flight(frontend: Frontend) -> int:
    """How many requests of the frontend have their first token."""
    _, body = frontend.get("/metrics")
    found = re.search(rb'^dynamo_frontend_active_requests\{model="m"\} (\d+)', body, re.MULTILINE)
    return int(found[1]) if found is not None else 0


def test_a_worker_that_cannot_start_ends_the_process(cluster: Cluster) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        workers = mocker(cluster, "mocker", "--num-workers", "2", "--zmq-kv-events-ports", f"{free_ports(1)[0]},{port}")
        assert workers.exit_code() == 1
    assert workers.log.splitlines()[-1].startswith("CannotConnect: KV events of rank 0")
