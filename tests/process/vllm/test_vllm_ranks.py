"""One worker with two data-parallel ranks, which also goes by priority."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from support.ends import end_idle
from support.leftovers import wait_empty
from support.patience import PATIENCE_SECONDS
from support.processes import until
from support.vllm_cluster import PYTHON, WHY_NOT, VllmCluster, chunks_of, serve, tokens_of

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason=WHY_NOT),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCluster]:
    with serve(tmp_path_factory.mktemp("ranks"), "--router-mode", "kv") as cluster:
        cluster.start("a", "--data-parallel-size", "2", "--scheduling-policy", "priority", "--max-num-seqs", "1")
        cluster.wait_serving()
        yield cluster


def body(prompt: list[int], tokens: int = 2, **routing: Any) -> dict[str, Any]:
    return {
        "token_ids": prompt,
        "stop_conditions": {"max_tokens": tokens, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "routing": routing,
    }


def cached(chunks: list[dict[str, Any]]) -> int:
    found: int = chunks[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_a_rank_keeps_the_blocks_of_its_own_requests(served: VllmCluster) -> None:
    prompt = [random.Random(4).randrange(10, 800) for _ in range(200)]
    async with served.straight() as client:
        assert cached(await chunks_of(client, body(prompt, dp_rank=1))) == 0
        assert cached(await chunks_of(client, body(prompt, dp_rank=0))) == 0
        assert cached(await chunks_of(client, body(prompt, dp_rank=1))) == 192


def test_a_repeated_prompt_goes_to_the_rank_that_has_it(served: VllmCluster) -> None:
    generator = random.Random(3)
    for _ in range(6):
        text = f"Sort {' '.join(str(generator.randrange(100)) for _ in range(60))}."
        first = served.ask(text, max_tokens=2).usage
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:  # the events need a moment
            second = served.ask(text, max_tokens=2).usage
            if second.prompt_tokens_details.cached_tokens >= (first.prompt_tokens - 1) // 32 * 32:
                break
            assert time.monotonic() < deadline, f"{second} after {first}"


async def test_the_request_of_higher_priority_goes_first(served: VllmCluster) -> None:
    ended: list[str] = []
    worker = served.workers["a"]

    async with served.straight() as client:

        async def one(name: str, tokens: int, priority: int) -> None:
            await tokens_of(client, body([5, 6, 7], tokens, dp_rank=0, priority=priority))
            ended.append(name)

        first = asyncio.create_task(one("first", 1500, 9))
        await until(lambda: worker.metric("vllm:num_requests_running") == 1, lambda: "the first to run")
        low = asyncio.create_task(one("low", 2, 1))
        await until(lambda: worker.metric("vllm:num_requests_waiting") == 1, lambda: "one to wait")
        high = asyncio.create_task(one("high", 2, 5))
        await until(lambda: worker.metric("vllm:num_requests_waiting") == 2, lambda: "two to wait")
        await asyncio.gather(first, low, high)
    assert ended == ["first", "high", "low"]


def test_an_idle_worker_of_two_engine_cores_ends_within_three_seconds(served: VllmCluster) -> None:
    end_idle(served.workers.pop("a"), served.temporary)
    wait_empty(served.temporary)
