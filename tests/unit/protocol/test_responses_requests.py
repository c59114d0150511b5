"""Items and tools of a Responses request, as a chat request has them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.shapes import NamedToolChoice
from dynamo.protocol.responses.items import UNSEEN_IMAGE, pack_reasoning
from dynamo.protocol.responses.lowering import (
    ResponsesRequest,
    count_old_turns,
    decode_responses,
    validate_responses,
    without_old_turns,
)
from support.cases import each_case

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1}'}


def request(*, ignores: bool = False, **members: Any) -> ResponsesRequest:
    found = decode_responses(json.dumps({"model": "m", "input": "hi", **members}).encode(), ignore_unsupported=ignores)
    validate_responses(found)
    return found


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(name: str, arguments: Any, **members: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, **members, "tool_calls": [call]}


ITEMS: list[tuple[list[Any], list[dict[str, Any]]]] = [
    ([user("a")], [user("a")]),
    ([{"type": "message", "status": None, **user("a")}], [user("a")]),
    ([user([{"type": "input_text", "text": "a"}])], [user("a")]),
    (
        [user([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])],
        [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
    ),
    (
        [{"role": "developer", "content": "a"}, {"role": "system", "content": "b"}, user("c")],
        [{"role": "system", "content": "a\n\nb"}, user("c")],
    ),
    (
        [user("a"), {"role": "developer", "content": [{"type": "input_text", "text": "b"}]}],
        [user("a"), {"role": "system", "content": "b"}],
    ),
    (
        [user("a"), {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}],
        [user("a"), {"role": "assistant", "content": "bc"}],
    ),
    ([user("a"), CALL], [user("a"), called("f", '{"a":1}')]),
    ([user("a"), {**CALL, "arguments": ""}], [user("a"), called("f", "{}")]),
    ([user("a"), {**CALL, "arguments": None}], [user("a"), called("f", "{}")]),
    ([user("a"), {**CALL, "arguments": '{"a"'}], [user("a"), called("f", '{"a"')]),
    ([user("a"), {**CALL, "arguments": "[1]"}], [user("a"), called("f", "[1]")]),
    ([user("a"), {**CALL, "arguments": '{"a"', "status": "incomplete"}], [user("a")]),
    (
        [user("a"), {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'x"y'}],
        [user("a"), called("patch", '{"input": "x\\"y"}')],
    ),
    (
        [user("a"), {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"command": ["ls"]}}],
        [user("a"), called("local_shell", '{"command": ["ls"]}')],
    ),
    (
        [user("a"), {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, CALL],
        [user("a"), called("f", '{"a":1}', reasoning_content="s")],
    ),
    (
        [
            user("a"),
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "s"}],
                "content": [{"type": "reasoning_text", "text": "t"}],
            },
            {"role": "assistant", "content": "b"},
        ],
        [user("a"), {"role": "assistant", "content": "b", "reasoning_content": "t"}],
    ),
    (
        [user("a"), {"type": "reasoning", "summary": [], "encrypted_content": pack_reasoning("p")}],
        [user("a"), {"role": "assistant", "content": None, "reasoning_content": "p"}],
    ),
    (
        [
            user("a"),
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
            {"role": "assistant", "content": "b"},
        ],
        [user("a"), {"role": "assistant", "content": "b"}],
    ),
    (
        [
            user("a"),
            CALL,
            {**CALL, "call_id": "d"},
            {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "1"}] * 2},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "2"},
        ],
        [
            user("a"),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    called("f", '{"a":1}')["tool_calls"][0],
                    {**called("f", '{"a":1}')["tool_calls"][0], "id": "d"},
                ],
            },
            {"role": "tool", "tool_call_id": "d", "content": "11"},
            {"role": "tool", "tool_call_id": "c", "content": "2"},
        ],
    ),
    (
        [
            user("a"),
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:,"}],
            },
        ],
        [user("a"), {"role": "tool", "tool_call_id": "c", "content": "x" + UNSEEN_IMAGE}],
    ),
    (
        [user("a"), {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x", "stderr": ""}]}],
        [user("a"), {"role": "tool", "tool_call_id": "c", "content": '[{"stdout": "x", "stderr": ""}]'}],
    ),
    (
        [
            user(
                [
                    {
                        "type": "input_file",
                        "filename": "n.txt",
                        "file_data": "data:text/plain;base64," + base64.b64encode(b"t").decode(),
                    }
                ]
            )
        ],
        [user("n.txt:\nt")],
    ),
    (
        [
            user("a"),
            {"type": "web_search_call"},
            {"type": "compaction"},
            {"type": "new"},
            {"type": "item_reference", "id": "x"},
        ],
        [user("a")],
    ),
]


@each_case("number", range(len(ITEMS)))
def test_items_become_messages(number: int) -> None:
    items, messages = ITEMS[number]
    assert request(input=items).messages == messages


def test_instructions_stand_first_and_may_be_items() -> None:
    system = {"role": "system", "content": "a\n\nb"}
    assert request(instructions="a", input=[{"role": "developer", "content": "b"}, user("c")]).messages == [
        system,
        user("c"),
    ]
    listed = [{"role": "developer", "content": "a"}, {"role": "developer", "content": "b"}]
    assert request(instructions=listed, input=[]).messages == [system]


def test_a_conversation_that_holds_earlier_items() -> None:
    found = request(instructions="i", input=[user("b")])
    found.with_history([user("a"), {"role": "assistant", "content": "x"}], {})
    assert [message["content"] for message in found.messages] == ["i", "a", "x", "b"]
    assert found.paths == ["instructions", "previous_response_id[0]", "previous_response_id[1]", "input[0]"]


def test_the_oldest_turns_go_first_and_the_last_one_stays() -> None:
    messages = request(
        instructions="i", input=[user("a"), {"role": "assistant", "content": "x"}, user("b"), user("c")]
    ).messages
    assert count_old_turns(messages) == 2
    kept = [[message["content"] for message in without_old_turns(messages, count)] for count in range(3)]
    assert kept == [["i", "a", "x", "b", "c"], ["i", "b", "c"], ["i", "c"]]


# -- tools ---------------------------------------------------------------------------------------------------------------


def names(**members: Any) -> list[str]:
    return [tool["function"]["name"] for tool in request(**members).tools or ()]


def test_a_custom_tool_is_a_function_with_one_string() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    (tool,) = request(tools=[{"type": "custom", "name": "p", "description": "Patch.", "format": form}]).tools or []
    function = tool["function"]
    assert function["parameters"]["required"] == ["input"]
    assert function["description"] == 'Patch.\n\nThe input must match this grammar (lark):\nstart: "x"'


def test_names_of_two_namespaces_are_told_apart_where_they_collide() -> None:
    spaces = [{"type": "namespace", "name": name, "tools": [FUNCTION, {**FUNCTION, "name": name}]} for name in "ab"]
    assert names(tools=spaces) == ["a__f", "a", "b__f", "b"]
    found = request(
        tools=spaces, input=[user("x"), {**CALL, "namespace": "b"}, {**CALL, "name": "a", "namespace": "a"}]
    )
    assert [call["function"]["name"] for call in found.messages[1]["tool_calls"]] == ["b__f", "a"]
    assert (found.offered.called("b__f").name, found.offered.called("b__f").namespace) == ("f", "b")
    assert found.offered.called("made_up").name == "made_up"


def test_the_nested_form_of_a_chat_is_accepted() -> None:
    assert names(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]) == ["f"]


@pytest.mark.parametrize(
    ("choice", "expected", "left"),
    [
        (None, None, ["f", "p"]),
        ("required", "required", ["f", "p"]),
        ({"type": "function", "name": "f"}, "f", ["f", "p"]),
        ({"type": "function", "function": {"name": "f"}}, "f", ["f", "p"]),
        ({"type": "custom", "name": "p"}, "p", ["f", "p"]),
        ({"type": "web_search"}, "auto", ["f", "p"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "p"}]}, "required", ["p"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, None, []),
    ],
)
def test_the_choice_among_tools(choice: Any, expected: Any, left: list[str]) -> None:
    tools = [FUNCTION, {"type": "custom", "name": "p"}, {"type": "web_search"}]
    found = request(ignores=True, tools=tools, tool_choice=choice)
    said = found.tool_choice
    assert (found.forced_choice if isinstance(said, NamedToolChoice) else said) == expected
    assert [tool["function"]["name"] for tool in found.tools or ()] == left


def test_tools_that_were_all_left_out_are_no_tools() -> None:
    hosted = [{"type": "web_search"}, {"type": "image_generation"}]
    with pytest.raises(RequestRejected, match="`image_generation`, `web_search` are not served"):
        request(tools=[FUNCTION, *hosted])
    found = request(ignores=True, tools=hosted, tool_choice="required")
    assert (found.tools, found.tool_choice) == (None, None)
    assert found.offered.left_out == {"web_search", "image_generation"}
    assert request(tools=[], tool_choice="auto").tools is None


@each_case(
    "members",
    [
        {"tools": [{"name": "f"}]},
        {"tools": [{"type": "namespace", "name": "n"}]},
        {"tools": [{"type": "namespace", "name": "n", "tools": ["f"]}]},
        {"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]},
        {"tools": [{"type": "custom", "name": "p", "format": "text"}]},
        {"tools": [{**FUNCTION, "strict": "yes"}]},
        {"tools": [{**FUNCTION, "strict": True, "parameters": {"type": "object", "properties": {"a": {}}}}]},
        {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
        {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "maybe", "tools": []}},
        {"tools": [FUNCTION], "tool_choice": {"name": "f"}},
        {"tool_choice": "required"},
        {"input": [user([{"type": "input_audio"}])]},
        {"input": [user([{"type": "input_image", "file_id": 7}])]},
        {"input": [user([{"type": "input_file", "file_url": "http://x"}])]},
        {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        {"text": {"format": {"type": "json_schema", "schema": {}}}},
        {"top_logprobs": -1},
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name(members: dict[str, Any]) -> None:
    with pytest.raises(RequestRejected) as caught:
        request(**members)
    assert caught.value.status == 400
    (name,) = [name for name in members if (caught.value.param or "").startswith(name)][-1:]
    assert name


def test_what_the_engine_is_asked_for() -> None:
    found = request(
        max_output_tokens=7,
        reasoning={"effort": "low"},
        include=["message.output_text.logprobs"],
        top_logprobs=25,
        text={"format": {"type": "json_object"}, "verbosity": "high"},
        stream=True,
        seed=3,
    )
    assert (found.output_limit, found.reasoning_effort, found.verbosity, found.seed) == (7, "low", "high", 3)
    assert found.requested_logprobs == 20
    assert found.response_format is not None
    assert found.response_format.type == "json_object"
    assert found.include_usage
