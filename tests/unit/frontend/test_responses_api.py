"""The Responses API through the whole frontend: what a worker writes, as items, streamed and in one body."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from dynamo.errors import Unknown
from dynamo.protocol.model_types import ModelInput
from dynamo.protocol.records import ModelRuntimeConfig
from support.asgi_client import Exchange
from support.frontend_cluster import Cluster, Script, cluster, fail, say
from support.response_streams import ResponseReader, read_events, without_ids
from support.tiny_model import write_tiny_model

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n\\"x\\" \\u00fc\\n"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
APPLY = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "s: A"}}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


def parsers(tools: str | None = "hermes", reasoning: str | None = "qwen3", **members: Any) -> dict[str, Any]:
    return {"runtime_config": ModelRuntimeConfig(tool_call_parser=tools, reasoning_parser=reasoning, **members)}


def begin(house: Cluster, path: str = "", **body: Any) -> Exchange:
    return house.client.begin("POST", f"/v1/responses{path}", {"model": "m", "input": "hi", **body})


async def unary(house: Cluster, **body: Any) -> dict[str, Any]:
    answer = await begin(house, **body).done()
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


async def streamed(house: Cluster, **body: Any) -> ResponseReader:
    answer = await begin(house, stream=True, **body).done()
    assert answer.status == 200, answer.body
    return ResponseReader(read_events(answer.body))


async def both(house: Cluster, **body: Any) -> dict[str, Any]:
    """The answer, after it has been seen that a stream of it says the same."""
    whole, reader = await unary(house, **body), await streamed(house, **body)
    assert reader.response is not None
    assert without_ids(whole) == without_ids(reader.response)
    return whole


def kinds(response: dict[str, Any]) -> list[tuple[str, str]]:
    """(type, what it says) of every item."""
    found = []
    for item in response["output"]:
        said = item.get("arguments", item.get("input"))
        if said is None:
            said = "".join(part["text"] for part in item["content"])
        found.append((item["type"], said))
    return found


async def test_a_text(house: Cluster) -> None:
    await house.worker(say("he", "llo", " wörld"))
    response = await both(house)
    (item,) = response["output"]
    assert item == {
        "id": item["id"],
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "hello wörld", "annotations": [], "logprobs": []}],
    }
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "m")
    assert len(response["id"]) == len("resp_") + 32
    assert response["usage"] == {
        "input_tokens": response["usage"]["input_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": response["usage"]["input_tokens"] + 12,
    }


async def test_every_member_that_strict_clients_look_for_is_there(house: Cluster) -> None:
    await house.worker(say("x"))
    response = await both(
        house,
        instructions="Be brief.",
        metadata={"a": "b"},
        temperature=0.5,
        tools=[WEATHER],
        tool_choice="auto",
        reasoning={"effort": "low", "summary": "auto"},
        max_output_tokens=99,
        truncation="auto",
        prompt_cache_key="k",
        client_metadata={"unknown": 1},
    )
    expected = {
        "background": False,
        "billing": None,
        "conversation": None,
        "error": None,
        "frequency_penalty": 0.0,
        "incomplete_details": None,
        "instructions": "Be brief.",
        "max_output_tokens": 99,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "previous_response_id": None,
        "prompt": None,
        "prompt_cache_key": "k",
        "prompt_cache_retention": None,
        "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": None,
        "service_tier": "auto",
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"description": None, **WEATHER, "strict": True}],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "auto",
    }
    assert {name: response[name] for name in expected} == expected


async def test_reasoning_text_and_calls_come_in_the_order_in_which_they_were_written(house: Cluster) -> None:
    await house.worker(say(f"<think>hm</think>Let me look.\n{CALL}\n{CALL}"), **parsers())
    response = await both(house, tools=[WEATHER])
    assert kinds(response) == [
        ("reasoning", "hm"),
        ("message", "Let me look.\n"),
        ("function_call", '{"city": "Köln"}'),
        ("function_call", '{"city": "Köln"}'),
    ]
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert [item["name"] for item in response["output"][2:]] == ["weather", "weather"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("size", [1, 2, 5, 17])
async def test_the_answer_does_not_depend_on_the_cuts(house: Cluster, size: int) -> None:
    text = f"<think>hm\n\nhm</think>\n\nLet 😀 me.\n{CALL}\n  \n{PATCH}"
    raw = text.encode()
    await house.worker(say(*[list(raw[at : at + size]) for at in range(0, len(raw), size)]), **parsers())
    response = await both(house, tools=[WEATHER, APPLY], reasoning={"summary": "auto"})
    assert [kind for kind, _ in kinds(response)] == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert response["output"][3]["input"] == '*** Begin\n"x" ü\n'


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "text ", "ü😀", "<", "{", "}", "[", "]", '"'),
    *('{"name": "weather", "arguments": {"city": "x"}}', '{"name": "apply_patch", "arguments": {"input": "x\\ny"}}'),
    *("[TOOL_CALLS]", "<|python_tag|>", "[weather(city=1)]", "<function=weather>", "<parameter=city>", "</parameter>"),
    *("</function>", "<|channel|>", "<|message|>", "final", "analysis", "commentary to=functions.weather", "<|call|>"),
]
FORMATS = [
    *(("hermes", "qwen3"), ("qwen3_coder", "qwen3"), ("mistral", None), ("llama3_json", "deepseek_r1")),
    *(("pythonic", "basic"), ("harmony", "gpt_oss"), ("kimi_k2", "qwen3"), ("default", None), (None, None)),
]


@pytest.mark.parametrize("names", FORMATS, ids=str)
async def test_a_stream_says_what_the_body_says_whatever_the_model_writes(
    house: Cluster, names: tuple[str | None, str | None]
) -> None:
    worker = await house.worker(**parsers(*names))
    random_ = random.Random(repr(names))

    def cut(raw: bytes) -> list[str | list[int]]:
        found: list[str | list[int]] = []
        while raw:
            size = random_.choice([1, 1, 2, 3, 7, 30])
            found.append(list(raw[:size]))
            raw = raw[size:]
        return found

    for _ in range(12):
        text = "".join(random_.choices(PIECES, k=random_.randrange(1, 14)))
        finish = random_.choice(["stop", "stop", "length"])
        body = {
            "tools": [WEATHER, APPLY],
            "tool_choice": random_.choice(["auto", "auto", "required", "none"]),
            "parallel_tool_calls": random_.random() < 0.8,
            "reasoning": {"summary": random_.choice(["auto", None])},
        }
        worker.script = say(*cut(text.encode()), finish=finish)
        whole = await unary(house, **body)
        worker.script = say(*cut(text.encode()), finish=finish)
        reader = await streamed(house, **body)
        assert reader.response is not None
        assert without_ids(whole) == without_ids(reader.response), text


async def test_summaries_and_packed_reasoning_on_request(house: Cluster) -> None:
    worker = await house.worker(say("<think>hm, I see</think>Yes."), **parsers())
    plain = (await both(house))["output"][0]
    assert plain["summary"] == []
    assert "encrypted_content" not in plain  # a document of the API has it as a text, never null
    shown = (await both(house, reasoning={"summary": "detailed"}, include=["reasoning.encrypted_content", "else"]))[
        "output"
    ][0]
    assert shown["summary"] == [{"type": "summary_text", "text": "hm, I see"}]
    packed = {"type": "reasoning", "summary": [], "encrypted_content": shown["encrypted_content"]}
    history = [{"role": "user", "content": "a"}, packed, {"role": "assistant", "content": "Yes."}]
    await unary(house, input=[*history, {"role": "user", "content": "b"}])
    prompt = bytes(worker.requests[-1]["token_ids"]).decode()
    assert prompt.count("hm, I see") == 1


async def test_reasoning_that_was_not_to_come_is_not_shown(house: Cluster) -> None:
    await house.worker(say("<think>hm</think>Yes."), **parsers())
    assert kinds(await both(house, reasoning={"effort": "none"})) == [("message", "Yes.")]


async def test_an_answer_of_nothing_is_an_empty_message(house: Cluster) -> None:
    await house.worker(say([]))
    assert kinds(await both(house)) == [("message", "")]


async def test_an_answer_that_was_cut_is_incomplete(house: Cluster) -> None:
    await house.worker(say("hel", finish="length"))
    response = await both(house)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["completed_at"] is None
    assert response["output"][0]["status"] == "incomplete"


async def test_a_call_that_was_cut_is_an_incomplete_item(house: Cluster) -> None:
    await house.worker(say("ok " + CALL[:52], finish="length"), **parsers())
    response = await both(house, tools=[WEATHER], tool_choice="required")
    assert response["status"] == "incomplete"
    assert all(item["status"] == "completed" for item in response["output"][:-1])
    assert response["output"][-1]["status"] == "incomplete"


async def test_log_probabilities_when_they_are_included(house: Cluster) -> None:
    await house.worker(say("a", "b", extra={"log_probs": [-0.25]}))
    response = await both(house, include=["message.output_text.logprobs"], top_logprobs=2)
    found = response["output"][0]["content"][0]["logprobs"]
    assert [(one["token"], one["logprob"]) for one in found] == [("a", -0.25), ("b", -0.25)]
    assert (await both(house, top_logprobs=2))["output"][0]["content"][0]["logprobs"] == []


async def test_a_namespace_comes_back_apart_from_the_name(house: Cluster) -> None:
    call = CALL.replace('"weather"', '"b__weather"')
    await house.worker(say(call), **parsers())
    inner = {**WEATHER}
    tools = [{"type": "namespace", "name": name, "tools": [inner]} for name in ("a", "b")]
    (item,) = (await both(house, tools=tools))["output"]
    assert (item["name"], item["namespace"]) == ("weather", "b")


HOSTED: Final = [{"type": "web_search"}, {"type": "mcp", "server_url": "x"}, {"type": "surprise"}]


async def test_tools_that_run_elsewhere_are_refused_by_name(house: Cluster) -> None:
    await house.worker(say("fine"), **parsers())
    answer = await begin(house, tools=HOSTED).done()
    assert answer.status == 400
    assert b"`mcp`, `surprise`, `web_search`" in answer.body


async def test_tools_that_run_elsewhere_are_left_out_where_the_frontend_ignores_what_it_has_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="dynamo.frontend.apis.responses")
    async with cluster(tmp_path, ignore_unsupported_fields=True) as house:
        worker = await house.worker(say("fine"), **parsers())
        await both(house, tools=HOSTED, tool_choice={"type": "web_search"})
        assert worker.requests[0]["sampling_options"]["guided_decoding"] is None
    logged = [record.getMessage() for record in caplog.records if "run elsewhere" in record.getMessage()]
    assert len(logged) == 3, "each type once"


async def test_structured_text_guides_the_engine(house: Cluster) -> None:
    worker = await house.worker(say('{"a": 1}'))
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "A", "schema": schema, "strict": True}
    response = await both(house, text={"format": form, "verbosity": "low"})
    assert response["text"] == {"format": form, "verbosity": "low"}
    assert worker.requests[0]["sampling_options"]["guided_decoding"]["json"] == schema


async def test_an_engine_that_fails_before_its_first_token_is_a_status(house: Cluster) -> None:
    await house.worker(fail(Unknown("broken")))
    answer = await begin(house, stream=True).done()
    assert answer.status == 500
    assert answer.json["error"]["message"]


async def test_an_engine_that_fails_later_ends_the_stream_with_a_failed_response(house: Cluster) -> None:
    await house.worker(fail(Unknown("broken"), after=("he", "llo")))
    reader = await streamed(house)
    assert reader.response is not None
    assert (reader.response["status"], reader.response["error"]["code"]) == ("failed", "server_error")
    assert [(item["status"], item["content"][0]["text"]) for item in reader.items] == [("incomplete", "hello")]


async def test_what_would_silently_be_something_else_is_refused(house: Cluster) -> None:
    await house.worker(say("x"))
    for name, value in {"background": True, "conversation": "c", "prompt": {"id": "p"}}.items():
        answer = await begin(house, **dict[str, Any]({name: value})).done()
        assert (answer.status, answer.json["error"]["param"]) == (422, name)


async def test_a_call_that_was_cut_off_does_not_end_the_conversation(house: Cluster) -> None:
    await house.worker(say("x"))
    call = {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{"}
    result = {"type": "function_call_output", "call_id": "c", "output": "o"}
    answer = await begin(house, input=[{"role": "user", "content": "hi"}, call, result]).done()
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": ""}, "model"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "name": "n", "arguments": "{}"}]}, "input[0].call_id"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"truncation": "some"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "zz"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"nvext": {"nonsense": 1}}, "nvext.nonsense"),
        ({"stop": [""]}, "stop"),
    ],
)
async def test_bad_input_is_a_400_that_names_the_member(house: Cluster, body: dict[str, Any], param: str) -> None:
    await house.worker(say("x"))
    answer = await begin(house, **body).done()
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body
    assert answer.json["message"]


async def test_an_unknown_model_is_a_404(house: Cluster) -> None:
    await house.worker(say("x"))
    assert (await begin(house, model="other").done()).status == 404


async def test_an_image_is_named_by_its_place_in_the_input(house: Cluster) -> None:
    await house.worker(say("x"))
    content = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:image/png;base64,AA=="}]
    items = [{"role": "user", "content": "1"}, {"role": "user", "content": content}]
    answer = await begin(house, instructions="i", input=items).done()
    assert (answer.status, answer.json["error"]["param"]) == (400, "input[1].content[1]")
    assert "does not take image input" in answer.json["error"]["message"]


async def test_the_client_that_leaves_ends_the_work(house: Cluster) -> None:
    worker = await house.worker()
    worker.script = worker.hold
    exchange = begin(house, stream=True)
    await worker.started.wait()
    exchange.disconnect()
    await worker.killed.wait()
    await exchange.done()
    name = "dynamo_frontend_requests_total"
    labels = {"model": "m", "endpoint": "responses", "request_type": "stream"}
    assert house.metric(name, **labels, status="error", error_type="cancelled") == 1


def chunk(delta: dict[str, Any], reason: str | None = None, **members: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"id": "worker-7", "object": "chat.completion.chunk", "created": 1, "choices": [choice], **members}


def write(*chunks: Any) -> Script:
    async def script(body: Any, context: Any, sink: Any) -> None:
        for each in chunks:
            sink.send_object({"data": each})

    return script


@pytest.mark.parametrize("seed", range(8))
async def test_a_model_that_takes_text_may_write_its_calls_in_turns(house: Cluster, seed: int) -> None:
    random_ = random.Random(seed)
    arguments = ['{"city": "Köln"}', "{}", '{"n": [1, 2]}', ""]
    left = {number: list(text) for number, text in enumerate(arguments)}
    pieces: list[dict[str, Any]] = []
    begun = 0
    while begun < len(arguments) or any(left.values()):
        number = random_.randrange(begun + 1)
        if number == begun < len(arguments):
            pieces.append({"index": begun, "id": f"call-{begun}", "function": {"name": f"f{begun}", "arguments": ""}})
            begun += 1
        elif number < begun and left[number]:
            pieces.append({"index": number, "function": {"arguments": left[number].pop(0)}})
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    chunks = [chunk({"tool_calls": [piece]}) for piece in pieces]
    await house.worker(
        write(chunk({"role": "assistant", "content": "Wait."}), *chunks, chunk({}, "tool_calls", usage=usage)),
        model_input=ModelInput.Text,
    )
    response = await both(house)
    assert response["id"].startswith("resp_")
    assert kinds(response) == [("message", "Wait."), *(("function_call", said or "{}") for said in arguments)]
    assert [item["call_id"] for item in response["output"][1:]] == [f"call-{number}" for number in range(4)]
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert response["usage"]["total_tokens"] == 18


async def test_the_prompt_is_that_of_the_same_chat(house: Cluster) -> None:
    worker = await house.worker(say("x"), **parsers())
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes. "}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bonn"}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "image_generation_call", "id": "ig"},
    ]
    await unary(house, instructions="Be brief.", input=items, tools=[WEATHER])
    function = {"name": "weather", "parameters": WEATHER["parameters"]}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "Yes. No.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    chat = {"model": "m", "messages": messages, "tools": [{"type": "function", "function": function}]}
    assert (await house.client.call("POST", "/v1/chat/completions", chat)).status == 200
    first, second = (request["token_ids"] for request in worker.requests)
    assert bytes(first).decode() == bytes(second).decode()


async def test_the_tokens_of_a_prompt_are_those_of_the_answer(house: Cluster) -> None:
    worker = await house.worker(say("x"), **parsers())
    body = {
        "instructions": "Be brief.",
        "tools": [WEATHER],
        "reasoning": {"effort": "high"},
        "input": [{"role": "user", "content": "ü" * 50}],
    }
    counted = await begin(house, "/input_tokens", **body).done()
    assert worker.requests == []
    assert counted.json == {
        "object": "response.input_tokens",
        "input_tokens": (await unary(house, **body))["usage"]["input_tokens"],
    }
    first = await unary(house)
    more = await begin(house, "/input_tokens", previous_response_id=first["id"]).done()
    alone = await begin(house, "/input_tokens").done()
    assert more.json["input_tokens"] > alone.json["input_tokens"]
    assert (await begin(house, "/input_tokens", model="other").done()).status == 404
    assert (await begin(house, "/input_tokens", input=7).done()).status == 400
    await house.worker(write(), model="t", model_input=ModelInput.Text)
    assert (await begin(house, "/input_tokens", model="t").done()).status == 422


@pytest.mark.parametrize(
    "condition", ["not loop.first and message.role == 'system'", "loop.index0 and message.role == loop.previtem.role"]
)
async def test_a_template_that_is_particular_about_turns(house: Cluster, tmp_path: Path, condition: str) -> None:
    source = (
        "{% for message in messages %}{% if " + condition + " %}{{ raise_exception('order') }}{% endif %}"
        "[{{ message.role }}:{{ message.content }}]{% endfor %}"
    )
    directory = write_tiny_model(tmp_path / "model", chat_template=source)
    worker = await house.worker(say([1]), directory=directory)
    items = [{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]
    await unary(house, instructions="i", input=items)
    counted = await begin(house, "/input_tokens", instructions="i", input=items).done()
    assert counted.json["input_tokens"] == len(worker.requests[0]["token_ids"])


async def test_nvext_goes_with_the_whole_response(house: Cluster) -> None:
    await house.worker(say("a", "b"))
    response = await both(house, nvext={"extra_fields": ["completion_token_ids", "worker_id"]})
    assert response["nvext"]["completion_token_ids"] == list(b"ab")
    assert response["nvext"]["worker_id"]


async def test_a_request_that_is_only_placed(house: Cluster) -> None:
    worker = await house.worker(say("a"))
    reader = await streamed(house, nvext={"annotations": ["query_instance_id:"]})
    assert reader.response is not None
    assert reader.response["nvext"]["worker_id"]
    assert worker.requests == []


def test_the_reader_of_these_tests_is_strict() -> None:
    done = "data: [DONE]\n\n"
    with pytest.raises(AssertionError):
        ResponseReader(
            read_events(
                f"event: response.completed\ndata: {json.dumps({'type': 'response.completed'})}\n\n{done}".encode()
            )
        )
