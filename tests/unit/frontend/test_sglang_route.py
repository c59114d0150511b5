"""SGLang's route of tokens: the objects of the engine reach the client as they are."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.asgi_client import Exchange
from support.frontend_cluster import Cluster, cluster, say

CAPABLE = ModelRuntimeConfig(runtime_data={"sglang_generate": True}, context_length=64)
FLAT = "Failed to deserialize the JSON body into the target type: "


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setenv("DYN_SGLANG_ENABLE_GENERATE", "1")
    async with cluster(tmp_path, migration_limit=0) as found:
        yield found


def body(**more: Any) -> dict[str, Any]:
    return {"input_ids": [104, 105], "stream": True, **more}


async def ask(house: Cluster, given: Any, method: str = "POST", **headers: str) -> Exchange:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await house.client.call(method, "/generate", given, headers=named)


def data(answer: Exchange) -> list[str]:
    return [event.removeprefix("data: ") for event in answer.body.decode().split("\n\n")[:-1]]


def shown(*ids: int, cached: int = 0) -> dict[str, Any]:
    return {"text": "", "output_ids": list(ids), "meta_info": {"completion_tokens": len(ids), "cached_tokens": cached}}


async def natively(request: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    sink.send_tokens([], extra={"engine_data": {"sglang_response": shown(7)}})
    sink.send_tokens([], finish_reason="stop", extra={"engine_data": {"sglang_response": shown(7, 8, cached=1)}})


async def test_each_object_is_an_event_and_the_worker_gets_what_both_systems_write(house: Cluster) -> None:
    worker = await house.worker(natively, runtime_config=CAPABLE)
    sampling = {"max_new_tokens": 3, "min_new_tokens": 1, "ignore_eos": True, "custom": {"a": 1}}
    given = body(sampling_params=sampling, rid="mine", priority=4, return_text_in_logprobs=True, model="ignored")
    for method in ("POST", "PUT"):
        answer = await ask(house, given, method)
        assert answer.headers["content-type"] == "text/event-stream"
        assert [json.loads(each) for each in data(answer)[:-1]] == [shown(7), shown(7, 8, cached=1)]
        assert data(answer)[-1] == "[DONE]"
    got = worker.requests[0]
    assert (list(got["token_ids"]), got["model"]) == ([104, 105], "m")
    stops = got["stop_conditions"]
    assert (stops["max_tokens"], stops["min_tokens"], stops["ignore_eos"]) == (3, 1, True)
    assert got["output_options"]["return_tokens_as_token_ids"] is True
    assert got["routing"] == {"expected_output_tokens": 3, "priority": 4, "priority_jump": 4.0}
    assert got["extra_args"]["sglang_tito"] == {
        "sampling_params": sampling, "rid": "mine", "priority": 4, "stream": True, "return_text_in_logprobs": True,
        "model": "ignored",
    }  # fmt: skip
    streamed = {"model": "m", "endpoint": "generate", "request_type": "stream"}
    assert house.metric("dynamo_frontend_requests_total", **streamed, status="success") == 2
    await ask(house, body(), x_request_id="header")
    envelope = worker.requests[-1]["extra_args"]["sglang_tito"]
    assert (envelope["rid"], envelope["sampling_params"]) == ("header", None)


async def test_refusals_come_in_the_order_and_the_words_of_the_native_route(house: Cluster) -> None:
    nothing = await ask(house, body())
    assert (nothing.status, nothing.json["error"]["message"]) == (404, "no generate-capable model is registered")
    worker = await house.worker(natively, runtime_config=CAPABLE)
    for given, text in (
        ({"input_ids": []}, "input_ids cannot be empty."),
        (
            body(sampling_params={"n": 2, "max_new_tokens": -1}),
            "sampling_params.n must be 1; parallel sampling is not supported.",
        ),
        (
            body(sampling_params={"max_new_tokens": -1}, bootstrap_room=1),
            "sampling_params.max_new_tokens: invalid value: integer `-1`, expected u32",
        ),
        (
            {"input_ids": [1], "bootstrap_room": 1},
            "`bootstrap_room` is internal Dynamo routing state and cannot be set by clients",
        ),
        (b'{"stream":true}', f"{FLAT}missing field `input_ids` at line 1 column 15"),
    ):
        answer = await ask(house, given)
        error: dict[str, Any] = {"error": {"message": text}}
        if isinstance(given, bytes):
            error = {"object": "error", "message": text, "type": "Bad Request", "param": None, "code": 400}
        assert (answer.status, answer.json) == (400, error)
    for given in (b"tokens", body(input_ids=[[1]])):
        answer = await ask(house, given)
        assert (answer.status, answer.json["message"].startswith(FLAT)) == (400, True)
    unary = await ask(house, body(stream=False))
    text = "non-streaming SGLang generate requests are not implemented; set stream=true"
    assert (unary.status, unary.json) == (501, {"error": {"message": text}})
    labels = {"model": "unknown_model", "endpoint": "generate", "request_type": "unary", "status": "error"}
    assert house.metric("dynamo_frontend_requests_total", **labels, error_type="not_implemented") == 1
    ranked = await ask(house, body(), x_data_parallel_rank="0")
    text = "DP rank requires an explicit worker for session affinity"
    assert (ranked.status, ranked.json["error"]["message"]) == (400, text)
    assert (await house.client.call("GET", "/generate")).status == 405
    await house.worker(natively, model="second", runtime_config=CAPABLE)
    several = await ask(house, body(model="second"))
    text = "multiple SGLang models are registered; configure a model-specific generate endpoint"
    assert (several.status, several.json["error"]["message"]) == (400, text)
    assert worker.requests == []


async def test_a_chunk_without_an_object_ends_the_stream(house: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    await house.worker(say([7]), runtime_config=CAPABLE)
    with caplog.at_level(logging.ERROR):
        answer = await ask(house, body())
    assert answer.status == 200
    assert data(answer) == ['{"error":{"message":"Internal server error"}}', "[DONE]"]
    assert "missing opaque SGLang response" in caplog.text


async def test_the_document_has_both_methods(house: Cluster) -> None:
    document = (await house.client.call("GET", "/openapi.json")).json
    assert sorted(document["paths"]["/generate"]) == ["post", "put"]
