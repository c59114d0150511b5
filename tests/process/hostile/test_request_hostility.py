"""Every field of every inference route, given every wrong type and many wrong values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.protocol.openai.shapes import ChatRequest, CompletionRequest, NvExt
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.frontend_cluster import cluster, say

ROUTES: dict[str, tuple[dict[str, Any], type[Any]]] = {
    "/v1/chat/completions": ({"model": "m", "messages": [{"role": "user", "content": "hi"}]}, ChatRequest),
    "/v1/completions": ({"model": "m", "prompt": "hi"}, CompletionRequest),
}

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

WRONG: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**64),
    10**400,
    1.5,
    -1e308,
    1e308,
    "",
    "x",
    "\x00",
    "\u202e\U0001f600",
    "x" * 100_000,
    [],
    [None],
    [[]],
    ["x"] * 2000,
    [0] * 2000,
    {},
    {"": {}},
    {"type": "x"},
    {"role": "user"},
    [{}],
    [{"role": "user"}],
    [{"role": "user", "content": {}}],
    [{"role": 7, "content": "x"}],
    [{"type": "function", "function": {"name": 3}}],
    DEEP,
]


@pytest.mark.parametrize("path", ROUTES)
async def test_no_value_of_any_field_is_more_than_a_4xx(tmp_path: Path, path: str) -> None:
    good, shape = ROUTES[path]
    tried = 0
    async with cluster(tmp_path, metrics_prefix="t") as house:
        await house.worker(say("fine"))
        bodies = [{**good, name: value} for name in shape.__struct_fields__ for value in WRONG]
        bodies += [{**good, "nvext": {name: value}} for name in NvExt.__struct_fields__ for value in WRONG]
        bodies += WRONG
        bodies += [{name: value for name, value in good.items() if name != left} for left in good]
        for body in bodies:
            tried += 1
            answer = await house.client.call("POST", path, body)
            assert answer.status == 200 or 400 <= (answer.status or 0) < 500, (
                answer.body,
                str(body)[:200],
            )
            if answer.status != 200:
                error = json.loads(answer.body)
                assert error["code"] == answer.status
                assert error["message"] == error["error"]["message"] != ""
        answer = await house.client.call("POST", path, good)
        assert answer.status == 200
        assert house.frontend.admission.in_flight == 0
    assert tried > 1000


MALFORMED = [
    b"",
    b" ",
    b"{",
    b"}",
    b'{"model"',
    b'{"model":}',
    b"{'model':'m'}",
    b'{"model":"m",}',
    b'{"model":"m"} trailing',
    b'{"model":"m","model":"m"}',
    b"NaN",
    b'{"temperature":NaN}',
    b'{"temperature":Infinity}',
    b'{"model":"\\ud800"}',
    b'{"model":"\xff\xfe"}',
    b'{"model":"m\x00"}',
    b"\xef\xbb\xbf{}",
    b"\x00" * 1000,
    b"[" * 1_000_000,
    b'{"a":' * 100_000,
    b'{"model":"m","metadata":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'"' + b"x" * 1_000_000,
    b"1" * 1_000_000,
    b"1e" + b"9" * 100_000,
    b"\x1f\x8b\x08\x00" + b"\x00" * 100,
    "{}".encode("utf-16"),
    "{}".encode("utf-32"),
]


@pytest.mark.parametrize("path", ROUTES)
async def test_what_is_no_json_is_a_400_that_says_why(tmp_path: Path, path: str) -> None:
    async with cluster(tmp_path) as house:
        await house.worker(say("fine"))
        for body in MALFORMED:
            answer = await house.client.call("POST", path, body)
            assert 400 <= (answer.status or 0) < 500, body[:60]
            assert json.loads(answer.body)["message"]


async def test_conversations_and_depth_beyond_the_settings_are_a_400_and_counted(tmp_path: Path) -> None:
    async with cluster(tmp_path, messages_limit=3, json_depth_limit=8) as house:
        await house.worker(say("fine"))
        message = {"role": "user", "content": "hi"}
        for many, status in ((3, 200), (4, 400)):
            answer = await house.client.call(
                "POST", "/v1/chat/completions", {"model": "m", "messages": [message] * many}
            )
            assert answer.status == status
        assert "DYN_HTTP_MESSAGES_LIMIT" in json.loads(answer.body)["message"]
        deep: Any = "x"
        for _ in range(9):
            deep = [deep]
        answer = await house.client.call(
            "POST", "/v1/chat/completions", {"model": "m", "messages": [message], "chat_template_args": {"a": deep}}
        )
        assert (answer.status, "DYN_HTTP_JSON_DEPTH_LIMIT" in json.loads(answer.body)["message"]) == (400, True)
        for limit in ("messages", "json_depth"):
            assert house.metric("dynamo_frontend_refusals_total", limit=limit) == 1


def chained_references(count: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(count)}
    return {"type": "object", "$ref": "#/$defs/a0", "$defs": {**definitions, f"a{count}": {"type": "integer"}}}


def tool_with(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


RULES = "\n".join(["start: r0", *(f"r{number}: r{number + 1}" for number in range(4000)), 'r4000: "x"'])
KILLERS = {
    "guided_grammar": ({"guided_grammar": RULES}, "guided_rules", "DYN_GUIDED_MAX_RULES", "guided_grammar"),
    "guided_regex": (
        {"guided_regex": "(" * 501 + ")" * 501},
        "guided_brackets",
        "DYN_GUIDED_MAX_BRACKETS",
        "guided_regex",
    ),
    "guided_json": (
        {"guided_json": chained_references(3000)},
        "guided_references",
        "DYN_GUIDED_MAX_REFERENCES",
        "guided_json",
    ),
    "guided_json as text": (
        {"guided_json": json.dumps(chained_references(3000))},
        "guided_references",
        "DYN_GUIDED_MAX_REFERENCES",
        "guided_json",
    ),
    "response_format": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": chained_references(3000)},
            }
        },
        "guided_references",
        "DYN_GUIDED_MAX_REFERENCES",
        "guided_json",
    ),
    "forced tools": (
        {"tools": [tool_with(chained_references(3000))], "tool_choice": "required"},
        "guided_references",
        "DYN_GUIDED_MAX_REFERENCES",
        "guided_json",
    ),
}


@pytest.mark.parametrize("name", KILLERS)
async def test_a_grammar_that_would_kill_a_worker_never_reaches_one(tmp_path: Path, name: str) -> None:
    more, limit, variable, param = KILLERS[name]
    seen: list[Any] = []

    async def remember(body: Any, context: Context, sink: ResponseSink) -> None:
        seen.append(body)
        sink.send_tokens([], finish_reason="stop")

    async with cluster(tmp_path) as house:
        await house.worker(remember)
        answer = await house.client.call(
            "POST",
            "/v1/chat/completions",
            {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more},  # type: ignore[dict-item]
        )
        error = json.loads(answer.body)
        assert (answer.status, error["error"]["param"], variable in error["message"]) == (400, param, True)
        assert house.metric("dynamo_frontend_refusals_total", limit=limit) == 1
    assert seen == []
