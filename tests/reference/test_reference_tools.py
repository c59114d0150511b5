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
            async with asyncio.timeout(20):
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
async def test_forced_calls_come_and_fit_their_schema(tmp_path: Path, speaking_model: Path, flags: list[str]) -> None:
    async with speaking(tmp_path, speaking_model, *flags) as house:
        for seed in range(2):
            for choice, names in (("required", {"weather", "time"}), (NAMED, {"time"})):
                asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": seed, **DRAWS}
                answer = await house.client.chat("hi", **asked)
                assert answer.status == 200, answer.body
                (one,) = answer.json["choices"]
                calls = calls_of(one)
                check(calls, names)
                assert one["finish_reason"] == "tool_calls"
                assert await streamed_calls(house, **asked) == (one["message"]["content"] or "", calls)


async def test_a_json_answer_fits_its_schema_also_behind_reasoning(tmp_path: Path, speaking_model: Path) -> None:
    async with speaking(tmp_path, speaking_model, "--dyn-reasoning-parser", "qwen3") as house:
        form = {"type": "json_schema", "json_schema": {"name": "where", "schema": PARAMETERS}}
        for seed in range(2):
            for thinking in (False, True):
                budget = {"thinking_token_budget": 5} if thinking else {}
                asked = {"response_format": form, "thinking": thinking, "seed": seed, **DRAWS, **budget}
                answer = await house.client.chat("hi", **asked)
                assert answer.status == 200, answer.body
                (one,) = answer.json["choices"]
                check([("weather", json.loads(one["message"]["content"]))], {"weather"})
                assert one["finish_reason"] == "stop"
