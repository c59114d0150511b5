from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from dynamo.protocol.messages import LoweredMessages, decode_messages, lower
from dynamo.protocol.messages.errors import MESSAGES, error_type_of, prompt_too_long
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.requests import validate_chat
from dynamo.protocol.openai.shapes import NamedToolChoice

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "look", "description": "Look", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
TEXT = {"type": "text", "text": "so"}


def lowered(*messages: Any, strips: bool = True, ignores: bool = False, **fields: Any) -> LoweredMessages:
    body = {"model": "m", "max_tokens": 8, "messages": list(messages) or [USER], **fields}
    request = lower(
        decode_messages(json.dumps(body).encode()), strips_billing_header=strips, ignore_unsupported=ignores
    )
    validate_chat(request)
    return request


def chat(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return lowered(*messages, **fields).messages


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def refusal(*messages: Any, **fields: Any) -> RequestRejected:
    with pytest.raises(RequestRejected) as found:
        lowered(*messages, **fields)
    return found.value


# -- the conversation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ("Be kind.", "Be kind."),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, TEXT], "a\nso"),
        ("x-anthropic-billing-header: cc_version=1; hash\nBe kind.", "Be kind."),
        ([{"type": "text", "text": "x-anthropic-billing-header: hash"}, TEXT], "so"),
        ("", None),
        ([], None),
        ([{"type": "text", "text": ""}], None),
    ],
)
def test_the_system_text_comes_first_and_without_the_billing_line(system: Any, text: str | None) -> None:
    expected = [{"role": "system", "content": text}] if text else []
    assert chat(system=system) == [*expected, USER]


def test_the_billing_line_may_stay() -> None:
    line = "x-anthropic-billing-header: hash\nBe kind."
    assert lowered(system=line, strips=False).messages[0]["content"] == line


def test_leading_system_messages_join_the_system_text_and_later_ones_stay() -> None:
    first, later = {"role": "system", "content": "b"}, {"role": "system", "content": [TEXT]}
    assert chat(first, USER, later, system="a") == [
        {"role": "system", "content": "a\n\nb"},
        USER,
        {"role": "system", "content": "so"},
    ]


def test_tool_results_become_tool_messages_and_the_text_around_them_stays_in_place() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [TEXT, TEXT], "is_error": True}
    empty = {"type": "tool_result", "tool_use_id": "t2"}
    turn = assistant(TEXT, CALL, {**CALL, "id": "t2", "input": {"a": 1}})
    assert chat(USER, turn, user(TEXT, result, empty, TEXT, {"type": "text", "text": ""}, TEXT)) == [
        USER,
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "look", "arguments": {}}},
                {"id": "t2", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}},
            ],
        },
        {"role": "user", "content": "so"},
        {"role": "tool", "tool_call_id": "t1", "content": "soso"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "soso"},
    ]


@pytest.mark.parametrize("given", [{}, {"a": 1}, None, "cut", [1], 7])
def test_the_input_of_an_earlier_call_is_kept_as_it_was_sent(given: Any) -> None:
    message = chat(USER, assistant({**CALL, "input": given}), USER)[1]
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": given}


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], {"role": "assistant", "content": ""}),
        ([CALL], {"role": "assistant", "content": None}),
        (
            [{"type": "thinking", "thinking": "why"}, {"type": "thinking", "thinking": "not", "signature": "s"}, TEXT],
            {"role": "assistant", "content": "so", "reasoning_content": "why\n\nnot"},
        ),
        (
            [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                TEXT,
            ],
            {"role": "assistant", "content": "so"},
        ),
    ],
)
def test_a_turn_of_the_assistant_is_one_message(blocks: list[Any], message: dict[str, Any]) -> None:
    found = chat(USER, assistant(*blocks), USER)[1]
    found.pop("tool_calls", None)
    assert found == message


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}, "d"),
        ({"type": "document", "title": "t", "source": {"type": "content", "content": [TEXT]}}, "t\nso"),
        ({"type": "search_result", "source": "u", "title": "t", "content": [TEXT]}, "t\nu\nso"),
    ],
)
def test_documents_and_search_results_are_their_text(block: Any, text: str) -> None:
    assert chat(user(block)) == [{"role": "user", "content": text}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    assert chat(USER, assistant(CALL), user(result))[-1]["content"] == text


@pytest.mark.parametrize(
    ("last", "continues"),
    [
        (assistant(TEXT), True),
        ({"role": "assistant", "content": "The answer is"}, True),
        (assistant(TEXT, CALL), False),
        (assistant(), False),
        (assistant({"type": "text", "text": " "}), False),
        (USER, False),
    ],
)
def test_the_answer_goes_on_from_a_text_begun_for_the_assistant(last: Any, continues: bool) -> None:
    request = lowered(USER, last)
    assert (request.continue_final_message is True) is continues
    assert (request.add_generation_prompt is False) is continues


# -- everything else of a request ----------------------------------------------------------------------------------------


def test_the_fields_of_sampling_are_those_of_chat() -> None:
    request = lowered(temperature=0.5, top_p=0.9, top_k=0, stop_sequences=["a"], max_tokens=2**40, stream=True)
    assert (request.temperature, request.top_p, request.top_k, request.stop) == (0.5, 0.9, 0, ["a"])
    assert request.max_tokens == 1_048_576
    assert request.is_streaming


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "u"}, "service_tier": "auto", "container": "c", "inference_geo": "eu"},
        {"mcp_servers": [{"type": "url", "url": "x", "name": "n"}], "context_management": {"edits": []}},
        {"betas": ["b"], "speed": "fast", "cache_control": {"type": "ephemeral"}, "of_tomorrow": {"a": [1]}},
    ],
)
def test_unknown_fields_and_those_without_a_meaning_here_are_ignored(fields: dict[str, Any]) -> None:
    assert msgspec.to_builtins(lowered(**fields)) == msgspec.to_builtins(lowered())


