"""Prefill and decode mockers answer what one mocker alone answers, also when they are killed in any phase."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.disaggregated_mockers import Mockers, aggregated, ask_ids, requests
from support.processes import Cluster, Worker

PROMPT_TOKENS, OUTPUT_TOKENS, COUNT = 1_200, 12, 4
# A prompt takes 0.2 to 0.6 s, its blocks 0.4 s to the decode worker, a token 20 ms: each phase can be met.
SLOW = (
    "--block-size", "16", "--speedup-ratio", "0.3", "--kv-bytes-per-token", "1000000", "--kv-transfer-bandwidth", "3",
)  # fmt: skip
FAST = ("--block-size", "16", "--speedup-ratio", "20")

LOST_IN_PREFILL = r"prefill worker [0-9a-f]+ failed|prefill \S+ failed"
LOST_IN_DECODE = r"lost worker [0-9a-f]+ after [1-9]"


def computes(worker: Worker) -> bool:
    return worker.metric("vllm:num_requests_running") > 0


def is_done(count: float) -> Any:
    """Whether a worker has computed a prompt since it had computed `count` of them."""
    return lambda worker: worker.metric("vllm:time_to_first_token_seconds_count") > count


@pytest.mark.parametrize("bootstrap", [False, True], ids=["completion", "bootstrap"])
async def test_a_pair_answers_as_one_worker_does_with_and_without_its_prefill_worker(
    tmp_path: Path, bootstrap: bool
) -> None:
    with Cluster(tmp_path) as cluster:
        mockers = Mockers(cluster, 1, *FAST, bootstrap=bootstrap)
        bodies = requests(8, 300, OUTPUT_TOKENS)
        expected = await aggregated(bodies)
        await mockers.ready()
        answers = await asyncio.gather(*(ask_ids(mockers.frontend, body) for body in bodies))
        assert answers == expected
        (prefill,), (decode,) = mockers.living.values()
        assert prefill.metric("vllm:time_to_first_token_seconds_count") == len(bodies)
        mockers.kill(prefill)  # the decode worker is left to do it all
        answers = await asyncio.gather(*(ask_ids(mockers.frontend, body) for body in bodies))
        assert answers == expected
        assert decode.metric("vllm:time_to_first_token_seconds_count") == 2 * len(bodies)


@pytest.mark.parametrize("bootstrap", [False, True], ids=["completion", "bootstrap"])
async def test_two_of_each_answer_as_one_worker_does_whichever_is_killed_and_when(
    tmp_path: Path, bootstrap: bool
) -> None:
    with Cluster(tmp_path, DYN_MIGRATION_LIMIT="10") as cluster:
        mockers = Mockers(cluster, 2, *SLOW, bootstrap=bootstrap)
        bodies = requests(COUNT, PROMPT_TOKENS, OUTPUT_TOKENS)
        expected = await aggregated(bodies)
        await mockers.ready()
        frontend = mockers.frontend

        # Before the prefill: the dead worker is still listed.
        mockers.kill(mockers.living["prefill"][0])
        assert await asyncio.gather(*(ask_ids(frontend, body) for body in bodies)) == expected
        await mockers.replace("prefill")

        # In the prefill.
        bodies = requests(COUNT, PROMPT_TOKENS, OUTPUT_TOKENS, seed=1)
        expected = await aggregated(bodies)
        lost = mockers.logged(LOST_IN_PREFILL)
        running = [asyncio.ensure_future(ask_ids(frontend, body)) for body in bodies]
        mockers.kill(await mockers.busy("prefill", computes))
        assert await asyncio.gather(*running) == expected
        assert mockers.logged(LOST_IN_PREFILL) > lost, frontend.log
        await mockers.replace("prefill")

        # Between the two: a prompt is computed, and its blocks are on their way.
        bodies = requests(COUNT, PROMPT_TOKENS, OUTPUT_TOKENS, seed=2)
        expected = await aggregated(bodies)
        lost = mockers.logged(LOST_IN_PREFILL)
        done = {worker: worker.metric("vllm:time_to_first_token_seconds_count") for worker in mockers.living["prefill"]}
        running = [asyncio.ensure_future(ask_ids(frontend, body)) for body in bodies]
        mockers.kill(await mockers.busy("prefill", lambda worker: bool(is_done(done[worker])(worker))))
        assert await asyncio.gather(*running) == expected
        assert mockers.logged(LOST_IN_PREFILL) > lost, frontend.log
        await mockers.replace("prefill")

        # In the decode: each answer has begun.
        bodies = requests(COUNT, PROMPT_TOKENS, 60, seed=3)
        expected = await aggregated(bodies)
        begun = [asyncio.Event() for _ in bodies]
        running = [
            asyncio.ensure_future(ask_ids(frontend, body, event.set)) for body, event in zip(bodies, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        mockers.kill(await mockers.busy("decode", computes))
        assert await asyncio.gather(*running) == expected
        assert mockers.logged(LOST_IN_DECODE) >= 1, frontend.log
