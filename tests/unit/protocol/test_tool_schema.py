from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo.protocol.openai.chat_options import thinking_mode
from dynamo.protocol.openai.requests import parse_chat, template_messages, to_worker_fields
from dynamo.protocol.openai.shapes import ChatRequest
from dynamo.protocol.openai.tool_schema import required_schema
from support.cases import each_case


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(json.dumps(body).encode())


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


def guided(**fields: Any) -> Any:
    return to_worker_fields(chat(**fields)).sampling_options.guided_decoding


A = {"type": "object", "properties": {"x": {"type": "integer"}}}
ANY = {"type": "object", "properties": {}}


def test_a_required_call_is_an_array_of_calls() -> None:
    assert guided(tools=[tool("a", A), tool("b")], tool_choice="required") == {
        "json": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "anyOf": [
                    {
                        "properties": {"name": {"type": "string", "enum": ["a"]}, "parameters": A},
                        "required": ["name", "parameters"],
                        "additionalProperties": False,
                    },
                    {
                        "properties": {"name": {"type": "string", "enum": ["b"]}, "parameters": ANY},
                        "required": ["name", "parameters"],
                        "additionalProperties": False,
                    },
                ],
            },
        }
    }


def test_without_parallel_calls_there_is_only_one() -> None:
    fields = {"tools": [tool("a")], "tool_choice": "required", "parallel_tool_calls": False}
    assert guided(**fields)["json"]["maxItems"] == 1


@pytest.mark.parametrize(("name", "schema"), [("a", A), ("b", ANY)])
def test_a_named_call_is_its_parameters(name: str, schema: Any) -> None:
    choice = {"type": "function", "function": {"name": name}}
    assert guided(tools=[tool("a", A), tool("b")], tool_choice=choice, guided_decoding_backend="x") == {
        "json": schema,
        "backend": "x",
    }


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_call_that_may_come_guides_nothing(choice: Any) -> None:
    assert guided(tools=[tool("a", A)], tool_choice=choice) is None


def test_a_call_may_come_in_place_of_a_form_unless_there_is_no_choice() -> None:
    form = {"type": "json_object"}
    for choice in ("auto", None):
        shape, calls = guided(tools=[tool("a", A)], tool_choice=choice, response_format=form)["json"]["anyOf"]
        assert shape == {"type": "object"}
        assert calls == required_schema([tool("a", A)])
    assert guided(tools=[tool("a", A)], tool_choice="none", response_format=form) == {"json": {"type": "object"}}
    assert guided(tools=[tool("a", A)], response_format=form, guided_json=A) == {"json": A}


