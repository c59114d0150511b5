"""The routes of tokens over the reference engine, as processes: what comes back is what the engine draws."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from support.http_client import COMPLETIONS, DONE, Reply, ask, exchange
from support.processes import Cluster, Frontend, Worker, get, until

MODEL = "spoken"
GENERATE = "/inference/v1/generate"
IDS = [10, 11, 12]


class Served:
    """One worker, and a frontend with the routes."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.worker: Worker = cluster.reference("worker", MODEL, directory, "--kv-cache-mb", "8", "--enable-rl")
        routes = {"DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1", "DYN_SGLANG_ENABLE_GENERATE": "1"}
        self.frontend: Frontend = cluster.frontend("frontend", **routes, DYN_ENABLE_RL="1", DYN_RL_PORT="0")
        cluster.wait_ready(self.frontend, self.worker)

    async def generate(self, ids: list[int] = IDS, **sampling: Any) -> Reply:
        return await ask(self.frontend.port, GENERATE, {"token_ids": ids, "sampling_params": sampling})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, speaking_model: Path) -> Iterator[Served]:
    with Cluster(tmp_path_factory.mktemp("served")) as cluster:
        yield Served(cluster, speaking_model)


async def test_tokens_in_give_the_tokens_of_the_same_completion(served: Served) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
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


async def test_the_same_tokens_in_the_shapes_of_sglang(served: Served) -> None:
    (choice,) = (await served.generate(max_tokens=6, temperature=1.0, seed=3, logprobs=0)).json()["choices"]
    sampling = {"max_new_tokens": 6, "temperature": 1.0, "sampling_seed": 3}
    asked = {"input_ids": IDS, "sampling_params": sampling, "stream": True, "return_logprob": True, "rid": "mine"}
    objects: list[dict[str, Any]] = []
    async with exchange(served.frontend.port, "/generate", asked) as one:
        while (event := await one.event()) != DONE:
            objects.append(event)
    last = objects[-1]
    assert last["output_ids"] == choice["token_ids"]
    assert [len(each["output_ids"]) for each in objects] == sorted(len(each["output_ids"]) for each in objects)
    meta = last["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", len(IDS), 6)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    scores = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert [(score, token) for score, token, _ in meta["output_token_logprobs"]] == list(
        zip(scores, choice["token_ids"], strict=True)
    )
    refused = await ask(served.frontend.port, "/generate", {**asked, "sampling_params": {"regex": "a"}})
    assert (refused.status, "sampling_params.regex" in refused.json()["error"]["message"]) == (400, True)


async def test_a_trainer_finds_the_worker_pauses_it_and_gives_it_new_weights(
    served: Served, speaking_model: Path, tmp_path: Path
) -> None:
    port = int(
        served.frontend.wait_log(r"RL worker discovery listener started on http://127.0.0.1:(\d+)/v1/rl/workers")[1]
    )
    status, body = get(port, "/v1/rl/workers")
    listed = json.loads(body)
    (worker,) = listed["workers"]
    assert (status, listed["protocol_version"], worker["endpoint"]) == (200, 1, "rl")
    assert worker["request_plane_url"] == f"dyn://{worker['namespace']}.{worker['component']}.rl"
    assert worker["system_url"] == f"http://127.0.0.1:{served.worker.system_port}"
    assert {"/engine/control/pause_generation", "/engine/update/update_weights_from_disk"} <= set(worker["routes"])
    assert get(port, "/v1/rl/workers", method="POST")[0] == 405
    assert get(port, "/v1/models") == (404, b"")
    assert get(served.frontend.port, "/v1/rl/workers")[0] == 404

    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    before = (await served.generate(**asked)).json()["choices"][0]["token_ids"]
    other = tmp_path / "other"
    shutil.copytree(speaking_model, other)
    tensors = {name: value[::-1].copy() for name, value in load_file(other / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors")
    for route, given in (
        ("control/pause_generation", {}),
        ("update/update_weights_from_disk", {"model_path": str(other)}),
        ("control/resume_generation", {}),
    ):
        answer = await ask(served.worker.system_port, f"/engine/{route}", given)
        assert (answer.status, answer.json().get("status")) == (200, "ok"), answer.json()
    await until(lambda: served.frontend.workers(MODEL) == 1)
    after = (await served.generate(**asked)).json()["choices"][0]["token_ids"]
    assert after != before
    await ask(served.worker.system_port, "/engine/update/update_weights_from_disk", {"model_path": str(speaking_model)})
    assert (await served.generate(**asked)).json()["choices"][0]["token_ids"] == before
