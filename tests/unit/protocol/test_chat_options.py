from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo.protocol.openai import ChatOptions, chat_options, parse_chat
from dynamo.protocol.openai.shapes import REQUIRED
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


@each_case(
    ("choice", "forced", "tools"),
    [("auto", None, 1), ("none", None, 0), ("required", REQUIRED, 1), (NAMED, "f", 1)],
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
