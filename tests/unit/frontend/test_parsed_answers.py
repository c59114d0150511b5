"""Tool calls, reasoning and forced output through the whole frontend, with a worker whose tokens spell them."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dynamo.engines.callable.engine import engine_class
from dynamo.protocol.openai.closed_schema import TIGHT_WHITE_SPACE
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.worker.worker import Worker
from support.asgi_client import Exchange
from support.frontend_cluster import Cluster, cluster, memory_runtime, say
from support.patience import PATIENCE_SECONDS
from support.tiny_model import write_tiny_model

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER = ("weather", '{"city": "Köln"}')
TIGHT = {"whitespace_pattern": TIGHT_WHITE_SPACE}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOSED = {**PARAMETERS, "additionalProperties": False}


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **function}}


TOOLS = [tool(), tool("time")]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


def parsers(tools: str | None = "hermes", reasoning: str | None = "qwen3", **members: Any) -> dict[str, Any]:
    return {"runtime_config": ModelRuntimeConfig(tool_call_parser=tools, reasoning_parser=reasoning, **members)}


def byte_by_byte(text: str, finish: str = "stop") -> Any:
    return say(*[[byte] for byte in text.encode()], finish=finish)


class Heard:
    """One choice of an answer, streamed or not, without what must differ: the ids of its calls."""

    def __init__(self, answer: Exchange, choice: int = 0) -> None:
        assert answer.status == 200, answer.body
        self.content, self.reasoning = "", ""
        self.calls: list[tuple[str, str]] = []
        self.ids: list[str] = []
        if answer.headers["content-type"] == "text/event-stream":
            self._join(answer, choice)
        else:
            (one,) = [one for one in answer.json["choices"] if one["index"] == choice]
            message = one["message"]
            self.content = message["content"] or ""
            self.reasoning = message.get("reasoning_content") or ""
            for call in message.get("tool_calls", []):
                assert call["type"] == "function"
                self.ids.append(call["id"])
                self.calls.append((call["function"]["name"], call["function"]["arguments"]))
            self.reason = one["finish_reason"]

    def _join(self, answer: Exchange, choice: int) -> None:
        for chunk in answer.chunks:
            for one in [one for one in chunk["choices"] if one["index"] == choice]:
                delta = one["delta"]
                self.content += delta.get("content") or ""
                self.reasoning += delta.get("reasoning_content") or ""
                for call in delta.get("tool_calls", []):
                    if "id" in call:
                        assert call["index"] == len(self.calls)
                        assert call["type"] == "function"
                        self.ids.append(call["id"])
                        self.calls.append((call["function"]["name"], ""))
                    name, said = self.calls[call["index"]]
                    self.calls[call["index"]] = (name, said + call["function"]["arguments"])
                self.reason = one["finish_reason"]

    @property
    def said(self) -> tuple[str, str, list[tuple[str, str]], str | None]:
        return self.content, self.reasoning, self.calls, self.reason


async def hear(house: Cluster, **fields: Any) -> Heard:
    """The answer, after checking that it is the same streamed and not."""
    unary = Heard(await house.client.chat("hi", **fields))
    streamed = Heard(await house.client.chat("hi", stream=True, **fields))
    assert unary.said == streamed.said
    assert len(set(unary.ids + streamed.ids)) == 2 * len(unary.calls)
    assert all(one.startswith("call-") for one in unary.ids)
    return unary


# -- tool_choice auto ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("It rains.", ("It rains.", "", [], "stop")),
        (CALL, ("", "", [WEATHER], "tool_calls")),
        (f"I look.\n{CALL}\n{CALL}", ("I look.\n", "", [WEATHER, WEATHER], "tool_calls")),
        (f"<think>\nhm\n</think>\n\n{CALL}", ("", "hm", [WEATHER], "tool_calls")),
        ("<think>\nhm\n</think>\n\nIt rains.", ("It rains.", "hm", [], "stop")),
        ("<tool_call>{'name': 1}</tool_call>", ("<tool_call>{'name': 1}</tool_call>", "", [], "stop")),
        ("<think>for ever", ("", "for ever", [], "stop")),
    ],
)
async def test_an_answer_is_parsed_alike_however_it_arrives(house: Cluster, text: str, said: Any) -> None:
    worker = await house.worker(say(text), **parsers())
    assert (await hear(house, tools=TOOLS)).said == said
    worker.script = byte_by_byte(text)
    assert (await hear(house, tools=TOOLS)).said == said


async def test_empty_content_is_null_and_a_streamed_call_comes_in_pieces(house: Cluster) -> None:
    await house.worker(byte_by_byte(CALL), **parsers())
    unary = await house.client.chat("hi", tools=TOOLS)
    assert unary.json["choices"][0]["message"]["content"] is None
    streamed = await house.client.chat("hi", tools=TOOLS, stream=True)
    first, *more, last = streamed.chunks
    (call,) = first["choices"][0]["delta"]["tool_calls"]
    assert call == {"index": 0, "id": call["id"], "type": "function", "function": {"name": "weather", "arguments": "{"}}
    pieces = [piece for chunk in more for piece in chunk["choices"][0]["delta"]["tool_calls"]]
    assert all(piece.keys() == {"index", "function"} for piece in pieces)
    assert "".join(["{", *(piece["function"]["arguments"] for piece in pieces)]) == '{"city": "Köln"}'
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "tool_calls")


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
async def test_without_tools_to_call_nothing_is_parsed(house: Cluster, fields: dict[str, Any]) -> None:
    await house.worker(say(CALL), **parsers(reasoning=None))
    assert (await hear(house, **fields)).said == (CALL, "", [], "stop")


async def test_without_a_parser_on_the_card_the_text_stays(house: Cluster) -> None:
    await house.worker(say(CALL), **parsers(None, None))
    assert (await hear(house, tools=TOOLS)).said == (CALL, "", [], "stop")


async def test_an_answer_cut_off_inside_a_call_stays_cut_off(house: Cluster) -> None:
    await house.worker(say(f"{CALL}{CALL[:20]}", finish="length"), **parsers())
    assert (await hear(house, tools=TOOLS)).said == (CALL[:20], "", [WEATHER], "length")


async def test_only_the_first_call_is_kept_without_parallel_calls(house: Cluster) -> None:
    await house.worker(say(CALL + CALL), **parsers())
    assert (await hear(house, tools=TOOLS, parallel_tool_calls=False)).calls == [WEATHER]


HARMONY_CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln"}<|call|>'
HARMONY = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{HARMONY_CALL}"


@pytest.mark.parametrize("names", [("harmony", "gpt_oss"), ("harmony", None), (None, "gpt_oss")])
async def test_either_name_of_a_unified_format_reads_all_of_it(house: Cluster, names: tuple[str | None, str]) -> None:
    await house.worker(say(*[[byte] for byte in HARMONY.encode()]), **parsers(*names))
    assert (await hear(house, tools=TOOLS)).said == ("", "hm", [WEATHER], "tool_calls")
    unary = await house.client.chat("hi", tools=TOOLS)
    assert unary.json["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_a_unified_format_without_tools_shows_its_text_without_marks(house: Cluster) -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>"
    await house.worker(say(text), **parsers("harmony", "gpt_oss"))
    assert (await hear(house)).said == ("Hi.", "hm", [], "stop")


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_forced_choice_of_a_unified_format_takes_json_and_its_own_form(house: Cluster, choice: Any) -> None:
    arguments = '{"city": "Köln"}'
    guided = arguments if choice is NAMED else f'[{{"name": "weather", "parameters": {arguments}}}]'
    for answer in (guided, f"<|channel|>final<|message|>{guided}<|return|>", HARMONY_CALL):
        worker = await house.worker(say(answer), **parsers("harmony", "gpt_oss"))
        heard = await hear(house, tools=TOOLS, tool_choice=choice)
        assert (heard.content, heard.calls) == ("", [WEATHER])
        await worker.stop()


async def test_a_forced_call_in_a_formats_own_form_that_is_cut_off_is_a_partial_entry(house: Cluster) -> None:
    cut = "<tool_call>\n<function=weather>\n<parameter=city>\nKö"
    await house.worker(say(cut, finish="length"), **parsers("qwen3_coder", None))
    heard = await hear(house, tools=TOOLS, tool_choice="required")
    assert (heard.content, heard.reason) == ("", "length")
    assert heard.calls == [("weather", '{"city": "Kö')]


async def test_values_are_typed_by_the_tools_schema(house: Cluster) -> None:
    properties = {"city": {"type": "string"}, "days": {"type": ["integer", "null"]}}
    tools = [tool(parameters={"type": "object", "properties": properties})]
    text = "<tool_call>weather<arg_key>city</arg_key><arg_value>5</arg_value><arg_key>days</arg_key><arg_value>5</arg_value></tool_call>"
    await house.worker(say(text), **parsers("glm47", None))
    assert (await hear(house, tools=tools)).calls == [("weather", '{"city": "5", "days": 5}')]


async def test_a_call_in_reasoning_that_was_not_ended_is_a_call(house: Cluster) -> None:
    await house.worker(byte_by_byte(f"<think>I look.{CALL}"), **parsers())
    assert (await hear(house, tools=TOOLS)).said == ("", "I look.", [WEATHER], "tool_calls")
    assert (await hear(house)).said == ("", f"I look.{CALL}", [], "stop")


async def test_mistral_gets_ids_that_its_templates_take(house: Cluster) -> None:
    await house.worker(say('[TOOL_CALLS]weather[ARGS]{"city": "Köln"}'), **parsers("mistral", None))
    for stream in (False, True):
        heard = Heard(await house.client.chat("hi", tools=TOOLS, stream=stream))
        assert heard.said == ("", "", [WEATHER], "tool_calls")
        assert re.fullmatch("[A-Za-z0-9]{9}", heard.ids[0])


@pytest.mark.parametrize(("given", "is_kept"), [("aB3dE6gH9", True), ("call_0", False), ("aB3dE6gH90", False)])
async def test_mistrals_own_id_is_kept_where_its_templates_take_it(house: Cluster, given: str, is_kept: bool) -> None:
    text = '[TOOL_CALLS]weather[CALL_ID]%s[ARGS]{"city": "Köln"}'
    await house.worker(say(text % given), **parsers("mistral", None))
    heard = Heard(await house.client.chat("hi", tools=TOOLS))
    assert heard.said == ("", "", [WEATHER], "tool_calls")
    assert re.fullmatch("[A-Za-z0-9]{9}", heard.ids[0])
    assert (heard.ids[0] == given) is is_kept


async def test_a_call_that_breaks_is_text_in_one_piece_and_an_unfinished_call_in_a_stream(house: Cluster) -> None:
    broken = CALL[: CALL.index("Köln") + 2]
    await house.worker(say(broken, finish="length"), **parsers())
    unary = Heard(await house.client.chat("hi", tools=TOOLS))
    assert unary.said == (broken, "", [], "length")
    streamed = Heard(await house.client.chat("hi", tools=TOOLS, stream=True))
    assert streamed.said == ("", "", [("weather", '{"city": "Kö')], "length")


async def test_every_choice_has_calls_of_its_own(house: Cluster) -> None:
    await house.worker(say(CALL[:30], CALL[30:]), **parsers())
    unary = await house.client.chat("hi", tools=TOOLS, n=3)
    streamed = await house.client.chat("hi", tools=TOOLS, n=3, stream=True)
    heard = [Heard(answer, choice) for answer in (unary, streamed) for choice in range(3)]
    assert [one.said for one in heard] == [("", "", [WEATHER], "tool_calls")] * 6
    assert len({one for each in heard for one in each.ids}) == 6


async def test_a_stop_string_comes_before_the_parser(house: Cluster) -> None:
    await house.worker(say(f"{CALL}STOP{CALL}"), **parsers())
    assert (await hear(house, tools=TOOLS, stop="STOP")).calls == [WEATHER]


async def test_log_probabilities_cover_every_token_also_those_of_calls(house: Cluster) -> None:
    text = f"a{CALL}"

    async def script(body: Any, context: Any, sink: Any) -> None:
        for byte in text.encode():
            sink.send_tokens([byte], extra={"log_probs": [-0.5]})
        sink.send_tokens([], finish_reason="stop")

    await house.worker(script, **parsers())
    unary = await house.client.chat("hi", tools=TOOLS, logprobs=True)
    items = unary.json["choices"][0]["logprobs"]["content"]
    assert bytes(item["token_id"] for item in items).decode() == text
    streamed = await house.client.chat("hi", tools=TOOLS, logprobs=True, stream=True)
    told = [chunk["choices"][0]["logprobs"] or {"content": []} for chunk in streamed.chunks]
    assert [item for one in told for item in one["content"]] == items


async def test_extensions_cover_every_token(house: Cluster) -> None:
    await house.worker(byte_by_byte(f"a{CALL}"), **parsers())
    nvext = {"extra_fields": ["completion_token_ids", "stop_reason"]}
    streamed = await house.client.chat("hi", tools=TOOLS, stream=True, nvext=nvext)
    ids = [chunk.get("nvext", {}).get("completion_token_ids", []) for chunk in streamed.chunks]
    assert bytes(token for one in ids for token in one).decode() == f"a{CALL}"
    unary = await house.client.chat("hi", tools=TOOLS, nvext=nvext)
    assert bytes(unary.json["nvext"]["completion_token_ids"]).decode() == f"a{CALL}"


async def test_the_text_before_a_call_does_not_wait_for_it(house: Cluster) -> None:
    worker = await house.worker(**parsers())

    async def script(body: Any, context: Any, sink: Any) -> None:
        sink.send_tokens(list(b"Let me see.<tool_call>"))
        await worker.hold(body, context, sink)

    worker.script = script
    exchange = house.client.begin_chat("hi", tools=TOOLS, stream=True)
    await exchange.until(lambda one: b"Let me see." in one.body)
    exchange.disconnect()
    await worker.killed.wait()


PIECES = (
    *("<think>", "</think>", "<think", "\n\n", " ", "<tool_call>", "</tool_call>", "{", "[", ",", "größe", "a b"),
    *(CALL, f"<think>hm</think>{CALL}", '{"name": "time"}', '[{"name": "time", "parameters": {}}]', '{"city": "x"'),
)


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
async def test_any_output_in_any_batches_is_the_same_streamed_and_not(house: Cluster, choice: Any) -> None:
    worker = await house.worker(**parsers())
    dice = random.Random(f"any output {choice}")
    for _ in range(25):
        raw = "".join(dice.choices(PIECES, k=dice.randint(1, 8))).encode()
        answers = []
        for stream in (False, True):
            cuts = sorted(dice.choices(range(len(raw) + 1), k=dice.randint(0, 6)))
            batches = [list(raw[a:b]) for a, b in pairwise([0, *cuts, len(raw)])]
            worker.script = say(*batches)
            options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
            answer = await house.client.chat("hi", tools=TOOLS, tool_choice=choice, stream=stream, **options)
            usage = answer.chunks[-1]["usage"] if stream else answer.json["usage"]
            answers.append((Heard(answer).said, usage))
        assert answers[0] == answers[1], raw.decode()


# -- reasoning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_reasoning_tokens_are_counted_whatever_the_batches(house: Cluster, stream: bool, size: int) -> None:
    raw = "é <think>abcß</think>d".encode()
    await house.worker(say(*[list(raw[at : at + size]) for at in range(0, len(raw), size)]), **parsers())
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await house.client.chat("hi", stream=stream, **options)
    usage = answer.chunks[-1]["usage"] if stream else answer.json["usage"]
    assert usage["completion_tokens"] == len(raw)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("abcß</think>".encode())}


async def test_without_a_parser_no_reasoning_tokens_are_told(house: Cluster) -> None:
    await house.worker(say("<think>a</think>"), **parsers("hermes", None))
    answer = await house.client.chat("hi", tools=TOOLS)
    assert "completion_tokens_details" not in answer.json["usage"]


THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ("b", "a", [], "stop")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ("ab", "", [], "stop")),
        ({"reasoning_effort": "none"}, ("ab", "", [], "stop")),
        ({"thinking": True}, ("b", "a", [], "stop")),
    ],
)
async def test_reasoning_may_begin_in_the_prompt(
    house: Cluster, tmp_path: Path, fields: dict[str, Any], said: Any
) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING_TEMPLATE)
    await house.worker(say("a</think>b"), custom_template_path=template, **parsers())
    assert (await hear(house, **fields)).said == said


async def test_a_prompt_of_token_ids_is_looked_at_too(house: Cluster) -> None:
    await house.worker(say("a</think>b"), **parsers())
    ids = list(b"assistant\n<think>\n")
    assert (await hear(house, nvext={"token_data": ids})).said == ("b", "a", [], "stop")


async def test_a_parser_can_be_off_for_a_request_or_wait_to_be_switched_on(house: Cluster) -> None:
    await house.worker(say("a</think>b"), **parsers(None, "kimi_k25"))
    assert (await hear(house)).said == ("b", "a", [], "stop")
    assert (await hear(house, thinking=False)).said == ("a</think>b", "", [], "stop")
    await house.worker(say("a</think>b"), model="v3", **parsers(None, "deepseek_v3"))
    assert (await hear(house, model="v3")).said == ("a</think>b", "", [], "stop")
    assert (await hear(house, model="v3", thinking=True)).said == ("b", "a", [], "stop")


async def test_the_models_default_thinking_mode_counts(house: Cluster) -> None:
    await house.worker(
        say("a</think>b"), **parsers(None, "deepseek_v3", runtime_data={"default_thinking_mode": "enabled"})
    )
    assert (await hear(house)).reasoning == "a"


async def test_reasoning_becomes_content_when_that_would_be_empty(house: Cluster) -> None:
    await house.worker(say("<think>a", " b"), **parsers())
    asked = {"chat_template_args": {"force_nonempty_content": True}}
    assert (await hear(house, **asked)).said == ("a b", "", [], "stop")
    assert (await hear(house)).said == ("", "a b", [], "stop")


async def test_a_stream_that_holds_reasoning_back_is_kept_alive_even_where_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.frontend.pipeline.inference.KEEP_ALIVE_SECONDS", 0.02)
    async with cluster(tmp_path, keep_alive_seconds=None, peek_seconds=0) as house:
        worker = await house.worker(**parsers())

        async def script(body: Any, context: Any, sink: Any) -> None:
            sink.send_tokens(list(b"<think>hm"))
            await worker.hold(body, context, sink)

        worker.script = script
        exchange = house.client.begin_chat("hi", stream=True, chat_template_args={"force_nonempty_content": True})
        await exchange.until(lambda one: b": keep-alive" in one.body)
        assert b"hm" not in exchange.body
        exchange.disconnect()
        await exchange.done()


async def test_the_reasoning_member_can_have_another_name(tmp_path: Path) -> None:
    async with cluster(tmp_path, reasoning_field_name="reasoning") as house:
        await house.worker(say("<think>a</think>b"), **parsers())
        message = (await house.client.chat("hi")).json["choices"][0]["message"]
        assert message == {"content": "b", "refusal": None, "role": "assistant", "reasoning": "a"}
        streamed = await house.client.chat("hi", stream=True)
        assert streamed.chunks[0]["choices"][0]["delta"]["reasoning"] == "a"


async def test_calls_and_reasoning_are_dispatched_in_events_of_their_own_when_asked(tmp_path: Path) -> None:
    async with cluster(tmp_path, streaming_tool_dispatch=True, streaming_reasoning_dispatch=True) as house:
        await house.worker(byte_by_byte(f"<think>ab</think>{CALL}"), **parsers())
        answer = await house.client.chat("hi", tools=TOOLS, stream=True)
        events = dict(
            block.removeprefix("event: ").split("\ndata: ") for block in answer.events if block.startswith("event: ")
        )
        assert json.loads(events["reasoning_dispatch"]) == {"index": 0, "reasoning_content": "ab"}
        call = json.loads(events["tool_call_dispatch"])
        assert call["choice_index"] == 0
        assert call["tool_call"]["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
        assert Heard(answer).ids == [call["tool_call"]["id"]]


# -- forced calls and formats --------------------------------------------------------------------------------------------


def guidance(house: Cluster) -> Any:
    return house.workers[0].requests[-1]["sampling_options"]["guided_decoding"]


@pytest.mark.parametrize("config", [parsers(), parsers(None, None)])
async def test_a_required_call_guides_the_engine_and_reads_its_json(house: Cluster, config: dict[str, Any]) -> None:
    await house.worker(say('[{"name": "weather", "parameters": {"city": "Köln"}}]'), **config)
    assert (await hear(house, tools=TOOLS, tool_choice="required")).said == ("", "", [WEATHER], "tool_calls")
    schema = guidance(house)["json"]
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert schema["items"]["anyOf"][1] == {
        "properties": {"name": {"type": "string", "enum": ["time"]}, "parameters": CLOSED},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


async def test_a_named_call_guides_with_its_parameters_and_streams_its_arguments(house: Cluster) -> None:
    await house.worker(byte_by_byte('{"city": "Köln"}'), **parsers())
    assert (await hear(house, tools=TOOLS, tool_choice=NAMED)).said == ("", "", [WEATHER], "stop")
    assert guidance(house) == {"json": CLOSED, **TIGHT}
    streamed = await house.client.chat("hi", tools=TOOLS, tool_choice=NAMED, stream=True)
    deltas = [call for chunk in streamed.chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert deltas[0]["function"] == {"name": "weather", "arguments": '{"city":'}
    assert len(deltas) > 3
    assert [set(delta) for delta in deltas[1:]] == [{"index", "function"}] * (len(deltas) - 1)


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_forced_answer_that_is_no_json_is_content(house: Cluster, choice: Any) -> None:
    await house.worker(say("No, I will not."), **parsers())
    assert (await hear(house, tools=TOOLS, tool_choice=choice)).said == ("No, I will not.", "", [], "stop")


async def test_a_named_choice_drops_a_call_of_another_tool(house: Cluster) -> None:
    await house.worker(say(CALL), **parsers())
    other = {"type": "function", "function": {"name": "time"}}
    assert (await hear(house, tools=TOOLS, tool_choice=other)).said == ("", "", [], "stop")
    assert (await hear(house, tools=TOOLS, tool_choice=NAMED)).calls == [WEATHER]


OTHER_NAMED = {"type": "function", "function": {"name": "time"}}


@pytest.mark.parametrize(
    ("names", "text", "said"),
    [
        (("harmony", "gpt_oss"), HARMONY, ("", "hm", [], "stop")),
        (("hermes", "qwen3"), f"<think>I look.{CALL}", ("", "I look.", [], "stop")),
    ],
)
async def test_a_named_choice_drops_other_calls_wherever_they_are_found(
    house: Cluster, names: tuple[str, str], text: str, said: Any
) -> None:
    await house.worker(say(text), **parsers(*names))
    assert (await hear(house, tools=TOOLS, tool_choice=OTHER_NAMED)).said == said
    assert (await hear(house, tools=TOOLS, tool_choice=NAMED)).calls == [WEATHER]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}'),
        ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln"}}]'),
        ("pythonic", '[weather(city="Köln")]'),
    ],
)
async def test_a_required_call_may_have_marks_that_begin_as_json_does(house: Cluster, name: str, text: str) -> None:
    worker = await house.worker(**parsers(name, None))
    for script in (say(text), byte_by_byte(text)):
        worker.script = script
        for stream in (False, True):
            heard = Heard(await house.client.chat("hi", tools=TOOLS, tool_choice="required", stream=stream))
            assert heard.said == ("", "", [WEATHER], "tool_calls")


async def test_an_answer_that_was_filtered_was_cut_off(house: Cluster) -> None:
    await house.worker(say("<function=weather>\n", finish="content_filter"), **parsers("qwen3_coder", None))
    unary = Heard(await house.client.chat("hi", tools=TOOLS))
    assert unary.said == ("<function=weather>\n", "", [], "content_filter")


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}


@pytest.mark.parametrize(
    ("fields", "waits"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": NAMED}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": JSON_SCHEMA}, True),
        ({"guided_regex": "a+"}, True),
        ({"response_format": JSON_SCHEMA, "thinking": False}, False),
        ({"tools": TOOLS}, False),
    ],
)
async def test_guidance_waits_for_a_model_that_may_reason(house: Cluster, fields: dict[str, Any], waits: bool) -> None:
    worker = await house.worker(say("{}"), **parsers())
    await house.client.chat("hi", chat_template_kwargs={"a": 1}, **fields)
    (request,) = worker.requests
    assert request.get("require_reasoning", False) is waits
    kwargs = request["extra_args"]["reasoning_parser_kwargs"]["chat_template_kwargs"]
    assert kwargs["a"] == 1
    assert kwargs.get("enable_thinking") is (False if "thinking" in fields else None)


async def test_named_arguments_cut_off_by_the_limit_are_told_as_far_as_they_go(house: Cluster) -> None:
    await house.worker(say('{"city": "Kö', finish="length"), **parsers())
    heard = await hear(house, tools=TOOLS, tool_choice=NAMED)
    assert heard.said == ("", "", [("weather", '{"city": "Kö')], "length")


async def test_guidance_waits_for_reasoning_and_a_json_answer_is_none(house: Cluster, tmp_path: Path) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING_TEMPLATE)
    worker = await house.worker(say('a</think>{"city": "Köln"}'), custom_template_path=template, **parsers())
    heard = await hear(house, tools=TOOLS, tool_choice=NAMED)
    assert heard.said == ("", "a", [WEATHER], "stop")
    assert worker.requests[-1]["require_reasoning"] is True
    worker.script = say('{"city": "Köln"}')  # from an engine that guides its output from the first token on
    assert (await hear(house, tools=TOOLS, tool_choice=NAMED)).said == ("", "", [WEATHER], "stop")
    assert (await hear(house, response_format={"type": "json_object"})).content == '{"city": "Köln"}'
    await house.client.chat("hi", response_format={"type": "json_object"}, thinking=False)
    assert "require_reasoning" not in worker.requests[-1]
    await house.client.chat("hi")
    assert "require_reasoning" not in worker.requests[-1]


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}, CLOSED),
    ],
)
async def test_a_response_format_guides_the_engine(house: Cluster, fields: dict[str, Any], schema: Any) -> None:
    await house.worker(say('{"city": "Köln"}'), **parsers())
    assert (await hear(house, response_format=fields)).said == ('{"city": "Köln"}', "", [], "stop")
    assert guidance(house) == {"json": schema, **TIGHT}
    await house.client.chat("hi", response_format=fields, tools=TOOLS, tool_choice=NAMED)
    assert guidance(house) == {"json": CLOSED, **TIGHT}  # a forced choice drops the format
    await house.client.chat("hi", response_format={"type": "text"})
    assert guidance(house) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [tool("time")]}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": TOOLS, "guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
)
async def test_what_cannot_be_is_a_400_that_names_the_field(house: Cluster, fields: dict[str, Any], param: str) -> None:
    await house.worker(**parsers())
    answer = await house.client.chat("hi", **fields)
    assert answer.status == 400
    assert answer.json["error"]["param"] == param


# -- tools in the prompt, marks among the tokens -------------------------------------------------------------------------

TOOL_TEMPLATE = (
    "{% if tools %}TOOLS:{% for t in tools %}{{ t.function.name }},{% endfor %}{% endif %}"
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city or 'text' }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(("excludes", "shown"), [(True, b""), (False, b"TOOLS:weather,time,")])
async def test_tool_choice_none_hides_the_tools_unless_told_otherwise(
    house: Cluster, tmp_path: Path, excludes: bool, shown: bytes
) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    config = parsers(exclude_tools_when_tool_choice_none=excludes)
    worker = await house.worker(custom_template_path=template, **config)
    await house.client.chat("hi", tools=TOOLS)
    assert bytes(worker.requests[-1]["token_ids"]) == b"TOOLS:weather,time,"
    await house.client.chat("hi", tools=TOOLS, tool_choice="none")
    assert bytes(worker.requests[-1]["token_ids"]) == shown


@pytest.mark.parametrize(("form", "shown"), [("json_string", b"K\xc3\xb6ln"), ("json_object", b"K\xc3\xb6ln")])
async def test_earlier_calls_reach_the_template_in_the_form_it_wants(
    house: Cluster, tmp_path: Path, form: str, shown: bytes
) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    worker = await house.worker(custom_template_path=template, **parsers(tool_call_arguments_format=form))
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    assert (await house.client.chat(messages=messages)).status == 200
    assert bytes(worker.requests[-1]["token_ids"]) == shown


async def test_marks_that_are_special_or_ending_tokens_still_reach_the_parsers(house: Cluster, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    marks = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    start = max(entry["id"] for entry in tokenizer["added_tokens"])
    start = max([start, *tokenizer["model"]["vocab"].values()]) + 1
    pattern = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**pattern, "id": start + at, "content": mark, "special": True} for at, mark in enumerate(marks)
    ]
    path.write_text(json.dumps(tokenizer))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, start + 1]}))
    worker = await house.worker(directory=directory, **parsers())
    text = house.frontend.models.lookup("m")
    assert text is not None
    ids = text.text.tokenizer.encode(f"<think>hm</think>{CALL}")
    assert start + 1 in ids
    other = next(entry["id"] for entry in tokenizer["added_tokens"] if entry["special"] and entry["id"] < start)
    worker.script = say([other, *ids[:2], other, *ids[2:], other], finish="stop")
    heard = await hear(house, tools=TOOLS)
    assert heard.said == ("", "hm", [WEATHER], "tool_calls")
    request = worker.requests[-1]
    assert request["output_options"]["skip_special_tokens"] is False
    assert request["stop_conditions"]["stop_token_ids_visible"] == [start + 1]
    assert request["stop_conditions"]["stop_token_ids_hidden"] == [1]
    await house.client.chat("hi", tools=TOOLS, tool_choice="none", chat_template_args={})
    assert worker.requests[-1]["stop_conditions"]["stop_token_ids_visible"] is None


# -- models of other kinds -----------------------------------------------------------------------------------------------


async def test_a_parser_this_version_lacks_is_told_in_the_log_and_the_text_stays(
    house: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await house.worker(say(CALL), **parsers("of_tomorrow", "of_tomorrow"))
    assert caplog.text.count("which is not in this version: its output is shown as it comes") == 2
    assert (await hear(house, tools=TOOLS)).said == (CALL, "", [], "stop")


async def speak(prompt: str) -> AsyncIterator[str]:
    text = f"<think>hm</think>Moment.\n{CALL}"
    for at in range(0, len(text), 5):
        yield text[at : at + 5]


async def test_a_model_that_takes_text_is_parsed_too(house: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0")
    runtime = memory_runtime()
    flags = ["--namespace", "ns", "--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3"]
    engine, config = await engine_class(speak, "m").from_args(flags)
    worker = Worker(engine, config, runtime=runtime, embedded=True)
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await house.frontend.models.wait_for(lambda: house.frontend.models.lookup("m") is not None)
        assert (await hear(house, tools=TOOLS)).said == ("Moment.\n", "hm", [WEATHER], "tool_calls")
        usage = (await house.client.chat("hi", tools=TOOLS)).json["usage"]
        assert "completion_tokens_details" not in usage  # there are no tokens to tell apart
    finally:
        worker.request_stop()
        await running
        await runtime.aclose()


# -- earlier turns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reasoning", "kept"), [("qwen3", "<think>\n2 and 2\n</think>\n\n"), (None, "")])
async def test_earlier_reasoning_and_calls_reach_the_prompt(house: Cluster, reasoning: str | None, kept: str) -> None:
    worker = await house.worker(**parsers(None, reasoning))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert (await house.client.chat("", messages=messages)).status == 200
    prompt = bytes(worker.requests[0]["token_ids"]).decode()
    assert prompt == f"user: 2+2?\nassistant: {kept}4\nassistant: \nassistant: "


async def test_the_letter_of_a_schema_is_a_setting(tmp_path: Path) -> None:
    async with cluster(tmp_path, open_guided_objects=True) as house:
        await house.worker(say("{}"), **parsers())
        await house.client.chat("hi", tools=TOOLS, tool_choice=NAMED, guided_decoding_backend="x")
        assert guidance(house) == {"json": PARAMETERS, "backend": "x", **TIGHT}
        await house.client.chat("hi", tools=TOOLS, tool_choice="required")
        (item, _) = guidance(house)["json"]["items"]["anyOf"]
        assert item["additionalProperties"] is False  # the wrapper is ours
        assert item["properties"]["parameters"] == PARAMETERS


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.process  # computes for a second and more
async def test_a_forced_call_cut_off_at_any_place_is_never_content(house: Cluster, choice: Any, native: bool) -> None:
    arguments = '{"city": "Köln"}'
    forced = arguments if choice == NAMED else f'[{{"name": "weather", "parameters": {arguments}}}]'
    text = CALL if native else forced
    worker = await house.worker(**parsers())
    longest = ""
    for length in range(1, len(text)):
        worker.script = say(text[:length], finish="length")
        heard = await hear(house, tools=TOOLS, tool_choice=choice)
        assert (heard.content, heard.reason) == ("", "length")
        if heard.calls:
            ((name, said),) = heard.calls
            assert name == "weather"
            assert arguments.startswith(said)
            assert len(said) >= len(longest)
            longest = said
    assert len(longest) >= len(arguments) - 1


# -- tools beside a schema of the answer ------------------------------------------------------------------------------

SHAPE = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SHAPE}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", ["hermes", "harmony", None])
async def test_with_tools_and_a_schema_an_answer_is_calls_or_the_schema(
    house: Cluster, tools: str | None, stream: bool
) -> None:
    calls = json.dumps(
        [{"name": "weather", "parameters": {"city": "Köln"}}, {"name": "time", "parameters": {}}], ensure_ascii=False
    )
    worker = await house.worker(byte_by_byte(calls), **parsers(tools, None))
    found = Heard(await house.client.chat("hi", tools=TOOLS, response_format=FORM, stream=stream))
    assert (found.content, found.calls, found.reason) == ("", [WEATHER, ("time", "{}")], "tool_calls")
    shape, array = worker.requests[-1]["sampling_options"]["guided_decoding"]["json"]["anyOf"]
    assert shape == {**SHAPE, "additionalProperties": False}
    assert [one["properties"]["name"]["enum"] for one in array["items"]["anyOf"]] == [["weather"], ["time"]]


@pytest.mark.parametrize("text", ['{"answer": "[1]"}', '{"name": "weather", "parameters": {}}', "[1, 2]", "[]"])
async def test_an_answer_of_the_schema_is_content_beside_tools(house: Cluster, text: str) -> None:
    await house.worker(byte_by_byte(text), **parsers())
    for stream in (False, True):
        found = Heard(await house.client.chat("hi", tools=TOOLS, response_format=FORM, stream=stream))
        assert (found.content, found.calls, found.reason) == (text, [], "stop")


async def test_a_call_beside_a_schema_that_is_cut_off_is_no_text_and_ends_at_length(house: Cluster) -> None:
    await house.worker(byte_by_byte('[{"name": "weather", "param', finish="length"), **parsers())
    for stream in (False, True):
        found = Heard(await house.client.chat("hi", tools=TOOLS, response_format=FORM, stream=stream))
        assert (found.content, found.reason) == ("", "length")
