"""The routes of tokens over the reference engine, as processes: what comes back is what the engine draws."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.http_client import COMPLETIONS, Reply, ask, exchange
from support.processes import Cluster, Frontend, Worker, until

MODEL = "spoken"
GENERATE = "/inference/v1/generate"
IDS = [10, 11, 12]


class Served:
    """One worker, and a frontend with the routes."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.worker: Worker = cluster.reference("worker", MODEL, directory, "--kv-cache-mb", "8")
        self.frontend: Frontend = cluster.frontend("frontend", DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE="1")
        cluster.wait_ready(self.frontend, self.worker)

    async def generate(self, ids: list[int] = IDS, **sampling: Any) -> Reply:
        return await ask(self.frontend.port, GENERATE, {"token_ids": ids, "sampling_params": sampling})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, speaking_model: Path) -> Iterator[Served]:
    with Cluster(tmp_path_factory.mktemp("served")) as cluster:
        yield Served(cluster, speaking_model)


async def test_tokens_in_give_the_tokens_of_the_same_completion(served: Served) -> None:
    asked = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    extra = {"nvext": {"extra_fields": ["completion_token_ids"]}, "logprobs": 1}
    text = await ask(served.frontend.port, COMPLETIONS, {"model": MODEL, "prompt": IDS, **asked, **extra})
    found = (await served.generate(**asked, logprobs=1, prompt_logprobs=0)).json()
    (choice,) = found["choices"]
    assert choice["token_ids"] == text.json()["nvext"]["completion_token_ids"]
    shown = choice["logprobs"]["content"]
    assert [entry["token"] for entry in shown] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert [entry["logprob"] for entry in shown] == text.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert all(len(entry["top_logprobs"]) == 1 for entry in shown)
    assert len(found["prompt_logprobs"]) == len(IDS)
    (again,) = (await served.generate(**asked)).json()["choices"]
    assert again["token_ids"] == choice["token_ids"]
    stop = choice["token_ids"][3]
    (cut,) = (await served.generate(**asked, stop_token_ids=[stop], ignore_eos=True)).json()["choices"]
    assert (cut["token_ids"], cut["finish_reason"]) == (choice["token_ids"][: len(cut["token_ids"])], "stop")
    assert cut["token_ids"][-1] == stop


async def test_what_the_engine_does_not_have_is_named(served: Served) -> None:
    for sampling, text in (
        ({"skip_reading_prefix_cache": True}, "sampling_params.skip_reading_prefix_cache is not supported"),
        ({"vllm_xargs": {"a": 1}}, "sampling_params.vllm_xargs is not supported"),
    ):
        refused = await served.generate(**sampling)
        assert (refused.status, text in refused.json()["error"]["message"]) == (400, True)
    unknown = await served.generate([1 << 30])
    assert (unknown.status, "token_ids holds the token id" in unknown.json()["error"]["message"]) == (400, True)
    assert (await served.generate([1] * 100_000)).status == 400  # the engine's own limit: no other is checked


async def test_a_client_that_leaves_ends_the_work(served: Served) -> None:
    sampling = {"max_tokens": 100_000, "ignore_eos": True, "temperature": 1.0}
    body = {"token_ids": IDS, "sampling_params": sampling, "stream": True}
    async with exchange(served.frontend.port, GENERATE, body) as one:
        assert (await one.event())["choices"][0]["token_ids"]
        assert served.worker.metric("dynamo_component_inflight_requests") == 1
        one.leave(politely=True)
    await until(lambda: served.worker.metric("dynamo_component_inflight_requests") == 0)
    assert (await served.generate(max_tokens=1)).status == 200