def test_references_of_a_form_beside_calls_lead_where_they_led() -> None:
    shape = {"$ref": "#/$defs/T", "$defs": {"T": {"type": "object", "properties": {"t": {"$ref": "#"}}}}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": shape}}
    parameters = {"type": "object", "properties": {"self": {"$ref": "#"}}}
    found = guided(tools=[tool("a", parameters)], response_format=form)["json"]
    assert found["anyOf"][0] == {"$ref": "#/$defs/T"}
    assert found["$defs"]["T"]["properties"]["t"] == {"$ref": "#/anyOf/0"}
    place = found["anyOf"][1]["items"]["anyOf"][0]["properties"]["parameters"]["properties"]["self"]["$ref"]
    assert place == "#/anyOf/1/items/anyOf/0/properties/parameters"


def test_a_forced_call_drops_the_response_format() -> None:
    assert (
        guided(tools=[tool("a")], tool_choice="required", response_format={"type": "json_object"})["json"]["type"]
        == "array"
    )


def definitions(kind: str, **extra: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/P"}, "self": {"$ref": "#"}, "q": {"$ref": "#/properties/p"}, **extra},
        "$defs": {"P": {"type": kind, "anyOf": [{"$ref": "#/$defs/P"}]}},
    }


def test_definitions_move_to_the_root_and_references_follow() -> None:
    schema = required_schema([tool("a", definitions("string")), tool("b", definitions("integer"))])
    assert schema["$defs"] == {
        "P": {"type": "string", "anyOf": [{"$ref": "#/$defs/P"}]},
        "b.P": {"type": "integer", "anyOf": [{"$ref": "#/$defs/b.P"}]},
    }
    first, second = [one["properties"]["parameters"] for one in schema["items"]["anyOf"]]
    assert first["properties"] == {
        "p": {"$ref": "#/$defs/P"},
        "self": {"$ref": "#/items/anyOf/0/properties/parameters"},
        "q": {"$ref": "#/items/anyOf/0/properties/parameters/properties/p"},
    }
    assert second["properties"]["p"] == {"$ref": "#/$defs/b.P"}
    assert "$defs" not in first


def test_definitions_that_are_the_same_are_shared_and_odd_references_are_left_alone() -> None:
    leaf = {"type": "object", "definitions": {"a/b": {"type": "null"}}, "$ref": "#/definitions/a~1b"}
    remote = {"type": "object", "properties": {"r": {"$ref": "https://x/y#/z"}, "n": {"$ref": "#anchor"}}}
    schema = required_schema([tool("a", leaf), tool("b", leaf), tool("c", remote)])
    assert schema["definitions"] == {"a/b": {"type": "null"}}
    assert [one["properties"]["parameters"].get("$ref") for one in schema["items"]["anyOf"]] == [
        "#/definitions/a~1b",
        "#/definitions/a~1b",
        None,
    ]
    assert schema["items"]["anyOf"][2]["properties"]["parameters"] == remote


def test_the_clients_tools_are_not_changed() -> None:
    request = chat(tools=[tool("a", definitions("string"))], tool_choice="required")
    to_worker_fields(request)
    assert request.tools == [tool("a", definitions("string"))]


def test_arguments_of_earlier_calls_become_objects_when_the_template_wants_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    request = chat(messages=messages)
    assert template_messages(request) == request.messages
    decoded = template_messages(request, as_objects=True)
    assert decoded[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": [1]}}
    assert request.messages == messages


@pytest.mark.parametrize("spelling", ['{"x": ["é", 1]}', {"x": ["é", 1]}])
def test_arguments_sent_as_an_object_are_those_sent_as_text(spelling: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": spelling}}
    request = chat(messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}])
    for as_objects, expected in ((False, '{"x": ["é", 1]}'), (True, {"x": ["é", 1]})):
        assert (
            template_messages(request, as_objects=as_objects)[1]["tool_calls"][0]["function"]["arguments"] == expected
        )
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == spelling


@pytest.mark.parametrize("empty", ["", "  ", "null", None, "{}", {}])
def test_empty_arguments_of_earlier_calls_are_an_empty_object(empty: Any) -> None:
    call: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": empty}}
    request = chat(messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}])
    shown = [template_messages(request, as_objects=form)[1]["tool_calls"][0]["function"] for form in (True, False)]
    assert [function["arguments"] for function in shown] == [{}, "{}"]
    del call["function"]["arguments"]
    assert template_messages(request, as_objects=True)[1]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("sent", "text"), [('{"x": ', '{"x": '), ("[1]", "[1]"), ([1], "[1]"), (7, "7"), ("NaN", "NaN"), ("{" * 5000,) * 2]
)
def test_arguments_of_earlier_calls_that_are_no_object_are_shown_as_they_are(sent: Any, text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": sent}}
    request = chat(messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}])
    for as_objects in (True, False):
        assert template_messages(request, as_objects=as_objects)[1]["tool_calls"][0]["function"]["arguments"] == text
    unshown = template_messages(request, as_objects=True, takes_raw_text=False)
    assert unshown[1]["tool_calls"][0]["function"]["arguments"] == {}


@each_case(
    ("fields", "mode"),
    [
        ({}, "model"),
        ({"thinking": True}, "enabled"),
        ({"thinking": {"type": "adaptive"}}, "adaptive"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "disabled"),
        ({"chat_template_args": {"thinking_mode": "deep"}}, "deep"),
        ({"reasoning_effort": "low"}, "enabled"),
        ({"reasoning_effort": "none"}, "disabled"),
        ({"reasoning_effort": "none", "thinking": True}, "enabled"),
    ],
)
def test_who_decides_whether_the_model_thinks(fields: dict[str, Any], mode: str) -> None:
    assert thinking_mode(chat(**fields), default="model") == mode
