"""Ollama's API over the pipeline of chat and of embeddings."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from dynamo.errors import Unknown
from dynamo.frontend.parts.ollama.messages import OllamaMessage, chat_messages
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.access import bearer, closed_cluster, key
from support.asgi_client import Exchange
from support.frontend_cluster import Cluster, cluster, fail, say
from support.pictures import RED
from support.tiny_model import write_tiny_model

HERMES = ModelRuntimeConfig(tool_call_parser="hermes", reasoning_parser="qwen3", context_length=900)
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": [1]}}\n</tool_call>'


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, migration_limit=0) as found:
        yield found


async def ask(house: Cluster, path: str, **body: Any) -> Exchange:
    return await house.client.call("POST", f"/api/{path}", {"model": "m", **body})


def lines(answer: Exchange) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.splitlines()]


async def test_a_chat_is_streamed_as_lines_unless_declined(house: Cluster) -> None:
    worker = await house.worker(say("hel", "lo"))
    *pieces, last = lines(await ask(house, "chat", messages=HI, keep_alive="5m"))
    assert "".join(each["message"]["content"] for each in pieces) == "hello"
    assert {(each["model"], each["done"], each["message"]["role"]) for each in pieces} == {("m", False, "assistant")}
    assert (last["done"], last["done_reason"], last["message"]) == (True, "stop", {"role": "assistant", "content": ""})
    assert (last["prompt_eval_count"], last["eval_count"]) == (len(worker.requests[0]["token_ids"]), 5)
    times = {name: last[name] for name in ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")}
    assert all(isinstance(each, int) and each >= 0 for each in times.values()), times
    assert times["total_duration"] >= times["prompt_eval_duration"] + times["eval_duration"]
    whole = await ask(house, "chat", messages=HI, stream=False)
    assert whole.headers["content-type"] == "application/json"
    assert whole.json["message"] == {"role": "assistant", "content": "hello"}
    assert whole.json.keys() == last.keys()


async def test_a_prompt_is_a_chat_of_its_own(house: Cluster) -> None:
    worker = await house.worker(say("hel", "lo"))
    *pieces, last = lines(await ask(house, "generate", prompt="hi", system="Be kind."))
    assert ("".join(each["response"] for each in pieces), last["response"], last["done"]) == ("hello", "", True)
    assert (await ask(house, "generate", prompt="hi", stream=False)).json["response"] == "hello"
    assert (await ask(house, "generate", prompt="raw text", raw=True, stream=False)).status == 200
    prompts = [bytes(request["token_ids"]).decode() for request in worker.requests]
    assert "Be kind." in prompts[0]
    assert prompts[2] == "raw text"


async def test_options_and_format_reach_the_worker(house: Cluster) -> None:
    worker = await house.worker(say("{}"))
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": "x", "num_predict": 11, "repeat_penalty": 1.1,
        "num_ctx": 4096, "mirostat": 0,
    }  # fmt: skip
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    assert (await ask(house, "chat", messages=HI, options=options, format=schema)).status == 200
    assert (await ask(house, "chat", messages=HI, format="json", options={"num_predict": -1})).status == 200
    first, second = worker.requests
    sampling, stops = first["sampling_options"], first["stop_conditions"]
    assert {name: sampling[name] for name in ("temperature", "top_p", "top_k", "seed", "repetition_penalty")} == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "repetition_penalty": 1.1,
    }  # fmt: skip
    assert (stops["max_tokens"], stops["stop"]) == (11, ["x"])
    assert sampling["guided_decoding"]["json"]["required"] == ["a"]
    assert second["sampling_options"]["guided_decoding"]["json"]["type"] == "object"
    assert second["stop_conditions"].get("max_tokens") != -1


async def test_thoughts_and_calls_have_members_of_their_own(house: Cluster) -> None:
    await house.worker(say(f"<think>hm</think>Yes.{CALL}"), runtime_config=HERMES)
    whole = (await ask(house, "chat", messages=HI, tools=[TOOL], stream=False)).json["message"]
    call = {"function": {"name": "look", "arguments": {"at": [1]}}}
    assert whole == {"role": "assistant", "content": "Yes.", "thinking": "hm", "tool_calls": [call]}
    pieces = [each["message"] for each in lines(await ask(house, "chat", messages=HI, tools=[TOOL], think=True))]
    assert "".join(each.get("thinking", "") for each in pieces) == "hm"
    assert "".join(each["content"] for each in pieces).strip() == "Yes."
    assert [each["tool_calls"] for each in pieces if "tool_calls" in each] == [[call]]
    hidden = (await ask(house, "chat", messages=HI, think=False, stream=False)).json["message"]
    assert "thinking" not in hidden


def test_a_conversation_with_results_and_pictures_is_that_of_a_chat() -> None:
    picture = base64.b64encode(RED).decode()
    messages = [
        {"role": "user", "content": "look", "images": [picture]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}]},
        {"role": "tool", "content": "red", "tool_name": "look"},
    ]
    first, made, result = chat_messages(msgspec.convert(messages, list[OllamaMessage]))
    assert first["content"][1]["image_url"]["url"] == f"data:image/png;base64,{picture}"
    (call,) = made["tool_calls"]
    assert (call["function"], call["type"]) == ({"name": "look", "arguments": '{"at":1}'}, "function")
    assert result == {"role": "tool", "content": "red", "tool_call_id": call["id"], "name": "look"}


async def test_errors_are_one_text(house: Cluster) -> None:
    await house.worker()
    for path, body, status, text in (
        ("chat", {"model": "n", "messages": HI}, 404, "'n'"),
        ("chat", {"messages": 1}, 400, "messages"),
        ("chat", {"messages": HI, "options": {"temperature": "hot"}}, 400, "temperature"),
        ("generate", {"prompt": "a", "suffix": "b"}, 422, "`suffix`"),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 422, "`template`"),
        ("generate", {"prompt": "a", "context": [1, 2]}, 422, "`context`"),
        ("generate", {"prompt": "a", "context": "1"}, 400, "context"),
        ("generate", {"prompt": "a", "logprobs": True}, 422, "`logprobs`"),
        ("generate", {"model": "n"}, 404, "'n'"),
        ("chat", {"model": "n"}, 404, "'n'"),
        ("generate", {"keep_alive": 0}, 422, "`keep_alive`"),
        ("chat", {"messages": [], "keep_alive": "0s"}, 422, "`keep_alive`"),
        ("embed", {"input": "a"}, 404, "'m'"),
        ("show", {"model": "n"}, 404, "'n'"),
    ):
        refused = await ask(house, path, **body)
        assert (refused.status, list(refused.json)) == (status, ["error"]), (path, body, refused.body)
        assert text in refused.json["error"]


@pytest.mark.parametrize("more", [{}, {"stream": False}, {"keep_alive": "10m"}, {"keep_alive": -1}])
async def test_a_request_without_a_prompt_loads_the_model_and_no_more(house: Cluster, more: dict[str, object]) -> None:
    worker = await house.worker()
    head = {"model": "m", "done": True, "done_reason": "load"}
    for path, empty, answer in (
        ("generate", {"prompt": ""}, {"response": ""}),
        ("generate", {}, {"response": ""}),
        ("chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("chat", {}, {"message": {"role": "assistant", "content": ""}}),
    ):
        found = await ask(house, path, **empty, **more)
        assert (found.status, found.headers["content-type"]) == (200, "application/json")
        assert {name: value for name, value in found.json.items() if name != "created_at"} == {**head, **answer}
    assert worker.requests == []
    assert house.metric("dynamo_frontend_model_requests_in_flight", model="m") == 0
    nothing: dict[str, object] = {"suffix": "", "template": "", "context": [], "system": None}
    assert (await ask(house, "generate", prompt="hi", **nothing, stream=False)).json["response"] == "hello"


async def test_a_model_that_is_loaded_on_demand_is_listed_shown_and_loaded(house: Cluster) -> None:
    names = house.frontend.models.names
    names.on_demand = frozenset({"later"})
    worker = await house.worker()
    loaded = list[str]()

    async def load(exchange: object, begin: object, request: Any) -> str:
        loaded.append(request.model)
        return "m"

    house.frontend.pipeline.hooks.on_demand = load
    assert [each["name"] for each in (await house.client.get("/api/tags")).json["models"]] == ["m", "later"]
    assert [each["name"] for each in (await house.client.get("/api/ps")).json["models"]] == ["m"]
    shown = (await ask(house, "show", model="later:latest")).json
    assert (shown["capabilities"], shown["model_info"]) == ([], {"general.architecture": "dynamo"})
    assert (await ask(house, "generate", model="later")).json["done_reason"] == "load"
    assert (loaded, worker.requests) == (["later"], [])


async def test_every_refusal_of_a_route_is_one_text(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, key("files", routes=["files"])) as it:
        for method, path in (("GET", "/api/tags"), ("GET", "/api/ps"), ("POST", "/api/show"), ("POST", "/api/chat")):
            assert isinstance((await it.client.call(method, path, {})).json["error"], str), path
        for path in ("/api/chat", "/api/embed"):
            refused = await it.client.call("POST", path, {}, headers=bearer("files"))
            assert (refused.status, type(refused.json["error"])) == (403, str)
    async with cluster(tmp_path) as it:
        form = {"content-type": "text/plain", "accept-language": "en"}
        for path in ("/api/show", "/api/chat"):
            refused = await it.client.call("POST", path, b"{}", headers=form)
            assert (refused.status, type(refused.json["error"])) == (415, str)


async def test_answers_are_those_of_the_document(house: Cluster, tmp_path: Path) -> None:
    await house.worker(say(f"<think>hm</think>Yes.{CALL}"), runtime_config=HERMES)
    await house.worker(vectors, model="v", model_type=ModelType.Embedding)
    document = (await house.client.get("/openapi.json")).json

    def check(name: str, value: object) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)

    for line in lines(await ask(house, "chat", messages=HI, tools=[TOOL])):
        check("OllamaChatLine", line)
    check("OllamaChatLine", (await ask(house, "chat")).json)
    for line in lines(await ask(house, "generate", prompt="hi")):
        check("OllamaGenerateLine", line)
    check("OllamaVectors", (await ask(house, "embed", model="v", input="hi")).json)
    check("OllamaShown", (await ask(house, "show")).json)
    check("OllamaError", (await ask(house, "show", model="n")).json)
    check("OllamaVersion", (await house.client.get("/api/version")).json)
    for path in ("tags", "ps"):
        check("OllamaModelList", (await house.client.get(f"/api/{path}")).json)
    check(
        "OllamaChat", {"model": "m", "messages": [{"role": "user", "content": "hi", "images": ["a"]}], "tools": [TOOL]}
    )
    check("OllamaGenerate", {"model": "m", "prompt": "hi", "format": "json", "think": "low", "options": {"top_k": 3}})


async def test_a_stream_that_fails_ends_with_its_error(house: Cluster) -> None:
    await house.worker(fail(Unknown("broken"), after=("hel",)))
    *_, last = lines(await ask(house, "chat", messages=HI))
    assert list(last) == ["error"]


async def test_models_are_listed_shown_and_found_by_their_tag(house: Cluster, tmp_path: Path) -> None:
    await house.worker(directory=write_tiny_model(tmp_path / "model"), runtime_config=HERMES)
    (listed,) = (await house.client.get("/api/tags")).json["models"]
    assert (listed["name"], listed["model"]) == ("m", "m")
    (loaded,) = (await house.client.get("/api/ps")).json["models"]
    assert (loaded["name"], loaded["context_length"]) == ("m", 900)
    for body in ({"model": "m"}, {"model": "m:latest"}, {"model": "", "name": "m"}):
        shown = (await ask(house, "show", **body)).json
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["model_info"]["dynamo.context_length"] == 900
    assert (await ask(house, "chat", model="m:latest", messages=HI)).status == 200
    assert (await house.client.get("/api/version")).json["version"]


async def vectors(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    sink.send_object({"data": {"embeddings": [[0.5, 1.0] for _ in body["token_ids"]]}})
    sink.end()


async def test_texts_become_vectors(house: Cluster) -> None:
    await house.worker(vectors, model="v", model_type=ModelType.Embedding)
    for given, count in (("hi", 1), (["hi", "ho"], 2)):
        found = (await ask(house, "embed", model="v", input=given)).json
        assert (found["model"], found["embeddings"]) == ("v", [[0.5, 1.0]] * count)
        assert found["prompt_eval_count"] == 2 * count
        assert found["total_duration"] > 0


async def test_a_key_sees_its_own_models_only(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, key("good"), key("other", models=["other-*"])) as it:
        await it.worker()

        async def status(id: str, path: str, body: dict[str, object]) -> int | None:
            return (await it.client.call("POST", path, body, headers=bearer(id))).status

        assert await status("good", "/api/show", {"model": "m"}) == 200
        assert await status("other", "/api/show", {"model": "m"}) == 404
        assert await status("other", "/api/chat", {"model": "m", "messages": HI}) == 404
        assert (await it.client.call("GET", "/api/tags", headers=bearer("other"))).json == {"models": []}
        assert (await it.client.get("/api/tags")).status == 401
