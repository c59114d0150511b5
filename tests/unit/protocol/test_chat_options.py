from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocol.openai import ChatOptions, chat_options, parse_chat, to_worker_fields
from dynamo.protocol.openai.shapes import REQUIRED, ChatRequest
from dynamo.protocol.openai.validation import SPECIAL
from support.cases import each_case

TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def options(default: str | None = None, **fields: Any) -> ChatOptions:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return chat_options(parse_chat(json.dumps(body).encode()), default_thinking_mode=default)


def test_a_plain_chat_has_none() -> None:
    found = options()
    assert (found.forced_choice, found.thinking_mode, found.thinking, list(found.tools)) == (None, None, None, [])
    assert [found.only_first_call, found.fills_content, found.has_own_form, found.guides_json] == [False] * 4
    assert dict(found.template_variables) == {}


def test_each_member_of_a_chat_is_special_or_read_on_every_way() -> None:
    plain = set(ChatRequest.__struct_fields__) - set(SPECIAL)
    assert plain == {
        "model", "messages", "stream", "stream_options", "temperature", "top_p", "n", "max_tokens", "max_completion_tokens",
        "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "min_p", "min_tokens", "ignore_eos",
        "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs", "logprobs", "return_tokens_as_token_ids",
        "return_token_ids", "add_special_tokens", "stop_token_ids", "cache_salt", "store", "user", "metadata", "service_tier",
        "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction",
    }  # fmt: skip


VALUES: Final = {
    "temperature": 0.5, "max_tokens": 3, "n": 2, "seed": 1, "logprobs": True, "cache_salt": "s", "ignore_eos": True,
    "stop_token_ids": [5], "top_k": 0, "min_tokens": 1, "prompt_logprobs": 1,
    "stop": ["x"], "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False, "nvext": {"greed_sampling": True},
    "priority": 3, "response_format": SCHEMA, "guided_regex": "a", "guided_decoding_backend": "b", "bad_words": ["w"],
    "chat_template_args": {"thinking": True}, "thinking_token_budget": 4, "reasoning_effort": "low", "verbosity": "low",
    "documents": [{}], "logit_bias": {"1": 2}, "detokenize": False, "allowed_token_ids": [1], "logprob_token_ids": [2],
}  # fmt: skip


@given(st.sets(st.sampled_from(sorted(VALUES)), max_size=4), st.sampled_from([None, "lora"]))
def test_a_plain_chat_becomes_what_the_long_way_makes_of_it(names: set[str], lora: str | None) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **{name: VALUES[name] for name in names}}
    request, other = parse_chat(json.dumps(body).encode()), parse_chat(json.dumps(body).encode())
    assert request.is_plain is names.isdisjoint(SPECIAL)
    other.is_plain = False
    assert chat_options(request) == chat_options(other)
    assert to_worker_fields(request, lora_name=lora) == to_worker_fields(other, lora_name=lora)


@each_case(
    ("choice", "forced", "tools"), [("auto", None, 1), ("none", None, 0), ("required", REQUIRED, 1), (NAMED, "f", 1)]
)
def test_the_choice_of_a_tool(choice: Any, forced: str | None, tools: int) -> None:
    found = options(tools=[TOOL], tool_choice=choice)
    assert (found.forced_choice, len(found.tools)) == (forced, tools)
    assert found.guides_json is (forced is not None)
    assert not found.has_own_form


@each_case(
    ("fields", "default", "mode", "thinking"),
    [
        ({}, "enabled", "enabled", True),
        ({"thinking": False}, "enabled", "disabled", False),
        ({"thinking": {"type": "adaptive"}}, None, "adaptive", None),
        ({"reasoning_effort": "none"}, "enabled", "disabled", False),
        ({"chat_template_args": {"thinking_mode": "deep"}}, "enabled", "deep", None),
    ],
)
def test_the_thinking_mode_reaches_the_templates_variables(
    fields: dict[str, Any], default: str | None, mode: str, thinking: bool | None
) -> None:
    found = options(default, **fields)
    assert (found.thinking_mode, found.thinking) == (mode, thinking)
    assert found.template_variables["thinking_mode"] == mode


@each_case(
    ("fields", "guides_json"),
    [
        ({"response_format": SCHEMA}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"guided_json": {"type": "object"}}, True),
        ({"guided_regex": "a+"}, False),
    ],
)
def test_a_form_of_the_requests_own(fields: dict[str, Any], guides_json: bool) -> None:
    found = options(**fields)
    assert found.has_own_form
    assert found.guides_json is guides_json


def test_nothing_changes_them() -> None:
    found = options(guided_regex="a", guided_decoding_backend="b", parallel_tool_calls=False, tools=[TOOL])
    assert (found.guidance_backend, found.only_first_call) == ("b", True)
    with pytest.raises(AttributeError):
        found.thinking_mode = "x"  # type: ignore[misc]
