from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import InvalidArgument, Overloaded, Unknown
from dynamo.protocol.messages.sse import SIGNATURE
from dynamo.protocol.model_types import ModelInput
from dynamo.protocol.records import ModelRuntimeConfig
from support.asgi_client import Exchange
from support.frontend_cluster import Cluster, cluster, fail, say
from support.message_streams import accumulated, events_of_stream
from support.tiny_model import tiny_tokenizer, write_tiny_model

HERMES = ModelRuntimeConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
TOOL = {"name": "look", "description": "Look it up", "input_schema": {"type": "object", "properties": {"at": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": [1, {"b": "}"}]}}\n</tool_call>'
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, migration_limit=0) as found:
        yield found


async def ask(house: Cluster, content: Any = "hi", path: str = "/v1/messages", **fields: Any) -> Exchange:
    body = {"model": "m", "max_tokens": 900, "messages": [{"role": "user", "content": content}], **fields}
    return await house.client.call("POST", path, body, headers=VERSION)


async def both(house: Cluster, content: Any = "hi", **fields: Any) -> dict[str, Any]:
    """The body of an answer, which its stream also says."""
    unary = await ask(house, content, **fields)
    assert unary.status == 200, unary.body
    streamed = await ask(house, content, stream=True, **fields)
    assert streamed.headers["content-type"] == "text/event-stream"
    found = accumulated(streamed.body)
    assert without_ids(found) == without_ids(unary.json)
    assert found["id"].startswith("msg_")
    return found


def without_ids(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what is made up afresh for each answer."""
    return {**body, "id": "", "content": [{**block, "id": ""} for block in body["content"]]}


def user_prompt(request: Mapping[str, Any]) -> str:
    return bytes(request["token_ids"]).decode()


async def test_a_text_is_one_block(house: Cluster) -> None:
    worker = await house.worker(say("hel", "lo"))
    body = await both(house)
    prompt = len(worker.requests[0]["token_ids"])
    assert {**body, "id": ""} == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 5,
        },
    }


async def test_the_events_of_a_stream_come_in_the_order_of_the_api(house: Cluster) -> None:
    await house.worker(say("hel", "lo"))
    streamed = await ask(house, stream=True)
    assert [name for name, _ in events_of_stream(streamed.body)] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert streamed.headers["request-id"] == streamed.headers["x-request-id"]
    (_, start) = events_of_stream(streamed.body)[0]
    assert start["message"]["usage"]["input_tokens"] > 0
    assert start["message"]["usage"]["output_tokens"] == 0  # clients may add those of the last event
    assert start["message"]["stop_reason"] is None


async def test_an_empty_answer_is_one_empty_text(house: Cluster) -> None:
    await house.worker(say(""))
    assert (await both(house))["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize(
    ("finish", "reason"), [("stop", "end_turn"), ("length", "max_tokens"), ("content_filter", "refusal")]
)
async def test_the_stop_reason_is_the_engines(house: Cluster, finish: str, reason: str) -> None:
    await house.worker(say("a", finish=finish))
    assert (await both(house))["stop_reason"] == reason


async def test_a_stop_sequence_is_named(house: Cluster) -> None:
    await house.worker(say("one EN", "D two"))
    body = await both(house, stop_sequences=["END", "STOP"])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")
    assert body["content"] == [{"type": "text", "text": "one "}]


async def test_cached_tokens_are_not_input_tokens(house: Cluster) -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}}
    worker = await house.worker(say("a", extra={"completion_usage": usage}))
    body = await both(house)
    prompt = len(worker.requests[0]["token_ids"])
    assert body["usage"]["input_tokens"] == prompt - 3
    assert body["usage"]["cache_read_input_tokens"] == 3


async def test_thinking_text_and_calls_are_blocks_in_the_order_in_which_they_came(house: Cluster) -> None:
    await house.worker(say("<think>why", " not</think>\n\nI look.\n", CALL, "\n", CALL), runtime_config=HERMES)
    body = await both(house, tools=[TOOL])
    thinking, text, first, second = body["content"]
    assert thinking == {"type": "thinking", "thinking": "why not", "signature": SIGNATURE}
    assert (text["type"], text["text"].strip()) == ("text", "I look.")
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "look", {"at": [1, {"b": "}"}]})
    assert second["input"] == first["input"]
    assert first["id"] != second["id"]
    assert body["stop_reason"] == "tool_use"


async def test_a_call_that_is_cut_off_is_not_told(house: Cluster) -> None:
    await house.worker(say("Look: " + CALL[:40], finish="length"), runtime_config=HERMES)
    body = await both(house, tools=[TOOL])
    assert [block["type"] for block in body["content"]] == ["text"]
    assert body["stop_reason"] == "max_tokens"


async def test_the_input_of_an_eager_tool_goes_out_as_it_is_written(house: Cluster) -> None:
    await house.worker(say(*CALL), runtime_config=HERMES)
    eager = await ask(house, stream=True, tools=[TOOL | {"eager_input_streaming": True}])
    whole = await ask(house, stream=True, tools=[TOOL])
    assert accumulated(eager.body)["content"][0]["input"] == accumulated(whole.body)["content"][0]["input"]
    pieces = [data for name, data in events_of_stream(eager.body) if name == "content_block_delta"]
    assert len(pieces) > 5
    assert len([1 for name, _ in events_of_stream(whole.body) if name == "content_block_delta"]) == 1


async def test_thinking_that_is_not_wanted_in_the_answer_is_left_empty(house: Cluster) -> None:
    await house.worker(say("<think>why</think>so"), runtime_config=HERMES)
    body = await both(house, thinking={"type": "adaptive", "display": "omitted"})
    assert body["content"] == [
        {"type": "thinking", "thinking": "", "signature": SIGNATURE},
        {"type": "text", "text": "so"},
    ]


# -- errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "kind", "text"),
    [
        ({"model": "nope"}, 404, "not_found_error", "Model 'nope' not found; served here: 'm'"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens: must be greater than 0"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: field required"),
        ({"messages": []}, 400, "invalid_request_error", "messages: field required"),
        ({"temperature": 3}, 400, "invalid_request_error", "Temperature must be between 0 and 2, got 3"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "Stop sequence cannot be empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].source: an image source of type file needs `file_id`",
        ),
    ],
)
async def test_a_refusal_has_its_type_and_names_the_field(
    house: Cluster, fields: dict[str, Any], status: int, kind: str, text: str
) -> None:
    await house.worker()
    answer = await ask(house, **fields)
    assert answer.status == status
    assert answer.json == {
        "type": "error",
        "error": {"type": kind, "message": text},
        "request_id": answer.headers["request-id"],
    }


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Unknown("x"), 500, "api_error"),
        (Overloaded("x"), 529, "overloaded_error"),
        (InvalidArgument("the prompt is odd"), 400, "invalid_request_error"),
    ],
)
async def test_a_failure_of_the_engine_has_its_type_also_in_a_stream(
    house: Cluster, error: Exception, status: int, kind: str
) -> None:
    worker = await house.worker(fail(error))
    for stream in (False, True):
        answer = await ask(house, stream=stream)
        assert (answer.status, answer.json["error"]["type"]) == (status, kind)
    assert ("retry-after" in answer.headers) == (status == 529)
    worker.script = fail(error, after=("a",))
    streamed = await ask(house, stream=True)
    assert streamed.status == 200
    name, last = events_of_stream(streamed.body)[-1]
    assert (name, last["type"], last["error"]["type"]) == ("error", "error", kind)
    assert last["request_id"] == streamed.headers["request-id"]


async def test_routes_below_the_api_are_not_found_in_its_form(house: Cluster) -> None:
    answer = await house.client.call("POST", "/v1/messages/batches", {})
    assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
    get = await house.client.get("/v1/messages")
    assert (get.status, get.body) == (405, b"")


async def test_a_frontend_may_be_without_the_api(tmp_path: Path) -> None:
    async with cluster(tmp_path, anthropic_api=False) as house:
        answer = await ask(house)
        assert (answer.status, answer.json["message"]) == (404, "Route not found: POST /v1/messages")


async def test_models_are_listed_in_the_form_of_the_api(house: Cluster) -> None:
    await house.worker()
    listed = await house.client.get("/v1/models", anthropic_version="2023-06-01")
    assert [model["id"] for model in listed.json["data"]] == ["m"]
    missing = await house.client.get("/v1/models/nope", anthropic_version="2023-06-01")
    assert (missing.status, missing.json["error"]["type"]) == (404, "not_found_error")
    assert missing.json["request_id"] == missing.headers["request-id"]


# -- lengths -------------------------------------------------------------------------------------------------------------


async def test_a_long_answer_is_clamped_to_what_the_model_has_left(house: Cluster) -> None:
    worker = await house.worker(runtime_config=ModelRuntimeConfig(context_length=1000))
    assert (await ask(house, max_tokens=64_000)).status == 200
    (request,) = worker.requests
    assert request["stop_conditions"]["max_tokens"] == 1000 - len(request["token_ids"])


async def test_a_prompt_that_is_too_long_says_so_in_the_words_agents_look_for(house: Cluster) -> None:
    await house.worker(runtime_config=ModelRuntimeConfig(context_length=100))
    answer = await ask(house, "x" * 200)
    assert answer.status == 400
    count = (await ask(house, "x" * 200, "/v1/messages/count_tokens")).json["input_tokens"]
    assert answer.json["error"]["message"] == f"prompt is too long: {count} tokens > 100 maximum"


async def test_tokens_are_counted_as_the_model_gets_them(house: Cluster, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    worker = await house.worker(directory=directory)
    fields: dict[str, Any] = {"system": "Be kind.", "tools": [TOOL]}
    answer = await ask(house, "How are you?", **fields)
    assert answer.status == 200, answer.body
    counted = await ask(house, "How are you?", "/v1/messages/count_tokens", max_tokens=None, **fields)
    assert counted.json == {"input_tokens": len(worker.requests[0]["token_ids"])}
    assert counted.json["input_tokens"] == answer.json["usage"]["input_tokens"]
    assert len(worker.requests) == 1
    labels = {"model": "m", "endpoint": "messages_count_tokens", "request_type": "unary"}
    assert house.metric("dynamo_frontend_requests_total", **labels, status="success") == 1
    assert house.metric("dynamo_frontend_input_sequence_tokens_count", model="m") == 1
    refused = await ask(house, "x", "/v1/messages/count_tokens", model="nope")
    assert (refused.status, refused.json["error"]["type"]) == (404, "not_found_error")


# -- templates and models ------------------------------------------------------------------------------------------------

STRICT = """{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}{{ raise_exception('System message must be at the beginning') }}{%- endif -%}
{%- if not loop.first and message.role == loop.previtem.role and message.role != 'tool' -%}
{{ raise_exception('Roles must alternate') }}{%- endif -%}
{{ message.role }}:{{ message.content }};
{%- endfor -%}"""


async def test_a_template_that_refuses_the_conversation_gets_it_regrouped(house: Cluster, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", chat_template=STRICT)
    worker = await house.worker(directory=directory)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    answer = await ask(house, messages=messages, system="s")
    assert answer.status == 200, answer.body
    prompt = tiny_tokenizer().decode(worker.requests[0]["token_ids"])
    assert "".join(prompt.split()) == "system:sd;user:ab;assistant:c;user:e;"
    counted = await ask(house, path="/v1/messages/count_tokens", messages=messages, system="s")
    assert counted.json["input_tokens"] == len(worker.requests[0]["token_ids"])


async def test_a_template_that_refuses_for_another_reason_is_a_400(house: Cluster, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", chat_template="{{ raise_exception('no') }}")
    await house.worker(directory=directory)
    answer = await ask(house)
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json["error"]["message"].endswith("does not accept these messages: no")


async def test_a_model_that_takes_text_gets_the_chat_and_its_usage_is_told(house: Cluster) -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
    first = {"id": "worker-7", "choices": [{"index": 0, "delta": {"reasoning_content": "why", "content": "so"}}]}
    last = {"id": "worker-7", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage}

    async def script(body: Mapping[str, Any], context: Any, sink: Any) -> None:
        for chunk in (first, last):
            sink.send_object({"data": chunk})

    worker = await house.worker(script, model_input=ModelInput.Text)
    body = await both(house, tools=[TOOL], system="s")
    assert [block["type"] for block in body["content"]] == ["thinking", "text"]
    assert body["usage"] == {
        "input_tokens": 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
    }
    (request, _) = worker.requests
    assert request["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert request["tools"][0]["function"]["name"] == "look"
    counted = await ask(house, path="/v1/messages/count_tokens")
    assert (counted.status, counted.json["error"]["type"]) == (422, "invalid_request_error")


async def test_extensions_of_the_answer_come_at_its_end(house: Cluster) -> None:
    worker = await house.worker(say("ab"))
    fields: dict[str, Any] = {"nvext": {"extra_fields": ["completion_token_ids", "worker_id"]}}
    unary = await ask(house, **fields)
    streamed = await ask(house, stream=True, **fields)
    assert unary.json["nvext"]["completion_token_ids"] == list(b"ab")
    (_, last) = events_of_stream(streamed.body)[-2]
    assert last["nvext"] == unary.json["nvext"]
    placed = await ask(house, stream=True, nvext={"annotations": ["query_instance_id:"]})
    assert "worker_id" in events_of_stream(placed.body)[1][1]["nvext"]
    assert (await ask(house, nvext={"annotations": ["query_instance_id:"]})).json["content"]
    assert len(worker.requests) == 2


async def test_a_silent_stream_is_kept_alive_with_pings(tmp_path: Path) -> None:
    async with cluster(tmp_path, peek_seconds=0.0) as house:
        worker = await house.worker()
        worker.script = worker.hold
        body = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        asked = house.client.begin("POST", "/v1/messages", body)
        await asked.until(lambda one: b'event: ping\ndata: {"type":"ping"}\n\n' in one.body)
        asked.disconnect()
        await asked.done()


async def test_the_metrics_of_an_answer_are_those_of_chat_under_its_own_label(house: Cluster) -> None:
    await house.worker(say("ab"))
    await ask(house)
    labels = {"model": "m", "endpoint": "messages", "request_type": "unary", "status": "success"}
    assert house.metric("dynamo_frontend_requests_total", **labels) == 1
    assert house.metric("dynamo_frontend_output_tokens_total", model="m") == 2
