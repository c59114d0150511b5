"""Models that take text: the worker writes OpenAI's chunks, and what it writes passes through."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.protocol.model_types import ModelInput
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.frontend_cluster import Cluster, Script, ScriptedWorker, cluster

USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 7,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 3},
}
LOGPROBS: dict[str, Any] = {
    "content": [{"token": "a", "logprob": -0.25, "bytes": [97], "top_logprobs": []}],
    "refusal": None,
}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


def chunk(*choices: Any, **members: Any) -> dict[str, Any]:
    return {"id": "worker-7", "object": "chat.completion.chunk", "created": 1, "choices": list(choices), **members}


def one(delta: dict[str, Any], reason: str | None = None, index: int = 0, **members: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason, **members}


def write(*chunks: Any) -> Script:
    """A worker that sends these objects and ends."""

    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        for each in chunks:
            sink.send_object({"data": each})

    return script


async def serve(house: Cluster, *chunks: Any, **members: Any) -> ScriptedWorker:
    return await house.worker(write(*chunks), model_input=ModelInput.Text, **members)


def calls_of(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The calls of a stream, joined as clients join them."""
    found: dict[int, dict[str, Any]] = {}
    for each in chunks:
        for choice in each["choices"]:
            for piece in choice["delta"].get("tool_calls", ()):
                call = found.setdefault(piece["index"], {"id": piece.get("id"), "name": "", "arguments": ""})
                call["name"] += piece["function"].get("name") or ""
                call["arguments"] += piece["function"].get("arguments") or ""
    return found


@pytest.mark.parametrize("is_interleaved", [False, True])
async def test_tool_calls_pass_through(house: Cluster, is_interleaved: bool) -> None:
    first = {"index": 0, "id": "call-a", "type": "function", "function": {"name": "add", "arguments": ""}}
    second = {"index": 1, "id": "call-b", "type": "function", "function": {"name": "sub", "arguments": "{"}}
    rest = [{"index": 0, "function": {"arguments": '{"x":1}'}}, {"index": 1, "function": {"arguments": '"y":2}'}}]
    order = [first, second, *rest] if is_interleaved else [first, rest[0], second, rest[1]]
    await serve(
        house,
        chunk(one({"role": "assistant", "content": None})),
        *(chunk(one({"tool_calls": [piece]})) for piece in order),
        chunk(one({}, "tool_calls")),
    )
    wanted = {
        0: {"id": "call-a", "name": "add", "arguments": '{"x":1}'},
        1: {"id": "call-b", "name": "sub", "arguments": '{"y":2}'},
    }
    unary = (await house.client.chat("hi")).json["choices"][0]
    assert [(call["id"], call["function"]) for call in unary["message"]["tool_calls"]] == [
        (call["id"], {"name": call["name"], "arguments": call["arguments"]}) for call in wanted.values()
    ]
    assert (unary["message"]["content"], unary["finish_reason"]) == (None, "tool_calls")
    streamed = await house.client.chat("hi", stream=True)
    assert calls_of(streamed.chunks) == wanted
    assert streamed.finish_reasons()[-1] == "tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("parser", [None, "hermes"])
