"""One model served by workers of both systems at once, behind a frontend of each; and the mocker, whose engine is Rust."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from support.interop_cluster import IN_RUST, PYTHONS, Cluster, interop_cluster, services
from support.interop_engine import SENTENCE
from support.native_frontend import (
    NATIVE_PYTHON,
    Frontend,
    environment,
    frontend_process,
    process,
    why_not,
)
from support.patience import PATIENCE_SECONDS
from support.tiny_model import write_tiny_model

REASON = why_not()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(240),
]

REQUESTS, STREAMS = 2000, 64
LEAST_SHARE = 0.15  # of all requests, for each of four workers


async def flood(cluster: Cluster) -> list[str]:
    """What was wrong with each of `REQUESTS` answers, `STREAMS` at a time; half of them streamed."""
    numbers = iter(range(REQUESTS))
    wrong: list[str] = []

    async def one_stream() -> None:
        for number in numbers:
            streamed = number % 2 == 0
            reply = await cluster.chat(stream=streamed)
            if reply.status != 200:
                wrong.append(f"{reply.status}: {reply.body!r}")
                continue
            if streamed:
                text = "".join(event["choices"][0]["delta"].get("content") or "" for event in reply.events())
            else:
                text = reply.json()["choices"][0]["message"]["content"]
            if text != SENTENCE:
                wrong.append(text)

    await asyncio.gather(*(one_stream() for _ in range(STREAMS)))
    return wrong


@pytest.mark.parametrize(
    ("plane", "discovery", "events"),
    [("tcp", "file", "zmq"), ("nats", "file", "zmq"), ("tcp", "etcd", "nats"), ("nats", "etcd", "nats")],
)
@pytest.mark.parametrize("frontend", ["ours", "native"])
async def test_four_workers_of_two_systems_share_the_load_without_an_error(
    frontend: str, plane: str, discovery: str, events: str, tmp_path: Path
) -> None:
    workers = ["native", "ours", "native", "ours"]
    async with interop_cluster(
        tmp_path, frontend=frontend, workers=workers, plane=plane, discovery=discovery, events=events
    ) as cluster:
        await every_worker_is_known(cluster)
        assert await flood(cluster) == []
        served = {f"{number} {worker.system}": worker.served() for number, worker in enumerate(cluster.workers)}
        print(f"frontend {frontend}, {plane}, {discovery}, {events}: {served}")
        assert min(served.values()) >= LEAST_SHARE * REQUESTS, served
        assert "abort" not in {line for worker in cluster.workers for line in worker.lines()}


@IN_RUST
@pytest.mark.parametrize("discovery", ["file", "etcd"])
@pytest.mark.parametrize("frontend", ["ours", "native"])
async def test_workers_in_rust_share_the_load_with_those_of_both_systems(
    frontend: str, discovery: str, tmp_path: Path
) -> None:
    workers = ["native", "ours", "rust", "rust"]
    async with interop_cluster(tmp_path, frontend=frontend, workers=workers, discovery=discovery) as cluster:
        await every_worker_is_known(cluster)
        assert await flood(cluster) == []
        served = {f"{number} {worker.system}": worker.served() for number, worker in enumerate(cluster.workers)}
        print(f"frontend {frontend}, {discovery}: {served}")
        assert min(served.values()) >= LEAST_SHARE * REQUESTS, served
        assert "abort" not in {line for worker in cluster.workers for line in worker.lines()}


async def every_worker_is_known(cluster: Cluster) -> None:
    """Return once each worker has answered something, with the journals cleared."""
    give_up = time.monotonic() + PATIENCE_SECONDS  # not after so many requests: a busy machine registers slowly
    while not all(worker.served() for worker in cluster.workers) and time.monotonic() < give_up:
        await cluster.chat()
    for worker in cluster.workers:
        assert worker.served(), f"{worker.system} worker serves nothing"
        worker.forget()


PROGRAMS = {
    "mocker": ["-m", "dynamo.mocker", "--model-name", "mock", "--speedup-ratio", "10", "--model-path"],
    "sample": ["-m", "dynamo.common.backend.sample_main", "--max-tokens", "64", "--delay", "0", "--model-name"],
}


@pytest.mark.parametrize(("plane", "discovery"), [("tcp", "file"), ("nats", "etcd")])
@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_workers_that_come_with_1_6_answer_through_our_frontend(
    program: str, plane: str, discovery: str, tmp_path: Path
) -> None:
    model_dir = write_tiny_model(tmp_path / "model")
    options = ["--discovery-backend", discovery, "--request-plane", plane]
    argv = [NATIVE_PYTHON, *PROGRAMS[program], str(model_dir), *options]
    with services(tmp_path, plane=plane, discovery=discovery) as found:
        env = environment(tmp_path, tmp_path / "store", **found)
        async with (
            frontend_process(PYTHONS["ours"], tmp_path, env, *options) as frontend,
            process(argv, tmp_path / f"{program}.log", env),
        ):
            await frontend.model_appears()
            await answers_well(frontend)


async def answers_well(frontend: Frontend) -> None:
    (model,) = (await frontend.ask("/v1/models")).json()["data"]
    body = {"model": model["id"], "prompt": "count", "max_tokens": 20, "ignore_eos": True}
    reply = await frontend.ask_when_ready("/v1/completions", body)
    assert reply.status == 200, reply.body
    assert reply.json()["usage"]["completion_tokens"] == 20
    assert reply.json()["choices"][0]["finish_reason"] == "length"
    streamed = await frontend.ask("/v1/completions", {**body, "stream": True})
    assert [e["choices"][0]["finish_reason"] for e in streamed.events() if e["choices"][0]["finish_reason"]] == [
        "length"
    ]
    too_long = await frontend.ask("/v1/completions", {**body, "prompt": [5] * 3000})
    assert too_long.status == 400, too_long.body
