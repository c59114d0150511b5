"""vLLM's route of tokens: tokens in, tokens out, in its own shapes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.errors import Unknown
from dynamo.frontend.parts.token_routes.part import GenerateAnswer
from dynamo.protocol.model_types import ModelInput
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.access import bearer, closed_cluster, key
from support.asgi_client import Exchange
from support.frontend_cluster import Cluster, cluster, fail, say

PATH = "/inference/v1/generate"
CAPABLE = ModelRuntimeConfig(runtime_data={"vllm_inference_v1_generate": True}, context_length=64)
FLAT = "Failed to deserialize the JSON body into the target type: "


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setenv("DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE", "1")
    async with cluster(tmp_path, migration_limit=0) as found:
        yield found


def body(**more: Any) -> dict[str, Any]:
    return {"token_ids": [104, 105], "sampling_params": {"max_tokens": 8}, **more}


async def ask(house: Cluster, given: Mapping[str, Any], **headers: str) -> Exchange:
    return await house.client.call(
        "POST", PATH, given, headers={name.replace("_", "-"): v for name, v in headers.items()}
    )


def events(answer: Exchange) -> list[dict[str, Any]]:
    *found, last = answer.body.decode().split("\n\n")[:-1]
    assert last == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in found]


async def test_tokens_come_back_and_the_worker_gets_what_both_systems_write(house: Cluster) -> None:
    worker = await house.worker(say([7, 8], [9], finish="length"), runtime_config=CAPABLE)
    sampling = {
        "max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "seed": 4, "stop_token_ids": [99], "stop": ["x"],
        "skip_reading_prefix_cache": True, "new_in_vllm": {"a": 1},
    }  # fmt: skip
    given = body(
        sampling_params=sampling, priority=2, cache_salt="s", request_id="mine", kv_transfer_params={"b": 2},
        features={"mm_hashes": {}}, nvext={"generation_artifact": {"contents": ["moe_routes"]}},
    )  # fmt: skip
    answer = await ask(house, given)
    assert answer.json == {
        "request_id": "mine",
        "choices": [
            {
                "index": 0, "token_ids": [7, 8, 9], "logprobs": None, "finish_reason": "length", "routed_experts": None,
                "sampling_mask": None,
            }
        ],
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }  # fmt: skip
    (got,) = worker.requests
    stops, extra = got["stop_conditions"], got["extra_args"]
    assert (list(got["token_ids"]), got["model"], list(got["eos_token_ids"])) == ([104, 105], "m", [])
    assert (stops["max_tokens"], stops["min_tokens"]) == (3, 1)
    assert stops["stop_token_ids_hidden"][0] == 99
    assert (got["sampling_options"]["n"], got["sampling_options"]["temperature"], got["sampling_options"]["seed"]) == (
        1,
        0.5,
        4,
    )
    assert got["routing"] == {"priority": -2, "priority_jump": 0.0, "expected_output_tokens": 3, "cache_salt": "s"}
    assert extra["kv_transfer_params"] == {"b": 2}
    assert extra["vllm_tito"] == {
        "request_id": "mine", "sampling_params": sampling, "model": "m", "stream": False, "cache_salt": "s", "priority": 2,
        "kv_transfer_params": {"b": 2}, "features": {"mm_hashes": {}}, "nvext": given["nvext"],
    }  # fmt: skip
    unary = {"model": "m", "endpoint": "generate", "request_type": "unary"}
    assert house.metric("dynamo_frontend_requests_total", **unary, status="success") == 1


async def test_a_request_has_one_name(house: Cluster) -> None:
    await house.worker(say([7]), runtime_config=CAPABLE)
    assert (await ask(house, body(request_id="a"), x_request_id="b")).json["request_id"] == "b"
    assert (await ask(house, body(request_id=""))).json["request_id"] == ""
    made = [(await ask(house, body())).json["request_id"] for _ in range(2)]
    assert made[0] != made[1]
    assert {len(name) for name in made} == {36}


async def test_log_probabilities_and_what_the_engine_adds_are_shown(house: Cluster) -> None:
    def top(*pairs: tuple[int, float]) -> list[dict[str, Any]]:
        return [{"rank": rank, "token_id": t, "token": "t", "logprob": lp} for rank, (t, lp) in enumerate(pairs, 1)]

    async def script(request: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([7], extra={"log_probs": [-0.5], "top_logprobs": [top((7, -0.5), (8, float("-inf")))]})
        last = {
            "log_probs": [-20000.0],
            "engine_data": {
                "prompt_logprobs": [None, {"105": {"logprob": -1.0}}], "routed_experts": "AAE=", "sampling_mask": "mask",
                "kv_transfer_params": {"block": 1},
            },
        }  # fmt: skip
        sink.send_tokens([9], finish_reason="stop", extra=last)

    await house.worker(script, runtime_config=CAPABLE)
    answer = await ask(house, body(sampling_params={"logprobs": 2, "prompt_logprobs": 0}))
    msgspec.json.decode(answer.body, type=GenerateAnswer)
    (choice,) = answer.json["choices"]
    first, second = choice["logprobs"]["content"]
    own = {"token": "token_id:7", "logprob": -0.5, "bytes": list(b"token_id:7")}
    assert first == {
        **own,
        "top_logprobs": [own, {"token": "token_id:8", "logprob": -9999.0, "bytes": list(b"token_id:8")}],
    }
    assert (second["token"], second["logprob"]) == ("token_id:9", -9999.0)
    assert (choice["routed_experts"], choice["sampling_mask"]) == ("AAE=", "mask")
    assert answer.json["prompt_logprobs"] == [None, {"105": {"logprob": -1.0}}]
    assert answer.json["kv_transfer_params"] == {"block": 1}


async def test_log_probabilities_that_an_engine_does_not_give_are_its_fault(house: Cluster) -> None:
    await house.worker(say([7]), runtime_config=CAPABLE)
    for sampling in ({"logprobs": 0}, {"prompt_logprobs": 1}):
        answer = await ask(house, body(sampling_params=sampling))
        assert (answer.status, answer.json) == (
            500, {"error": {"message": "internal server error", "type": "internal_error", "code": 500}},
        )  # fmt: skip
    labels = {
        "model": "m",
        "endpoint": "generate",
        "request_type": "unary",
        "status": "error",
        "error_type": "internal",
    }
    assert house.metric("dynamo_frontend_requests_total", **labels) == 2


async def test_a_stream_has_tokens_in_each_event_and_usage_where_it_is_wanted(house: Cluster) -> None:
    await house.worker(say([7, 8], [], [9]), runtime_config=CAPABLE)
    *pieces, last = events(await ask(house, body(stream=True, request_id="r", stream_options={"include_usage": True})))
    assert [token for piece in pieces for token in piece["choices"][0]["token_ids"]] == [7, 8, 9]
    assert all(piece["choices"][0]["token_ids"] for piece in pieces)
    assert [piece["choices"][0]["finish_reason"] for piece in pieces][-1] == "stop"
    assert pieces[0].keys() == {"request_id", "choices"}
    assert pieces[0]["choices"][0].keys() == {"index", "logprobs", "finish_reason", "token_ids"}
    assert (last["choices"], last["usage"]["completion_tokens"], last["request_id"]) == ([], 3, "r")
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(await ask(house, body(stream=True, stream_options=options)))
    assert all("usage" in event for event in found)


async def test_several_choices_differ_by_their_seeds(house: Cluster) -> None:
    worker = await house.worker(say([7]), runtime_config=CAPABLE)
    answer = await ask(house, body(sampling_params={"n": 2, "seed": 5, "temperature": 1.0}))
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1]
    seeds = [each["extra_args"]["vllm_tito"]["sampling_params"] for each in worker.requests]
    assert sorted((each["seed"], each["n"]) for each in seeds) == [(5, 1), (6, 1)]
    assert sorted(each["sampling_options"]["seed"] for each in worker.requests) == [5, 6]
    assert len((await ask(house, body(sampling_params={"n": 0}))).json["choices"]) == 1


async def test_refusals_have_the_words_of_the_native_route(house: Cluster) -> None:
    worker = await house.worker(say([7]), runtime_config=CAPABLE)
    bad = "invalid_request_error"
    for given, text in (
        (body(token_ids=[]), "token_ids must contain at least one token ID."),
        (body(sampling_params={"max_tokens": 0}), "sampling_params.max_tokens must be greater than 0."),
        (
            body(sampling_params={"max_tokens": 2, "min_tokens": 3}),
            "sampling_params.min_tokens (3) exceeds max_tokens (2).",
        ),
        (body(sampling_params={"prompt_logprobs": -2}), "sampling_params.prompt_logprobs must be non-negative or -1."),
        (body(stream_options={}), "stream_options are only supported when stream=true."),
        (body(sampling_params={"temperature": -1}), "Temperature must be between 0 and 2, got -1"),
        (body(sampling_params={"top_p": 2}), "Top_p must be between 0 and 1, got 2"),
    ):
        answer = await ask(house, given)
        assert (answer.status, answer.json) == (400, {"error": {"message": text, "type": bad, "code": 400}})
    # a member is missing
    sent = b'{"sampling_params":{}}'
    answer = await house.client.call("POST", PATH, sent)
    text = f"{FLAT}missing field `token_ids` at line 1 column {len(sent)}"
    assert (answer.status, answer.json) == (400, {"message": text, "type": "Bad Request", "code": 400})
    # a member has another type
    answer = await ask(house, body(token_ids=["a"]))
    assert (answer.status, answer.json["type"]) == (400, "Bad Request")
    assert answer.json["message"].startswith(f"{FLAT}token_ids[")
    # no JSON
    answer = await house.client.call("POST", PATH, b"tokens")
    assert (answer.status, answer.headers["content-type"]) == (400, "text/plain; charset=utf-8")
    assert answer.body.startswith(b"Failed to parse the request body as JSON: ")
    # a rank without the kv mode
    answer = await ask(house, body(), x_data_parallel_rank="0")
    assert (answer.status, answer.json["error"]["message"]) == (400, "Invalid request")
    assert worker.requests == []


async def test_only_models_whose_workers_declare_the_route_have_it(house: Cluster) -> None:
    nothing = await ask(house, body())
    assert (nothing.status, nothing.json["error"]["message"]) == (404, "no generate-capable model is registered")
    await house.worker(say([1]), model="other")
    await house.worker(say([1]), model="texts", runtime_config=CAPABLE, model_input=ModelInput.Text)
    assert (await ask(house, body())).status == 404
    for name in ("other", "texts", "none"):
        refused = await ask(house, body(model=name))
        assert (refused.status, refused.json) == (
            404, {"error": {"message": f"Model not found: {name}", "type": "not_found", "code": 404}},
        )  # fmt: skip
    await house.worker(say([7]), runtime_config=CAPABLE)
    assert (await ask(house, body())).json["choices"][0]["token_ids"] == [7]
    await house.worker(say([8]), model="second", runtime_config=CAPABLE)
    both = await ask(house, body())
    text = "multiple models are registered; specify `model` in the request"
    assert (both.status, both.json["error"]["message"]) == (400, text)
    assert (await ask(house, body(model="second"))).json["choices"][0]["token_ids"] == [8]


async def test_a_failure_is_an_answer_or_the_end_of_a_stream(house: Cluster) -> None:
    await house.worker(fail(Unknown("broken"), after=("a",)), runtime_config=CAPABLE)
    assert (await ask(house, body())).json["error"]["type"] == "internal_error"
    cut = events(await ask(house, body(stream=True)))
    assert cut[-1] == {"error": {"message": "internal server error", "type": "internal_error", "code": 500}}


async def test_the_route_is_off_unless_it_is_switched_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path) as house:
        assert (await ask(house, body())).json["message"] == f"Route not found: POST {PATH}"
    monkeypatch.setenv("DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE", "true")
    monkeypatch.setenv("DYN_HTTP_SVC_VLLM_GENERATE_PATH", "/tokens")
    async with cluster(tmp_path) as house:
        await house.worker(say([7]), runtime_config=CAPABLE)
        assert (await house.client.call("POST", "/tokens", body())).status == 200
        for method in ("GET", "PUT"):
            assert (await house.client.call(method, "/tokens", body())).status == 405
        document = (await house.client.call("GET", "/openapi.json")).json
        assert "token_ids" in document["components"]["schemas"]["VllmGenerateRequest"]["properties"]
        assert list(document["paths"]["/tokens"]) == ["post"]


async def test_a_key_has_the_route_of_its_models_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE", "1")
    async with closed_cluster(tmp_path, key("a", models=["m"]), key("b", models=["n"])) as house:
        await house.worker(say([7]), runtime_config=CAPABLE)
        one, other = [await house.client.call("POST", PATH, body(), headers=bearer(name)) for name in ("a", "b")]
        assert (one.status, other.status) == (200, 404)
        assert (await house.client.call("POST", PATH, body())).status == 401