async def test_a_forced_call_that_the_limit_cut_off_ends_with_length(
    house: Cluster, choice: Any, parser: str | None
) -> None:
    begun = {"index": 0, "id": "call-a", "type": "function", "function": {"name": "add", "arguments": '{"x":'}}
    written = '{"x":' if isinstance(choice, dict) else '[{"name": "add", "parameters": {"x":'
    pieces = {"tool_calls": [begun]} if parser is None else {"content": written}
    chunks = (chunk(one({"role": "assistant", "content": None})), chunk(one(pieces)), chunk(one({}, "length")))
    await serve(house, *chunks, runtime_config=ModelRuntimeConfig(tool_call_parser=parser))
    asked = {"tools": [{"type": "function", "function": {"name": "add"}}], "tool_choice": choice}
    streamed = await house.client.chat("hi", stream=True, **asked)
    assert calls_of(streamed.chunks)[0]["arguments"] == '{"x":'
    assert streamed.finish_reasons()[-1] == "length"
    (unary,) = (await house.client.chat("hi", **asked)).json["choices"]
    assert (unary["finish_reason"], unary["message"]["content"]) == ("length", None)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_first_call_of_an_engine_is_kept_without_parallel_calls(
    house: Cluster, is_interleaved: bool, stream: bool
) -> None:
    first = {"index": 0, "id": "call-a", "type": "function", "function": {"name": "add", "arguments": ""}}
    second = {"index": 1, "id": "call-b", "type": "function", "function": {"name": "sub", "arguments": "{"}}
    rest = [{"index": 0, "function": {"arguments": '{"x":1}'}}, {"index": 1, "function": {"arguments": '"y":2}'}}]
    order = [first, second, *rest] if is_interleaved else [first, rest[0], second, rest[1]]
    await serve(house, *(chunk(one({"tool_calls": [piece]})) for piece in order), chunk(one({}, "tool_calls")))
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]
    answer = await house.client.chat("hi", stream=stream, tools=tools, parallel_tool_calls=False)
    if stream:
        assert calls_of(answer.chunks) == {0: {"id": "call-a", "name": "add", "arguments": '{"x":1}'}}
        assert answer.finish_reasons()[-1] == "tool_calls"
    else:
        (choice,) = answer.json["choices"]
        assert [call["function"] for call in choice["message"]["tool_calls"]] == [
            {"name": "add", "arguments": '{"x":1}'}
        ]
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("member", ["reasoning_content", "reasoning"])
async def test_reasoning_passes_through(house: Cluster, member: str) -> None:
    await serve(house, chunk(one({member: "hm"})), chunk(one({"content": "yes"}, "stop")))
    message = (await house.client.chat("hi")).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    deltas = [each["choices"][0]["delta"] for each in (await house.client.chat("hi", stream=True)).chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"


async def test_several_choices_of_one_stream_pass_through(house: Cluster) -> None:
    worker = await serve(
        house,
        chunk(one({"content": "a"}), one({"content": "x"}, index=1)),
        chunk(one({"content": "b"}, "stop"), one({"content": "y"}, "length", index=1)),
        chunk(usage=USAGE),
    )
    answer = await house.client.chat("hi", n=2, seed=5)
    assert [(each["message"]["content"], each["finish_reason"]) for each in answer.json["choices"]] == [
        ("ab", "stop"),
        ("xy", "length"),
    ]
    assert answer.json["usage"] == USAGE
    streamed = await house.client.chat("hi", n=2, stream=True)
    assert (streamed.text(0), streamed.text(1)) == ("ab", "xy")
    assert (streamed.finish_reasons(1)[-1], len(worker.requests)) == ("length", 2)
    assert (worker.requests[0]["n"], worker.requests[0]["seed"]) == (2, 5)


@pytest.mark.parametrize("wrong", [-1, -(2**63), 2**63, 2**40, 1.5, "7", True, None, [1]])
async def test_a_count_that_cannot_be_one_is_not_believed(house: Cluster, wrong: object) -> None:
    usage = {
        "prompt_tokens": wrong,
        "completion_tokens": wrong,
        "prompt_tokens_details": {"cached_tokens": wrong},
        "completion_tokens_details": {"reasoning_tokens": wrong},
    }
    await serve(house, chunk(one({"content": "a"}, "stop")), chunk(usage=usage))
    answer = (await house.client.chat("hi")).json
    assert answer["choices"][0]["message"]["content"] == "a"
    assert 0 <= answer["usage"]["prompt_tokens"] < 1000
    assert 0 <= answer["usage"]["completion_tokens"] < 1000
    (model,) = house.frontend.models.served()
    assert (model.admission.in_flight, house.frontend.admission.in_flight) == (0, 0)


async def test_the_id_the_usage_and_log_probabilities_are_the_workers(house: Cluster) -> None:
    worker = await serve(
        house,
        chunk(one({"content": "a"}, logprobs=LOGPROBS)),
        chunk(one({"content": "a"}, "stop", logprobs=LOGPROBS)),
        chunk(usage=USAGE),
    )
    answer = await house.client.chat("hi", logprobs=True)
    assert (answer.json["id"], answer.json["usage"]) == ("worker-7", USAGE)
    assert answer.json["choices"][0]["logprobs"] == {**LOGPROBS, "content": LOGPROBS["content"] * 2}
    assert answer.headers["x-request-id"] == f"chatcmpl-{worker.contexts[0].id()}"
    options: dict[str, Any] = {"include_usage": True}
    streamed = await house.client.chat("hi", logprobs=True, stream=True, stream_options=options)
    assert {each["id"] for each in streamed.chunks} == {"worker-7"}
    assert [each["choices"][0]["logprobs"] for each in streamed.chunks[:2]] == [LOGPROBS, LOGPROBS]
    assert (streamed.chunks[-1]["choices"], streamed.chunks[-1]["usage"]) == ([], USAGE)
    assert worker.requests[1]["stream_options"] == options
    assert house.metric("dynamo_frontend_output_sequence_tokens_sum", model="m") == 2 * 7


async def test_completions_pass_through_too(house: Cluster) -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{}], "text_offset": [0]}
    parts = [{"index": 0, "text": "a", "finish_reason": reason, "logprobs": logprobs} for reason in (None, "stop")]
    await serve(house, *map(chunk, parts), chunk(usage=USAGE))
    answer = (await house.client.completion("hi", logprobs=1)).json
    assert (answer["choices"][0]["text"], answer["id"], answer["usage"]) == ("aa", "worker-7", USAGE)
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -0.5]