@pytest.mark.parametrize(
    ("thinking", "mode", "budget"),
    [
        (None, None, None),
        ({"type": "disabled"}, "disabled", None),
        ({"type": "enabled", "budget_tokens": 2048}, "enabled", 2048),
        ({"type": "adaptive", "display": "summarized"}, "adaptive", None),
    ],
)
def test_thinking_is_controlled_as_in_chat(thinking: Any, mode: str | None, budget: int | None) -> None:
    found: Any = lowered(thinking=thinking).thinking
    assert (mode, budget) == (None, None) if found is None else (found.type, found.budget_tokens) == (mode, budget)


def test_effort_and_the_form_of_the_answer_are_those_of_chat() -> None:
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "schema": schema}
    request = lowered(output_config={"effort": "high", "format": form})
    assert request.reasoning_effort == "high"
    for found in (request, lowered(output_format=form)):
        assert found.response_format is not None
        assert found.response_format.json_schema is not None
        assert found.response_format.json_schema.schema == schema


@pytest.mark.parametrize(
    ("choice", "found", "parallel"),
    [
        (None, None, None),
        ({"type": "auto"}, None, None),
        ({"type": "auto", "disable_parallel_tool_use": True}, None, False),
        ({"type": "any"}, "required", None),
        ({"type": "tool"}, "required", None),
        ({"type": "tool", "name": "look", "disable_parallel_tool_use": True}, "look", False),
        ({"type": "none"}, "none", None),
    ],
)
def test_the_choice_of_a_tool_is_that_of_chat(choice: Any, found: str | None, parallel: bool | None) -> None:
    request = lowered(tools=[TOOL], tool_choice=choice)
    named = request.tool_choice
    assert (named.function.name if isinstance(named, NamedToolChoice) else named) == found
    assert request.parallel_tool_calls is parallel


def test_tools_of_the_client_become_functions() -> None:
    strict = {**TOOL, "type": "custom", "name": "s", "strict": True, "cache_control": {"type": "ephemeral"}}
    strict["input_schema"] = {"type": "object", "properties": {}, "additionalProperties": False, "required": []}
    request = lowered(tools=[TOOL, strict, {**TOOL, "name": "e", "eager_input_streaming": True}])
    assert request.tools is not None
    function = {"name": "look", "description": "Look", "parameters": {"type": "object"}}
    assert request.tools[0] == {"type": "function", "function": function}
    assert request.tools[1]["function"]["strict"] is True
    assert request.toolset.eager == {"e"}


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "memory_20250818", "computer_20251124"])
def test_tools_that_the_client_runs_are_offered_with_their_published_parameters(kind: str) -> None:
    (tool,) = lowered(tools=[{"type": kind, "name": "own"}]).tools or []
    assert tool["function"]["name"] == "own"
    assert tool["function"]["parameters"]["properties"]


