"""The functions of the Berkeley leaderboard, forced on the demonstration model: each call is one that its document allows.

Which call is right the small model cannot know, so this judges the form alone: that of every document there is.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import jsonschema
import pytest

from process.foreign.suites import package, served_demo
from support.http_client import exchange
from support.patience import PATIENCE_SECONDS

FILES: Final = ("simple_python", "multiple", "parallel", "live_simple", "live_multiple")
WHOLE, CUT, TOO_LONG = OUTCOMES = ("whole", "cut at max_tokens", "longer than the context")
AT_ONCE: Final = 4
EVERY: Final = 20  # one item of so many
TYPES: Final = {
    "float": "number", "double": "number", "dict": "object", "tuple": "array", "list": "array", "bool": "boolean", "any": "string",
}  # fmt: skip
"""Its words for types that JSON Schema has other words for."""

SHORT: Final = {"string": "maxLength", "array": "maxItems"}  # the small model seldom ends a text by itself


def items(name: str) -> list[dict[str, Any]]:
    """Return some items of a file."""
    file = package("bfcl", "bfcl_eval") / "data" / f"BFCL_v4_{name}.json"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[::EVERY]]


def schema_of(document: Any) -> Any:
    """Return a document of its own as JSON Schema."""
    if isinstance(document, list):
        return [schema_of(each) for each in document]
    if not isinstance(document, dict):
        return document
    made = {key: schema_of(value) for key, value in document.items() if key not in ("default", "optional")}
    if isinstance(document.get("type"), str):
        kind = made["type"] = TYPES.get(document["type"], document["type"])
        if kind in SHORT and "enum" not in made:
            made[SHORT[kind]] = 8
    return made


def tools_of(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the functions of an item as tools. A name of OpenAI's has no dot."""
    return [
        {
            "type": "function",
            "function": {
                "name": each["name"].replace(".", "_"),
                "description": each["description"],
                "parameters": schema_of(each["parameters"]),
            },
        }
        for each in item["function"]
    ]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    package("bfcl", "bfcl_eval")
    with served_demo(tmp_path_factory.mktemp("served")) as url:
        yield int(url.rpartition(":")[2])


@pytest.mark.foreign
@pytest.mark.timeout(10 * PATIENCE_SECONDS)
@pytest.mark.parametrize("name", FILES)
async def test_a_forced_call_is_one_that_the_document_of_its_function_allows(name: str, port: int) -> None:
    places = asyncio.Semaphore(AT_ONCE)
    judged = await asyncio.gather(*[judge(port, item, places) for item in items(name)])
    assert [each for each in judged if each not in OUTCOMES] == []
    short = len(judged) - judged.count(TOO_LONG)
    assert judged.count(WHOLE) > short * 3 // 4 > 0, Counter(judged)


async def judge(port: int, item: dict[str, Any], places: asyncio.Semaphore) -> str:
    """Force a call; return one of the outcomes, or what is wrong with the call."""
    tools = tools_of(item)
    parameters = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    body = {"model": "demo", "messages": item["question"][0], "tools": tools, "tool_choice": "required"}
    body |= {"reasoning_effort": "none", "parallel_tool_calls": False}  # the small model seldom ends these by itself
    body |= {"max_tokens": 300, "temperature": 0}
    async with places, exchange(port, "/v1/chat/completions", body) as opened:
        reply = await opened.reply(
            patience=4 * PATIENCE_SECONDS
        )  # the demonstration model is slow where others compute
    if reply.status == 400 and reply.json()["error"]["code"] == "context_length_exceeded":
        return TOO_LONG
    if reply.status != 200:
        return f"{item['id']}: {reply.status} {reply.body!r}"
    choice = reply.json()["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    if choice["finish_reason"] == "length":
        return CUT
    try:
        for call in calls:
            jsonschema.validate(json.loads(call["function"]["arguments"]), parameters[call["function"]["name"]])
    except (jsonschema.ValidationError, KeyError, ValueError) as error:
        return f"{item['id']}: {calls}: {str(error)[:300]}"
    return WHOLE if calls else f"{item['id']}: no call: {choice}"