async def test_log_probabilities_in_the_shape_of_chats_become_those_of_completions(house: Cluster) -> None:
    top = [{"token": "ab", "logprob": -0.25}, {"token": "x", "logprob": -2.0}]
    item = {"token": "ab", "logprob": -0.25, "bytes": [97, 98], "top_logprobs": top}
    parts = [
        {"index": 0, "text": "ab", "finish_reason": reason, "logprobs": {"content": [item]}}
        for reason in (None, "stop")
    ]
    await serve(house, *map(chunk, parts), chunk(usage=USAGE))
    expected = {
        "tokens": ["ab", "ab"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"ab": -0.25, "x": -2.0}] * 2,
        "text_offset": [0, 2],
    }
    assert (await house.client.completion("hi", logprobs=2)).json["choices"][0]["logprobs"] == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_that_no_worker_reported_is_not_made_up(house: Cluster, stream: bool) -> None:
    await serve(house, chunk(one({"content": "hello"}, "stop")))
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await house.client.chat("hi", stream=stream, **options)
    assert answer.status == 200
    assert b'"usage":{' not in answer.body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_one_choice_and_the_others_go_on(house: Cluster, stream: bool) -> None:
    await serve(
        house,
        chunk(one({"content": "abSTO"}), one({"content": "x"}, index=1)),
        chunk(one({"content": "Pcd"}), one({"content": "y"}, index=1)),
        chunk(one({"content": "ef"}, "stop"), one({"content": "z"}, "stop", index=1)),
        chunk(usage=USAGE),
    )
    answer = await house.client.chat("hi", n=2, stop="STOP", stream=stream)
    if stream:
        texts = [answer.text(0), answer.text(1)]
    else:
        texts = [each["message"]["content"] for each in answer.json["choices"]]
    assert texts == ["ab", "xyz"]


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (chunk(one({"content": "a"}, index=1)), "choice 1 of a request for 1"),
        (chunk(one({"content": 5})), "content"),
        (chunk(one({"tool_calls": [{"index": 0}]})), "tool_calls"),
        (chunk(one({"tool_calls": [{"index": 0, "function": {"arguments": {}}}]})), "tool_calls"),
        (chunk(one({}, logprobs=[1])), "logprobs"),
        (chunk({"index": -1}), "index"),
        (chunk("text"), "choice"),
        (chunk(usage=3), "usage"),
        ({"text": "a"}, "choices"),
    ],
)
async def test_a_chunk_of_another_shape_is_the_workers_fault(
    house: Cluster, caplog: pytest.LogCaptureFixture, bad: Any, name: str
) -> None:
    await serve(house, bad)
    answer = await house.client.chat("hi")
    assert answer.status == 500
    assert name not in answer.json["message"]
    assert name in caplog.text


async def test_a_lost_worker_after_the_last_choice_is_no_error(house: Cluster) -> None:
    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        sink.send_object({"data": chunk(one({"content": "all"}, "stop"))})
        await context.async_killed_or_stopped()

    worker = await house.worker(script, model_input=ModelInput.Text)
    asked = house.client.begin_chat("hi", stream=True)
    await asked.until(lambda each: b'"stop"' in each.body)
    await worker.stop()
    await asked.done()
    assert json.dumps(asked.chunks).count("error") == 0


async def test_the_context_window_of_the_card_is_listed(house: Cluster) -> None:
    await serve(house, runtime_config=ModelRuntimeConfig(context_length=2048))
    assert (await house.client.get("/v1/models/m")).json["context_window"] == 2048