@pytest.mark.parametrize(
    "kind", ["web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "tool_search_tool_regex", "new_1"]
)
def test_tools_that_are_run_elsewhere_are_refused_by_name_or_left_out(kind: str) -> None:
    server = {"type": kind, "name": "web", "max_uses": 5}
    if not kind.startswith("tool_search"):  # which finds what is offered anyway
        with pytest.raises(RequestRejected, match=kind):
            lowered(tools=[TOOL, server])
    alone = lowered(ignores=True, tools=[server], tool_choice={"type": "tool", "name": "web"})
    assert (alone.tools, alone.tool_choice) == (None, None)
    assert lowered(ignores=True, tools=[server], tool_choice={"type": "any"}).tool_choice is None
    assert len(lowered(ignores=True, tools=[server, TOOL]).tools or ()) == 1


def test_a_tool_whose_loading_is_deferred_needs_no_schema() -> None:
    late = {"name": "late", "defer_loading": True}
    request = lowered(tools=[{"type": "tool_search_tool_regex_20251119", "name": "search"}, late])
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["late"]


def test_nvext_and_template_variables_pass_through() -> None:
    request = lowered(nvext={"agent_hints": {"priority": 2}}, chat_template_kwargs={"x": 1})
    assert request.nvext is not None
    assert request.template_args == {"x": 1}


def test_a_worker_that_takes_a_chat_gets_no_member_of_this_api() -> None:
    assert set(msgspec.to_builtins(lowered(tools=[TOOL]))) == set(LoweredMessages.__struct_fields__)


# -- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "fields", "text"),
    [
        ([], {"model": " "}, "model: field required"),
        ([], {"model": 1}, "model: Expected `str`, got `int`"),
        ([], {"messages": "x"}, "messages: Expected `array`, got `str`"),
        ([{"role": "robot", "content": ""}], {}, "messages[0].role: Invalid enum value 'robot'"),
        ([{"role": "user"}], {}, "messages[0].content: field required"),
        ([user()], {}, "messages[0].content: must contain at least one content block"),
        ([user({"type": "text"})], {}, "messages[0].content[0].text: field required"),
        ([user({})], {}, "messages[0].content[0].type: field required"),
        ([user(TEXT, {"type": "x"})], {}, 'messages[0].content[1]: content block type "x" is not supported'),
        ([user(CALL)], {}, 'messages[0].content[0]: content block type "tool_use" is not supported'),
        (
            [user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "x"}]})],
            {},
            'messages[0].content[0].content[0]: content block type "x" is not supported',
        ),
        (
            [user({"type": "document", "source": {"type": "base64", "data": "x"}})],
            {},
            'messages[0].content[0].source: document source type "base64" is not supported: send the text of the document',
        ),
        ([{"role": "system", "content": "s"}], {}, "messages: at least one message of a user or an assistant is required"),
        ([], {"system": [CALL]}, 'system[0]: content block type "tool_use" is not supported'),
        ([], {"tools": [{"name": "a"}]}, "tools[0].input_schema: field required for client tools"),
        ([], {"tools": [{"input_schema": {}}]}, "tools[0].name: field required"),
        ([], {"tools": [{"type": 7}]}, "tools[0].type: Expected `str`, got `int`"),
        ([], {"tool_choice": {"type": "any"}}, 'tool_choice: "any" needs tools'),
        (
            [],
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "z"}},
            'tool_choice.name: tool "z" is not among the tools',
        ),
        ([], {"thinking": {"type": "hard"}}, "thinking.type: Invalid enum value 'hard'"),
        ([], {"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens: Expected `int` >= 0"),
        ([], {"output_config": {"effort": "huge"}}, "output_config.effort: Invalid enum value 'huge'"),
        ([], {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: field required"),
        ([], {"nvext": {"nope": 1}}, "nvext: Object contains unknown field `nope`"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_place(messages: list[Any], fields: dict[str, Any], text: str) -> None:
    found = refusal(*messages, **fields)
    assert (found.status, found.message) == (400, text)
    assert found.param == text.partition(":")[0]


def test_bad_json_and_what_nests_too_deep_are_refused() -> None:
    for body in (b"{", b"[]", b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":%b' % (b"[" * 2000)):
        with pytest.raises(RequestRejected) as found:
            decode_messages(body)
        assert found.value.status == 400
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"a": schema}
    assert "JSON nested deeper than 128 levels" in refusal(tools=[{"name": "a", "input_schema": schema}]).message


def test_a_body_that_is_nearly_json_is_mended() -> None:
    body = b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"a\nb"}]}'
    request = lower(decode_messages(body))
    assert (request.repaired, request.messages[0]["content"]) == (True, "a\nb")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_each_status_has_its_type(status: int, kind: str) -> None:
    assert error_type_of(status) == kind
    body = json.loads(MESSAGES.error_body(RequestRejected(status, "Validation: no"), "r"))
    assert body == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "r"}


def test_a_prompt_that_is_too_long_says_so_first() -> None:
    own = json.loads(MESSAGES.error_body(prompt_too_long("9", 8), "r"))
    assert own["error"]["message"] == "prompt is too long: 9 tokens > 8 maximum"
    other = RequestRejected(400, "A body of 9 bytes", code="context_length_exceeded")
    assert json.loads(MESSAGES.error_body(other, "r"))["error"]["message"] == "prompt is too long: A body of 9 bytes"
