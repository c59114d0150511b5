"""Every row of the validation table, with its exact text and the field it names."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from dynamo.protocol.openai import RequestRejected, decode_chat, parse_chat, parse_completion, validate_chat
from dynamo.protocol.openai.body import MAX_CONTAINERS, MAX_DEPTH, MAX_MENDED_BYTES
from dynamo.protocol.openai.foreign_members import FOREIGN_MEMBERS
from dynamo.protocol.openai.shapes import ChatRequest, CompletionRequest
from dynamo.protocol.openai.validation import LET_PASS, NOT_STORED
from support.cases import each_case
from support.properties import examples

USER: Final = {"role": "user", "content": "hi"}
PREFIX: Final = "Failed to deserialize the JSON body into the target type: "


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", **fields}).encode()


def outcome(parse: Callable[[bytes], Any], body: bytes) -> Any:
    """The request, or the refusal as a value; any other exception is a failure of the test."""
    try:
        return parse(body)
    except RequestRejected as error:
        return error


def refusal(parse: Callable[[bytes], Any], body: bytes) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        parse(body)
    return caught.value


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def calls(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "tool_calls": [call]}]


# (fields, message after "Validation: ", param): rules both surfaces share
SHARED_ROWS: Final[list[tuple[dict[str, Any], str, str]]] = [
    ({"model": ""}, "Model cannot be empty", "model"),
    ({"model": "  "}, "Model cannot be empty", "model"),
    ({"temperature": 3}, "Temperature must be between 0 and 2, got 3", "temperature"),
    ({"temperature": -0.5}, "Temperature must be between 0 and 2, got -0.5", "temperature"),
    ({"top_p": 0}, "Top_p must be between 0 and 1, got 0", "top_p"),
    ({"top_p": 1.5}, "Top_p must be between 0 and 1, got 1.5", "top_p"),
    ({"top_k": -2}, "Top_k must be greater than or equal to -1, got -2", "top_k"),
    ({"min_p": 1.5}, "Min_p must be between 0 and 1, got 1.5", "min_p"),
    ({"min_p": -1}, "Min_p must be between 0 and 1, got -1", "min_p"),
    ({"presence_penalty": 3}, "Presence penalty must be between -2 and 2, got 3", "presence_penalty"),
    ({"presence_penalty": -3}, "Presence penalty must be between -2 and 2, got -3", "presence_penalty"),
    ({"frequency_penalty": 2.5}, "Frequency penalty must be between -2 and 2, got 2.5", "frequency_penalty"),
    ({"repetition_penalty": 0}, "Repetition penalty must be greater than 0 and at most 2, got 0", "repetition_penalty"),
    (
        {"repetition_penalty": 2.5},
        "Repetition penalty must be greater than 0 and at most 2, got 2.5",
        "repetition_penalty",
    ),
    ({"logit_bias": {"5": 101}}, "Logit bias for token 5 must be between -100 and 100, got 101", "logit_bias"),
    ({"logit_bias": {"x": 1}}, "Logit bias keys must be token ids, got 'x'", "logit_bias"),
    ({"n": 0}, "n must be between 1 and 128, got 0", "n"),
    ({"n": 129}, "n must be between 1 and 128, got 129", "n"),
    ({"n": 2, "temperature": 0}, "n must be 1 when temperature is 0 (every choice would be the same), got 2", "n"),
    ({"max_tokens": 0}, "Max tokens must be greater than 0, got 0", "max_tokens"),
    ({"max_tokens": -1}, "Max tokens must be greater than 0, got -1", "max_tokens"),
    ({"max_tokens": 1048577}, "Max completion tokens must not exceed 1048576, got 1048577", "max_tokens"),
    (
        {"stream_options": {"include_usage": True}},
        "The 'stream_options' field is only allowed when 'stream' is set to true.",
        "stream_options",
    ),
    (
        {"stream": False, "stream_options": {}},
        "The 'stream_options' field is only allowed when 'stream' is set to true.",
        "stream_options",
    ),
    ({"foo": 1}, "Unsupported parameter(s): `foo`" + LET_PASS, "foo"),
    ({"store": True}, NOT_STORED, "store"),
    ({"foo": 1, "temperature": 9, "bar": 0, "none": None}, "Unsupported parameter(s): `foo`, `bar`" + LET_PASS, "foo"),
    (
        {"guided_json": {}, "guided_regex": "a"},
        "Only one kind of guided decoding is allowed, got `guided_json`, `guided_regex`",
        "guided_regex",
    ),
    (
        {"guided_grammar": "(" * 501},
        "Guided grammar nests 501 brackets deep, at most 500 are allowed",
        "guided_grammar",
    ),
    (
        {"guided_json": {}, "structured_outputs": {"json": {}}},
        "`structured_outputs` and `guided_*` say the same in two ways: send one of them",
        "structured_outputs",
    ),
    (
        {"structured_outputs": {"json": {}, "regex": "a"}},
        "Only one kind of guided decoding is allowed, got `structured_outputs.json`, `structured_outputs.regex`",
        "structured_outputs.regex",
    ),
    ({"guided_json": {"maximum": 2**70}}, "guided_json holds an integer that does not fit 64 bits", "guided_json"),
    (
        {"nvext": {"extra_fields": ["completion_token_ids"]}, "n": 2},
        "nvext.extra_fields 'completion_token_ids' requires a single choice",
        "nvext.extra_fields",
    ),
    (
        {"nvext": {"backend_instance_id": 2**64}},
        f"backend_instance_id must be between 0 and {2**64 - 1}, got {2**64}",
        "nvext.backend_instance_id",
    ),
    (
        {"nvext": {"annotations": ["a"] * 1025}},
        "nvext.annotations must not hold more than 1024 entries",
        "nvext.annotations",
    ),
]

CHAT_ROWS: Final[list[tuple[dict[str, Any], str, str]]] = [
    ({"messages": []}, "The 'messages' field cannot be empty. At least one message is required.", "messages"),
    ({"max_completion_tokens": 0}, "Max tokens must be greater than 0, got 0", "max_completion_tokens"),
    (
        {"max_completion_tokens": 2000000},
        "Max completion tokens must not exceed 1048576, got 2000000",
        "max_completion_tokens",
    ),
    ({"logprobs": True, "top_logprobs": 21}, "Top_logprobs must be between 0 and 20, got 21", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "Top_logprobs must be between 0 and 20, got -1", "top_logprobs"),
    ({"top_logprobs": 2}, "The 'top_logprobs' field is only allowed when 'logprobs' is set to true.", "top_logprobs"),
    ({"tools": [tool()] * 1537}, "Maximum of 1536 tools are supported, got 1537", "tools"),
    ({"tools": [tool("")]}, "Function name cannot be empty", "tools[0].function.name"),
    (
        {"tools": [tool(), tool("x" * 129)]},
        "Function name must not exceed 128 characters, got 129",
        "tools[1].function.name",
    ),
    (
        {"tools": [tool("a b")]},
        "Function name may hold only letters, digits, '_' and '-', got 'a b'",
        "tools[0].function.name",
    ),
    (
        {"tools": [tool("f\n")]},
        "Function name may hold only letters, digits, '_' and '-', got 'f\n'",
        "tools[0].function.name",
    ),
    (
        {"tools": [tool(parameters=[])]},
        "Parameters of function 'f' must be a JSON object",
        "tools[0].function.parameters",
    ),
    ({"tool_choice": "required"}, 'tool_choice is "required" but tools is empty', "tool_choice"),
    ({"tool_choice": "required", "tools": []}, 'tool_choice is "required" but tools is empty', "tool_choice"),
    (
        {"tool_choice": tool("zz"), "tools": [tool()]},
        'tool named "zz" in tool_choice is not present in tools',
        "tool_choice",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format of type json_schema needs a json_schema",
        "response_format.json_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}},
        "response_format.json_schema.name cannot be empty",
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": []}}},
        "response_format.json_schema.schema must be a JSON object",
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "Only one kind of guided decoding is allowed, got `guided_regex`, `response_format`",
        "response_format",
    ),
    (
        {"chat_template_args": {"chat_template": "x"}},
        "`chat_template` is not supported inside `chat_template_args`",
        "chat_template_args",
    ),
    (
        {"chat_template_kwargs": {"chat_template": "x"}},
        "`chat_template` is not supported inside `chat_template_args`",
        "chat_template_kwargs",
    ),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message and add_generation_prompt cannot both be true: one continues the last message, "
        "the other starts a new one",
        "continue_final_message",
    ),
    (
        {"mm_processor_kwargs": {"a": [2**65]}},
        "mm_processor_kwargs holds an integer that does not fit 64 bits",
        "mm_processor_kwargs",
    ),
    (
        {"tool_choice": "required", "tools": [tool()], "guided_regex": "a"},
        "`guided_regex` cannot be used with a forced tool_choice, which guides the whole answer itself",
        "guided_regex",
    ),
    (
        {"tool_choice": tool(), "tools": [tool()], "guided_json": {}},
        "`guided_json` cannot be used with a forced tool_choice, which guides the whole answer itself",
        "guided_json",
    ),
    (
        {"tool_choice": tool(""), "tools": [tool()]},
        'tool named "" in tool_choice is not present in tools',
        "tool_choice",
    ),
    (
        {"tool_choice": "required", "tools": [tool(parameters={"maximum": 2**70})]},
        "tools holds an integer that does not fit 64 bits",
        "tools",
    ),
]

NOT_BUILT_ROWS: Final[list[tuple[dict[str, Any], str, str]]] = [
    ({"functions": []}, "`functions` is deprecated. Please migrate to use `tools` instead.", "functions"),
    (
        {"function_call": "auto"},
        "`function_call` is deprecated. Please migrate to use `tool_choice` instead.",
        "function_call",
    ),
    (
        {"modalities": ["audio"]},
        "audio output needs an audio model, which this version does not have yet",
        "modalities",
    ),
    (
        {"web_search_options": {}},
        "web_search_options needs a search tool, which this version does not have yet",
        "web_search_options",
    ),
]

COMPLETION_ROWS: Final[list[tuple[dict[str, Any], str, str]]] = [
    ({"prompt": ""}, "Prompt cannot be empty", "prompt"),
    ({"prompt": []}, "Prompt cannot be empty", "prompt"),
    ({"prompt": ["a", ""]}, "Prompt cannot be empty", "prompt[1]"),
    ({"prompt": [[1], []]}, "Prompt cannot be empty", "prompt[1]"),
    (
        {"prompt": [1, "a"]},
        "Prompt must be a string, a list of strings, a list of token ids or a list of such lists",
        "prompt",
    ),
    ({"prompt": ["a"] * 129}, "Maximum of 128 prompts in one request, got 129", "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "The number of prompts times n must not exceed 128, got 65 x 2", "n"),
    ({"logprobs": 21}, "Logprobs must be between 0 and 20, got 21", "logprobs"),
    ({"logprobs": -1}, "Logprobs must be between 0 and 20, got -1", "logprobs"),
    ({"best_of": 21}, "Best_of must be between 0 and 20, got 21", "best_of"),
    ({"best_of": 1, "n": 2}, "Best_of must be greater than or equal to n, got best_of 1 and n 2", "best_of"),
    ({"suffix": "x" * 10001}, "Suffix must not exceed 10000 characters, got 10001", "suffix"),
    ({"stop": ""}, "Stop sequence cannot be empty", "stop"),
    ({"stop": ["a"] * 33}, "Maximum of 32 stop sequences allowed, got 33", "stop"),
    ({"prompt_embeds": "!"}, "Prompt_embeds must be base64", "prompt_embeds"),
    (
        {"prompt_embeds": base64.b64encode(bytes(99)).decode()},
        "Prompt_embeds must be between 100 and 10485760 bytes when decoded, got 99",
        "prompt_embeds",
    ),
    (
        {"prompt_embeds": "A" * (14 * 1024 * 1024)},
        "Prompt_embeds must not exceed 10485760 bytes when decoded",
        "prompt_embeds",
    ),
    (
        {"prompt": ["a", "b"], "nvext": {"extra_fields": ["completion_token_ids"]}},
        "nvext.extra_fields 'completion_token_ids' requires a single choice",
        "nvext.extra_fields",
    ),
    (
        {"prompt": ["a", "b"], "nvext": {"token_data": [1]}},
        "nvext.token_data replaces one prompt, but the request holds several",
        "nvext.token_data",
    ),
]


@each_case(("fields", "message", "param"), [*SHARED_ROWS, *CHAT_ROWS])
def test_a_chat_request_that_breaks_a_rule_is_a_400_with_its_text(
    fields: dict[str, Any], message: str, param: str
) -> None:
    error = refusal(parse_chat, chat(**fields))
    assert (error.status, error.message, error.param) == (400, f"Validation: {message}", param)


@each_case(("fields", "message", "param"), [*SHARED_ROWS, *COMPLETION_ROWS])
def test_a_completion_request_that_breaks_a_rule_is_a_400_with_its_text(
    fields: dict[str, Any], message: str, param: str
) -> None:
    error = refusal(parse_completion, completion(**fields))
    assert (error.status, error.message, error.param) == (400, f"Validation: {message}", param)


@each_case(("fields", "message", "param"), NOT_BUILT_ROWS)
def test_what_is_deprecated_or_not_built_is_a_422_that_says_so(
    fields: dict[str, Any], message: str, param: str
) -> None:
    error = refusal(parse_chat, chat(**fields))
    assert (error.status, error.message, error.param) == (422, f"Validation: {message}", param)


@each_case(
    ("stop", "message"),
    [
        ("", "Stop sequence cannot be empty"),
        (["a", ""], "Stop sequence cannot be empty"),
        (["a"] * 33, "Maximum of 32 stop sequences allowed, got 33"),
        ([1, "a"], "Stop must be strings or token ids, not both"),
    ],
)
def test_stop_errors_carry_no_prefix_on_chat(stop: Any, message: str) -> None:
    error = refusal(parse_chat, chat(stop=stop))
    assert (error.status, error.message, error.param) == (400, message, "stop")


def test_the_first_broken_rule_of_the_order_is_the_one_reported() -> None:
    faults: dict[str, Any] = {
        "functions": [],
        "messages": [],
        "stream_options": {},
        "foo": 1,
        "model": "",
        "temperature": 9,
    }
    repairs = {"messages": [USER], "model": "m"}
    reported = []
    while faults:
        error = refusal(parse_chat, json.dumps({"model": "m", "messages": [USER], **faults}).encode())
        assert error.param is not None
        reported.append(error.param)
        del faults[error.param]
    assert reported == ["functions", "messages", "stream_options", "foo", "model", "temperature"]
    parse_chat(json.dumps(repairs).encode())


def test_decoding_alone_leaves_the_rules_to_validation() -> None:
    request = decode_chat(b'{"model":"","messages":[],"foo":1}')
    assert request.unsupported == ("foo",)
    with pytest.raises(RequestRejected):
        validate_chat(request)


def test_unknown_parameters_pass_when_the_frontend_ignores_them() -> None:
    assert parse_chat(chat(foo=1), ignore_unsupported=True).model == "m"
    assert parse_completion(completion(foo=[]), ignore_unsupported=True).model == "m"


def test_a_client_cannot_set_what_decoding_found() -> None:
    for name in ("unsupported", "repaired"):
        assert (
            refusal(parse_chat, chat(**{name: True})).message
            == f"Validation: Unsupported parameter(s): `{name}`{LET_PASS}"
        )


def test_many_unknown_parameters_make_a_short_message() -> None:
    error = refusal(parse_chat, chat(**{f"x{index}" + "y" * 1000: 1 for index in range(500)}))
    assert len(error.message) < 2000
    assert error.message.endswith(f"and 484 more{LET_PASS}")


def test_every_passthrough_parameter_is_accepted() -> None:
    fields = {
        "cache_salt": "s",
        "stop_token_ids": [1],
        "detokenize": False,
        "allowed_token_ids": [1],
        "bad_words_token_ids": [[1, 2]],
        "logprob_token_ids": [3],
    }
    assert parse_chat(chat(**fields)).unsupported == ()
    assert parse_completion(completion(**fields)).unsupported == ()


def test_no_output_is_allowed_only_where_the_prompt_is_the_answer() -> None:
    parse_completion(completion(max_tokens=0, echo=True, logprobs=1))
    for body in (completion(max_tokens=0), completion(max_tokens=0, echo=False), completion(max_tokens=-1, echo=True)):
        assert refusal(parse_completion, body).param == "max_tokens"
    parse_completion(completion(echo=True, logprobs=1, stream=True))


def test_current_parameters_of_openai_and_vllm_are_accepted() -> None:
    common = {
        "store": False,
        "service_tier": "flex",
        "metadata": {"a": "b"},
        "safety_identifier": "u",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "priority": -3,
        "response_format": {"type": "json_object"},
    }
    assert parse_completion(completion(**common)).unsupported == ()
    parse_chat(chat(**common, verbosity="low", documents=[{"text": "x"}], prediction={"type": "content"}))
    forms: list[dict[str, Any]] = [
        {"json": {}},
        {"choice": ["a"]},
        {"regex": "a"},
        {"grammar": "x"},
        {"structural_tag": {}},
    ]
    for structured in forms:
        for parse, body in ((parse_chat, chat), (parse_completion, completion)):
            parse(body(structured_outputs=structured))


def test_an_integer_is_read_where_it_was_written_as_a_float() -> None:
    request = parse_chat(chat(max_tokens=8.0, seed=3.0, stop=[5.0, 6.0], nvext={"agent_hints": {"osl": 4.0}}))
    assert (request.max_tokens, request.seed, request.stop) == (8, 3, [5, 6])
    assert request.nvext is not None
    assert request.nvext.agent_hints is not None
    assert request.nvext.agent_hints.osl == 4
    assert parse_completion(completion(max_tokens=8.0, foo=None)).max_tokens == 8
    assert parse_chat(chat(max_tokens=8.0, foo=1), ignore_unsupported=True).max_tokens == 8
    assert refusal(parse_chat, chat(max_tokens=8.0, foo=1)).param == "foo"
    assert refusal(parse_chat, chat(max_tokens=8.0, seed=1.5)).param == "seed"


def test_null_stands_for_nothing_also_in_a_member_that_does_not_exist() -> None:
    assert parse_chat(chat(foo=None, user="")).unsupported == ()
    parse_chat(chat(nvext={"agent_hints": {"zz": None}}, structured_outputs={"json": {}, "_backend": None}))


def test_a_byte_order_mark_in_front_of_a_body_is_ignored() -> None:
    assert parse_chat(b"\xef\xbb\xbf" + chat()).model == "m"


def test_members_of_other_servers_clients_pass_where_they_mean_nothing() -> None:
    found = parse_chat(chat(cache_prompt=True, keep_alive="5m", typical_p=1.0, mirostat=0, include_reasoning=True))
    assert found.ignored == ("cache_prompt", "keep_alive", "typical_p", "mirostat", "include_reasoning")
    for changes in ({"typical_p": 0.5}, {"mirostat": 2}, {"include_reasoning": False}, {"mirostat": False}):
        assert refusal(parse_chat, chat(**changes)).param == next(iter(changes))


@each_case("name", sorted(FOREIGN_MEMBERS))
def test_a_member_without_an_effect_is_no_member_of_ours_and_has_a_reason(name: str) -> None:
    assert name not in ChatRequest.__struct_fields__
    row = FOREIGN_MEMBERS[name]
    assert len(row.reason) > 20
    values = [1] if row.neutral is None else row.neutral
    for value in values:
        assert parse_chat(chat(**{name: value})).ignored == (name,)


def test_the_page_lists_every_member_without_an_effect() -> None:
    page = (Path(__file__).parents[3] / "docs" / "openai.md").read_text()
    listed = page.partition("## Members without an effect")[2].split("\n## ")[0]
    assert [name for name in FOREIGN_MEMBERS if f"`{name}`" not in listed] == []


ALLOWED: Final = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}


def test_allowed_tools_leave_the_others_out() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": ALLOWED}
    found = parse_chat(chat(tools=[tool("f"), tool("g")], tool_choice=choice))
    assert [each["function"]["name"] for each in found.tools or ()] == ["g"]
    assert found.tool_choice == "required"
    unknown = {"type": "allowed_tools", "allowed_tools": {**ALLOWED, "mode": "auto"}}
    assert refusal(parse_chat, chat(tools=[tool("f")], tool_choice=unknown)).param == (
        "tool_choice.allowed_tools.tools[0]"
    )
    assert refusal(parse_chat, chat(tools=[tool("f")], tool_choice={"type": "allowed_tools"})).param == (
        "tool_choice.allowed_tools"
    )


def test_unknown_nvext_keys_are_refused_by_name_even_when_unknown_parameters_are_ignored() -> None:
    for ignore in (False, True):
        with pytest.raises(RequestRejected) as caught:
            parse_chat(chat(nvext={"agent_hints": {"zz": 1}}), ignore_unsupported=ignore)
        assert caught.value.param == "nvext.agent_hints.zz"
        assert caught.value.message == PREFIX + "Object contains unknown field `zz` - at `$.nvext.agent_hints`"


# -- bad JSON -----------------------------------------------------------------------------------------------------------

MALFORMED: Final = [
    b"",
    b"x",
    b"{",
    b"null",
    b"[]",
    b"1",
    b'"m"',
    b'{"model":"m"',
    b'{"model":NaN}',
    b'{"model":"m","messages":[],"temperature":Infinity}',
    b'{"model":"m","messages":[],"temperature":1e999}',
    b'{"model":"m","messages":[]} trailing',
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
]


@each_case("body", MALFORMED)
def test_what_is_not_a_json_object_is_a_400_with_the_decoders_reason(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        error = refusal(parse, body)
        assert error.status == 400
        assert error.message.startswith(PREFIX)


@each_case(
    ("fields", "detail", "param"),
    [
        ({"messages": [{"role": 1, "content": "x"}]}, "Expected `str`, got `int` - at `$.messages[0].role`", None),
        ({"messages": [{"role": "x"}]}, "Invalid value 'x' - at `$.messages[0].role`", None),
        ({"messages": [USER, {"role": "user"}]}, "Object missing required field `content` - at `$.messages[1]`", ""),
        ({"n": 1.5}, "Expected `int | null`, got `float` - at `$.n`", None),
        ({"seed": 2**63}, f"Expected `int` <= {2**63 - 1} - at `$.seed`", None),
        ({"stop": [-1]}, "Expected `int` >= 0 - at `$.stop[0]`", None),
    ],
)
def test_a_value_of_the_wrong_type_is_a_400_with_its_path(
    fields: dict[str, Any], detail: str, param: str | None
) -> None:
    error = refusal(parse_chat, chat(**fields))
    path = detail.rpartition("`$.")[2].rstrip("`")
    assert error.message == PREFIX + detail
    assert error.param == (path if param is None else "messages[1].content")


def test_a_missing_model_is_a_deserialisation_error() -> None:
    for parse, body in ((parse_chat, b'{"messages":[]}'), (parse_completion, b'{"prompt":"x"}')):
        error = refusal(parse, body)
        assert (error.message, error.param) == (PREFIX + "Object missing required field `model`", "model")


def test_a_huge_wrong_value_is_not_quoted_back_whole() -> None:
    error = refusal(parse_chat, chat(messages=[{"role": "x" * 1_000_000}]))
    assert len(error.message) < 1000
    assert error.message.endswith("`$.messages[0].role`")


def test_raw_control_characters_in_strings_are_mended() -> None:
    request = parse_chat(b'{\n\t"model":"m","messages":[{"role":"user","content":"a\nb\t\x00\\"\n\\\\"}]}')
    assert request.messages[0]["content"] == 'a\nb\t\x00"\n\\'
    assert request.repaired


def test_invalid_utf8_is_replaced() -> None:
    request = parse_chat(b'{"model":"m","messages":[{"role":"user","content":"a\xffb"}]}')
    assert request.messages[0]["content"] == "a\ufffdb"
    assert request.repaired


def test_half_an_escaped_emoji_is_replaced_and_a_whole_one_kept() -> None:
    request = parse_chat(rb'{"model":"m","messages":[{"role":"user","content":"\ud83d\ude00 \ud83d \\ud83d"}]}')
    assert request.messages[0]["content"] == "\U0001f600 \ufffd \\ud83d"


def test_strict_json_is_never_marked_as_mended() -> None:
    assert not parse_chat(chat()).repaired


def test_a_very_large_body_is_not_mended() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"' + b"\n" * MAX_MENDED_BYTES + b'"}]}'
    assert refusal(parse_chat, body).status == 400


@given(st.lists(st.text(max_size=4) | st.sampled_from(['"', "\\", "\n", "\x00", "\\u", "d83d", "[{"])).map("".join))
def test_a_string_whose_control_characters_are_raw_is_read_as_meant(content: str) -> None:
    raw = content.replace("\\", "\\\\").replace('"', '\\"')
    request = parse_chat(f'{{"model":"m","messages":[{{"role":"user","content":"{raw}"}}]}}'.encode())
    assert request.messages[0]["content"] == content


# -- bounds -------------------------------------------------------------------------------------------------------------


@each_case("depth", [MAX_DEPTH + 1, 900, 100_000])
@each_case("field", ["metadata", "chat_template_args", "guided_json", "audio", "unknown", "temperature"])
def test_a_depth_bomb_is_a_400(field: str, depth: int) -> None:
    bomb = b"[" * depth + b"]" * depth
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"%b":{"a":%b}}' % (field.encode(), bomb)
    assert refusal(parse_chat, body).status == 400
    assert refusal(parse_chat, b"[" * depth).status == 400
    assert refusal(parse_chat, b'{"a":' * depth).status == 400


@each_case("name", [*ChatRequest.__struct_fields__])
def test_no_field_lets_deep_nesting_through(name: str) -> None:
    bomb = b'{"a":' + b"[" * 500 + b"]" * 500 + b"}"
    for value in (bomb, b"[%b]" % bomb):
        fields = {"model": b'"m"', "messages": b'[{"role":"user","content":"x"}]', name: value}
        body = b"{%b}" % b",".join(b'"%b":%b' % (key.encode(), item) for key, item in fields.items())
        assert refusal(parse_chat, body).status == 400
    schema = b'{"type":"json_schema","json_schema":{"name":"n","schema":%b}}' % bomb
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"response_format":%b}' % schema
    assert "nested deeper" in refusal(parse_chat, body).message


def test_nesting_up_to_the_limit_passes() -> None:
    value: Any = []
    for _ in range(MAX_DEPTH - 2):
        value = [value]
    assert parse_chat(chat(metadata={"a": value})).metadata == {"a": value}


def test_brackets_inside_strings_do_not_count() -> None:
    text = '[{"\\' * (MAX_CONTAINERS + 1)
    assert parse_chat(chat(messages=[{"role": "user", "content": text}])).messages[0]["content"] == text


def test_a_body_of_countless_empty_containers_is_refused_before_they_exist() -> None:
    body = b'{"model":"m","messages":[],"metadata":{"a":[' + b"[]," * (MAX_CONTAINERS + 1) + b"[]]}}"
    assert f"more than {MAX_CONTAINERS} JSON arrays and objects" in refusal(parse_chat, body).message


# -- sweeps -------------------------------------------------------------------------------------------------------------

KINDS: Final[dict[str, Any]] = {
    "null": None,
    "str": "zz",
    "int": 5,
    "float": 0.5,
    "bool": True,
    "list": [0.5],
    "dict": {"zz": 0.5},
    "big": 2**80,
}

# What each field's type admits. A field may still be refused by a rule; then too it must be named.
_STRING = {"null", "str"}
_INT = {"null", "int"}
_FLOAT = {"null", "int", "float", "big"}
_BOOL = {"null", "bool"}
_DICT = {"null", "dict"}
_IDS = {"null"}
_ANY = set(KINDS)
ADMITS: Final[dict[str, set[str]]] = {
    "model": {"str"},
    "stream": _BOOL,
    "stream_options": _DICT,
    "temperature": _FLOAT,
    "top_p": _FLOAT,
    "n": _INT,
    "max_tokens": _INT,
    "stop": _STRING,
    "seed": _INT,
    "logit_bias": _DICT,
    "presence_penalty": _FLOAT,
    "frequency_penalty": _FLOAT,
    "user": _STRING,
    "metadata": _DICT,
    "ignore_eos": _BOOL,
    "min_tokens": _INT,
    "top_k": _INT,
    "min_p": _FLOAT,
    "repetition_penalty": _FLOAT,
    "include_stop_str_in_output": _BOOL,
    "skip_special_tokens": _BOOL,
    "prompt_logprobs": _INT,
    "return_tokens_as_token_ids": _BOOL,
    "guided_json": {"null", "str", "dict"},
    "guided_regex": _STRING,
    "guided_grammar": _STRING,
    "guided_choice": {"null"},
    "guided_decoding_backend": _STRING,
    "guided_whitespace_pattern": _STRING,
    "nvext": {"null"},
    "cache_salt": _STRING,
    "stop_token_ids": _IDS,
    "detokenize": _BOOL,
    "allowed_token_ids": _IDS,
    "bad_words_token_ids": _IDS,
    "logprob_token_ids": _IDS,
    "bad_words": _IDS,
    "truncate_prompt_tokens": _INT,
    "add_special_tokens": _BOOL,
    "return_token_ids": _BOOL,
    "request_id": _STRING,
    "messages": set(),
    "max_completion_tokens": _INT,
    "logprobs": _BOOL,
    "top_logprobs": _INT,
    "tools": {"null"},
    "tool_choice": {"null"},
    "parallel_tool_calls": _BOOL,
    "response_format": {"null"},
    "reasoning_effort": {"null"},
    "modalities": {"null"},
    "audio": _DICT,
    "web_search_options": _DICT,
    "functions": _ANY,
    "function_call": _ANY,
    "store": _BOOL,
    "service_tier": _STRING,
    "prediction": _DICT,
    "safety_identifier": _STRING,
    "prompt_cache_key": _STRING,
    "prompt_cache_retention": _STRING,
    "priority": _INT,
    "structured_outputs": {"null"},
    "verbosity": {"null"},
    "documents": {"null"},
    "chat_template_args": _DICT,
    "chat_template_kwargs": _DICT,
    "thinking": _BOOL,
    "thinking_token_budget": _INT,
    "add_generation_prompt": _BOOL,
    "continue_final_message": _BOOL,
    "media_io_kwargs": _DICT,
    "mm_processor_kwargs": _DICT,
}
COMPLETION_ADMITS: Final = {
    **{name: ADMITS[name] for name in CompletionRequest.__struct_fields__ if name in ADMITS},
    "prompt": {"str"},
    "prompt_embeds": _STRING,
    "echo": _BOOL,
    "best_of": _INT,
    "suffix": _STRING,
    "logprobs": _INT,
}


def sweep(admits: dict[str, set[str]]) -> list[tuple[str, str]]:
    return [(name, kind) for name in admits for kind in KINDS]


def check_one(parse: Callable[[bytes], Any], body: bytes, name: str, *, admitted: bool) -> None:
    error = outcome(parse, body)
    if not isinstance(error, RequestRejected):
        assert admitted, f"{name} was accepted"
        return
    assert error.param is not None
    assert error.param.split(".")[0].split("[")[0] == name
    assert error.status == 400 or (error.status == 422 and admitted)
    if not admitted:
        assert error.message.startswith(PREFIX)
        assert f"`$.{name}" in error.message


def test_the_sweep_covers_every_field() -> None:
    assert set(ADMITS) == set(ChatRequest.__struct_fields__)
    assert set(COMPLETION_ADMITS) == set(CompletionRequest.__struct_fields__)


@each_case(("name", "kind"), sweep(ADMITS))
def test_a_chat_field_of_any_kind_is_accepted_or_refused_by_name(name: str, kind: str) -> None:
    check_one(parse_chat, chat(**{name: KINDS[kind]}), name, admitted=kind in ADMITS[name])


@each_case(("name", "kind"), sweep(COMPLETION_ADMITS))
def test_a_completion_field_of_any_kind_is_accepted_or_refused_by_name(name: str, kind: str) -> None:
    admitted = kind in COMPLETION_ADMITS[name]
    check_one(parse_completion, completion(**{name: KINDS[kind]}), name, admitted=admitted)


NVEXT_GOOD: Final[dict[str, Any]] = {
    "greed_sampling": True,
    "use_raw_prompt": True,
    "annotations": ["a"],
    "backend_instance_id": 2**64 - 1,
    "prefill_worker_id": 1,
    "decode_worker_id": 1,
    "dp_rank": 1,
    "prefill_dp_rank": 1,
    "token_data": [1],
    "max_thinking_tokens": 1,
    "cache_salt": "s",
    "extra_fields": ["timing"],
    "metadata_upload": {"url": "u"},
    "agent_hints": {"priority": -1, "strict_priority": 1, "osl": 1, "speculative_prefill": True},
    "request_timestamp_ms": 1.5,
    "routing_constraints": {"required_taints": ["a"], "preferred_taints": {"b": 0.5}},
    "router": {"ttft_target": 1, "itl_target": 0.1},
    "slo_ttft_ms": 1,
}


@each_case("name", NVEXT_GOOD)
def test_every_nvext_field_takes_its_own_type_and_refuses_the_others_by_name(name: str) -> None:
    parse_chat(chat(nvext={name: NVEXT_GOOD[name]}))
    for value in ("zz", -5, 0.5, True, [0.5], {"zz": 0.5}, 2**80):
        error = outcome(parse_chat, chat(nvext={name: value}))
        if isinstance(error, RequestRejected):
            assert error.status == 400
            assert error.param is not None
            assert error.param.startswith(f"nvext.{name}")
        else:
            assert type(value) is type(NVEXT_GOOD[name]) or name == "request_timestamp_ms"


# -- fuzz ---------------------------------------------------------------------------------------------------------------

JSON_VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
CHAT_KEYS: Final = st.sampled_from([*ChatRequest.__struct_fields__, "foo"])
COMPLETION_KEYS: Final = st.sampled_from([*CompletionRequest.__struct_fields__, "foo"])
ROLES: Final = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "x"])
MESSAGES: Final = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES | JSON_VALUES, "content": st.text(max_size=5) | JSON_VALUES},
        optional={"tool_calls": JSON_VALUES, "name": JSON_VALUES, "tool_call_id": JSON_VALUES},
    ),
    max_size=3,
)


def parses_or_refuses(parse: Callable[[bytes], Any], body: bytes) -> None:
    result = outcome(parse, body)
    if not isinstance(result, RequestRejected):
        assert result.model.strip()
        return
    assert 400 <= result.status < 500
    assert len(result.message) < 10_000
    msgspec.json.decode(result.body())
    msgspec.json.decode(result.frame().removeprefix(b"data: "))


@examples(300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(CHAT_KEYS, JSON_VALUES, max_size=4), MESSAGES | JSON_VALUES)
def test_any_chat_body_parses_or_is_refused(fields: dict[str, Any], messages: Any) -> None:
    body = json.dumps({"model": "m", "messages": messages, **fields}, ensure_ascii=False)
    parses_or_refuses(parse_chat, body.encode("utf-8", "surrogatepass"))


@examples(200, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(COMPLETION_KEYS, JSON_VALUES, max_size=4), JSON_VALUES)
def test_any_completion_body_parses_or_is_refused(fields: dict[str, Any], prompt: Any) -> None:
    body = json.dumps({"model": "m", "prompt": prompt, **fields})
    parses_or_refuses(parse_completion, body.encode())


@examples(300)
@given(st.binary(max_size=40), st.integers(0, 60))
def test_any_bytes_parse_or_are_refused(junk: bytes, at: int) -> None:
    good = chat(temperature=0.5, stop=["a"])
    parses_or_refuses(parse_chat, junk)
    parses_or_refuses(parse_chat, good[:at] + junk + good[at:])
    parses_or_refuses(parse_chat, good[:at] + junk + good[at + len(junk) :])
