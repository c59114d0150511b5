"""Busy workers, the whole way: a real worker reports its load, the event plane carries it, the frontend declines with 529."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.http_client import COMPLETIONS, exchange
from support.processes import PATIENCE_SECONDS, Stack


def completion(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "hi", "max_tokens": 1, **more}


@pytest.mark.parametrize(
    ("limit", "delay"),
    [
        ({"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "0.02"}, "0.02"),  # of 1024 blocks of 16 tokens; the prompt needs 25
        ({"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD": "300"}, "600"),  # the first token does not come
        ({"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC": "0.15"}, "600"),  # of 2048 tokens a step
    ],
    ids=["decode blocks", "prefill tokens", "a part of the step"],
)
async def test_a_worker_that_is_full_by_its_own_report_is_shed(
    stack: Stack, name: str, limit: dict[str, str], delay: str
) -> None:
    frontend = stack.cluster.frontend(f"{name}-frontend", **limit)
    worker = stack.cluster.sample(name, name, "--delay", delay)
    stack.cluster.wait_ready(frontend, worker)
    large = completion(name, prompt="x" * 400, max_tokens=1600, stream=True)
    statuses: list[int] = []

    async def until_status(wanted: int) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not statuses or statuses[-1] != wanted:
                async with exchange(frontend.port, COMPLETIONS, completion(name)) as asked:
                    try:
                        async with asyncio.timeout(0.5):  # one that was admitted may wait for its token
                            statuses.append((await asked.reply()).status)
                    except TimeoutError:
                        statuses.append(0)
                        asked.leave()

    async with exchange(frontend.port, COMPLETIONS, large) as occupant:
        await until_status(529)
        occupant.leave()
    if delay == "0.02":
        await until_status(200)
    assert worker.metric("dynamo_component_requests_total") >= 1
