from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.pipeline.parsing import structural_tag
from dynamo.protocol.openai.chat_options import chat_options
from dynamo.protocol.openai.requests import parse_chat
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.reference.structural_tag import structural_grammar
from dynamo.text.formats.tool_set import ToolSet
from dynamo.text.formats.tools import TOOL_FORMATS
from dynamo.text.output import Joined, JoinedCall, joined
from support.cases import each_case
from support.frontend_cluster import cluster, say

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
F = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
G = {"type": "function", "function": {"name": "g", "parameters": PARAMETERS, "strict": True}}
NAMED = {"type": "function", "function": {"name": "f"}}
ON = {"structural_tag_mode": "on"}
ALWAYS: dict[str, Any] = {**ON, "structural_tag_scope": "always"}


def tag(config: dict[str, Any], **fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [F], **fields}
    request = parse_chat(json.dumps(body).encode())
    return structural_tag(chat_options(request), ModelRuntimeConfig(**config), TOOL_FORMATS["hermes"])


def schemas(found: Any) -> list[Any]:
    return [one["content"]["json_schema"] for one in found["format"]["tags"]]


@each_case("name", [name for name, form in TOOL_FORMATS.items() if form.call_tag is not None])
def test_the_tag_of_every_format_that_has_one_writes_a_call_of_that_format(name: str) -> None:
    form = TOOL_FORMATS[name]
    assert form.call_tag is not None
    found = form.call_tag("f", PARAMETERS)
    assert found["begin"].startswith(form.marks[0])  # which triggers the tag
    text = f'{found["begin"]}{{"x": 1}}{found["end"]}'
    reader = form.parser(ToolSet([F]))
    answer = joined([*reader.push(text), *reader.finish()])
    assert answer == Joined("", "", [JoinedCall("f", '{"x": 1}', is_complete=True)])


def test_a_worker_that_did_not_opt_in_gets_none() -> None:
    assert tag({}) is None
    assert tag({}, tool_choice="required") is None


@each_case(
    ("config", "fields", "expected"),
    [
        (ON, {}, None),
        (ON, {"tools": [F, G]}, [{"type": "object"}, PARAMETERS]),  # a strict tool is reason enough
        (ALWAYS, {}, [{"type": "object"}]),
        ({**ALWAYS, "structural_tag_schema": "strict"}, {}, [PARAMETERS]),
        ({"structural_tag": {"scope": "always", "schema": "auto"}}, {}, [{"type": "object"}]),
        ({"structural_tag": {"scope": "auto"}}, {}, None),
        (ALWAYS, {"guided_regex": "a"}, None),
        (ON, {"tool_choice": "required"}, [PARAMETERS]),
        (ON, {"tool_choice": "required", "response_format": {"type": "json_object"}}, [PARAMETERS]),
        (ON, {"tool_choice": NAMED, "tools": [F, G]}, [PARAMETERS]),
    ],
)
def test_when_a_tag_applies_and_how_strict_it_is(config: dict[str, Any], fields: dict[str, Any], expected: Any) -> None:
    found = tag(config, **fields)
    assert (None if found is None else schemas(found)) == expected


@each_case(
    ("fields", "must_come", "is_one"),
    [
        ({}, False, False),
        ({"parallel_tool_calls": False}, False, True),
        ({"tool_choice": "required"}, True, False),
        ({"tool_choice": NAMED}, True, True),
    ],
)
def test_how_many_calls_a_tag_asks_for(fields: dict[str, Any], must_come: bool, is_one: bool) -> None:
    form = tag(ALWAYS, **fields)["format"]
    assert (form["at_least_one"], form["stop_after_first"]) == (must_come, is_one)


def call(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@each_case(
    ("choice", "text", "fits"),
    [
        ("required", call('{"x": 1}'), True),
        ("required", "Let me see.\n" + call('{"x": 1}'), False),
        ("required", call('{"x": 1}') + "\n" + call('{"x": 2}'), True),
        ("auto", "Let me see.\n" + call('{"x": 1}') + "\nDone.", True),
        ("required", "Let me see.", False),
        ("required", call('{"x": "a"}'), False),
        ("required", call('{"x": 1}', "h"), False),
        ("auto", "Let me see.", True),
        ("auto", call('{"y": "any"}'), True),
        ("auto", "<tool_call>oops", False),
    ],
)
def test_an_engine_that_follows_the_tag_writes_what_the_parser_reads(choice: str, text: str, fits: bool) -> None:
    llguidance = pytest.importorskip("llguidance")
    grammar = structural_grammar(tag(ALWAYS, tool_choice=choice), {})
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(grammar))
    fed = all(matcher.consume_token(byte) for byte in text.encode())
    assert (fed and matcher.is_accepting()) is fits


SHAPE = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SHAPE}}


@each_case(
    ("text", "fits"),
    [
        ('{"a": "x"}', True),
        (call('{"x": 1}', "g"), True),
        (call('{"y": 1}'), True),  # a tool that is not strict
        (call('{"y": 1}', "g"), False),
        ('{"b": "x"}', False),
        ("I think so", False),
    ],
)
def test_an_answer_is_a_call_or_has_the_shape_that_was_requested(text: str, fits: bool) -> None:
    llguidance = pytest.importorskip("llguidance")
    found = tag(ON, tools=[F, G], response_format=FORM)
    grammar = structural_grammar(found, {})
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(grammar))
    fed = all(matcher.consume_token(byte) for byte in text.encode())
    assert (fed and matcher.is_accepting()) is fits


async def test_the_engine_gets_the_tag_in_place_of_a_schema_and_its_call_is_read(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        config = ModelRuntimeConfig(tool_call_parser="hermes", **ALWAYS)
        worker = await house.worker(say(call('{"x": 1}')), runtime_config=config)
        answer = await house.client.chat("hi", tools=[F], tool_choice="required", guided_decoding_backend="b")
        (made,) = answer.json["choices"][0]["message"]["tool_calls"]
        assert made["function"] == {"name": "f", "arguments": '{"x": 1}'}
        guided = worker.requests[-1]["sampling_options"]["guided_decoding"]
        assert guided == {"structural_tag": tag(ALWAYS, tool_choice="required"), "backend": "b"}
        await house.client.chat("hi", tools=[F], tool_choice="none")
        assert worker.requests[-1]["sampling_options"]["guided_decoding"] is None
