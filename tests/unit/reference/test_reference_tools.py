"""Forced tool calls and JSON answers from an engine that is really guided: a random model says them because it must."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.reference.engine import ReferenceEngine
from dynamo.worker.worker import Worker
from support.frontend_cluster import Cluster, cluster, memory_runtime
from support.patience import PATIENCE_SECONDS

pytest.importorskip("llguidance")

CITIES = ["Köln", "Rome", "New York"]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "now": {"type": "boolean"}},
    "required": ["city", "now"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": CITIES}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "time")]
NAMED = {"type": "function", "function": {"name": "time"}}
DRAWS = {"temperature": 1.0, "max_tokens": 400}


@asynccontextmanager
async def speaking(tmp_path: Path, model: Path, *flags: str) -> AsyncIterator[Cluster]:
    """A frontend over one reference engine."""
    async with cluster(tmp_path) as house:
        runtime = memory_runtime()
        argv = ["--model", str(model), "--served-model-name", "m", "--namespace", "ns", "--kv-cache-mb", "8"]
        engine, config = await ReferenceEngine.from_args([*argv, "--dyn-tool-call-parser", "hermes", *flags])
        worker = Worker(engine, config, runtime=runtime, embedded=True)
        running = asyncio.create_task(worker.run())
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await house.frontend.models.wait_for(lambda: house.frontend.models.lookup("m") is not None)
            yield house
        finally:
            worker.request_stop()
            await running
            await runtime.aclose()


@pytest.fixture(autouse=True)
def _leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0")


def calls_of(choice: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


async def streamed_calls(house: Cluster, **fields: Any) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    names: list[str] = []
    said: list[str] = []
    content = ""
    for chunk in (await house.client.chat("hi", stream=True, **fields)).chunks:
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                names.append(call["function"]["name"])
                said.append("")
            said[call["index"]] += call["function"]["arguments"]
    return content, [(name, json.loads(arguments)) for name, arguments in zip(names, said, strict=True)]


def check(calls: list[tuple[str, dict[str, Any]]], names: set[str]) -> None:
    assert calls
    for name, arguments in calls:
        assert name in names
        assert set(arguments) == {"city", "now"}
        assert arguments["city"] in CITIES
        assert isinstance(arguments["now"], bool)


@pytest.mark.parametrize("flags", [[], ["--dyn-structural-tag", "true"]], ids=["json", "structural tag"])
@pytest.mark.process  # computes for a second and more
async def test_forced_calls_come_and_fit_their_schema(tmp_path: Path, speaking_model: Path, flags: list[str]) -> None:
    async with speaking(tmp_path, speaking_model, *flags) as house:
        for seed in range(2):
            for choice, names in (("required", {"weather", "time"}), (NAMED, {"time"})):
                asked: dict[str, Any] = {
                    "tools": TOOLS,
                    "tool_choice": choice,
                    "parallel_tool_calls": False,
                    "seed": seed,
                    **DRAWS,
                }
                answer = await house.client.chat("hi", **asked)
                assert answer.status == 200, answer.body
                (one,) = answer.json["choices"]
                calls = calls_of(one)
                check(calls, names)
                assert one["finish_reason"] == ("stop" if choice is NAMED else "tool_calls")  # as OpenAI has it
                assert await streamed_calls(house, **asked) == (one["message"]["content"] or "", calls)


async def test_a_json_answer_fits_its_schema_also_behind_reasoning(tmp_path: Path, speaking_model: Path) -> None:
    async with speaking(tmp_path, speaking_model, "--dyn-reasoning-parser", "qwen3") as house:
        form = {"type": "json_schema", "json_schema": {"name": "where", "schema": PARAMETERS}}
        for seed in range(2):
            for thinking in (False, True):
                budget = {"thinking_token_budget": 5} if thinking else {}
                asked: dict[str, Any] = {"response_format": form, "thinking": thinking, "seed": seed, **DRAWS, **budget}
                answer = await house.client.chat("hi", **asked)
                assert answer.status == 200, answer.body
                (one,) = answer.json["choices"]
                check([("weather", json.loads(one["message"]["content"]))], {"weather"})
                assert one["finish_reason"] == "stop"


# How the usual clients write a tool with one boolean.
WAYS = {
    "a dict": {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]},
    "a pydantic model": {
        "properties": {"yes": {"description": "Is it?", "title": "Yes", "type": "boolean"}},
        "required": ["yes"],
        "title": "Answer",
        "type": "object",
    },
    "langchain function calling": {
        "description": "An answer.",
        "properties": {"yes": {"default": False, "type": "boolean"}},
        "type": "object",
    },
    "pydantic-ai": {
        "additionalProperties": False,
        "properties": {"yes": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None}},
        "type": "object",
    },
    "instructor": {
        "$defs": {"Answer": {"properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "type": "object"}},
        "properties": {"task": {"$ref": "#/$defs/Answer"}},
        "required": ["task"],
        "title": "Task",
        "type": "object",
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.process  # computes for a second and more
async def test_a_boolean_tool_of_every_client_ends_with_a_valid_call(
    tmp_path: Path, speaking_model: Path, way: str
) -> None:
    tool = {"type": "function", "function": {"name": "answer", "parameters": WAYS[way]}}
    named = {"type": "function", "function": {"name": "answer"}}
    async with speaking(tmp_path, speaking_model) as house:
        for seed in range(4):
            for choice in ("required", named):
                fields: dict[str, Any] = {
                    "parallel_tool_calls": False,
                    "temperature": 2.0,
                    "max_tokens": 100,
                    "seed": seed,
                }
                answer = await house.client.chat("hi", tools=[tool], tool_choice=choice, **fields)
                assert answer.status == 200, answer.body
                (one,) = answer.json["choices"]
                reason = "stop" if choice is named else "tool_calls"
                assert (one["finish_reason"], one["message"]["content"]) == (reason, None), one
                ((name, arguments),) = calls_of(one)
                assert name == "answer"
                assert set(arguments) <= {"yes", "task"}


async def test_calls_without_end_are_cut_and_never_content(tmp_path: Path, speaking_model: Path) -> None:
    # As instructor asks for an iterable: the model may go on with items for as long as it likes.
    item = WAYS["a dict"]
    many = {"type": "object", "properties": {"tasks": {"type": "array", "items": item, "minItems": 30}}}
    tool = {"type": "function", "function": {"name": "answer", "parameters": {**many, "required": ["tasks"]}}}
    async with speaking(tmp_path, speaking_model) as house:
        for choice in ("required", {"type": "function", "function": {"name": "answer"}}):
            fields: dict[str, Any] = {
                "tools": [tool],
                "tool_choice": choice,
                "max_tokens": 100,
                "temperature": 1.0,
                "seed": 1,
            }
            (one,) = (await house.client.chat("hi", **fields)).json["choices"]
            assert (one["finish_reason"], one["message"]["content"]) == ("length", None)
            (call,) = one["message"]["tool_calls"]
            assert call["function"]["name"] == "answer"
            assert call["function"]["arguments"].lstrip().startswith("{")


async def test_the_likelihood_of_a_text_is_that_of_its_tokens_one_by_one(tmp_path: Path, speaking_model: Path) -> None:
    """What lm-eval asks for (`loglikelihood`): token ids, echo, logprobs 1, max_tokens 1 or 0."""
    texts = [[70, 71, 90, 72, 101], [80, 81, 82]]
    async with speaking(tmp_path, speaking_model) as house:
        for max_tokens in (0, 1):
            fields: dict[str, Any] = {
                "echo": True,
                "logprobs": 1,
                "max_tokens": max_tokens,
                "temperature": 0,
                "seed": 1234,
            }
            answer = await house.client.completion(texts, **fields)
            assert answer.status == 200, answer.body
            for text, choice in zip(texts, answer.json["choices"], strict=True):
                found = choice["logprobs"]
                assert len(found["tokens"]) == len(found["top_logprobs"]) == len(text) + max_tokens
                assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
                for place in range(1, len(text)):
                    ask: dict[str, Any] = {
                        "max_tokens": 1,
                        "logprobs": 1,
                        "temperature": 0,
                        "logprob_token_ids": [text[place]],
                    }
                    alone = await house.client.completion(text[:place], return_tokens_as_token_ids=True, **ask)
                    (top,) = alone.json["choices"][0]["logprobs"]["top_logprobs"]
                    own = found["token_logprobs"][place]
                    assert own == pytest.approx(top[f"token_id:{text[place]}"], abs=1e-4)
                    assert max(found["top_logprobs"][place].values()) == pytest.approx(max(top.values()), abs=1e-4)
