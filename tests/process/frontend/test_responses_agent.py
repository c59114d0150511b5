"""A coding agent over the Responses API: it sends what Codex sends, does what it is told to, and ends with the right file.

The engine is a script that reads nothing but its prompt: what it does next follows from the outputs of tools that it finds there.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from dynamo.frontend.http.server import HttpServer
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.frontend_cluster import Cluster, ScriptedWorker, cluster

GRAMMAR = 'start: "*** Add File: " /.+/ "\\n" line+\nline: "+" /.*/ "\\n"'
READ = {
    "type": "function",
    "name": "read",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "shell",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "array", "items": {"type": "string"}}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
    },
    {"type": "namespace", "name": "files", "description": "Files.", "tools": [READ]},
    {"type": "namespace", "name": "web", "description": "Pages.", "tools": [READ]},
    {"type": "local_shell"},
    {"type": "web_search"},
    {"type": "image_generation"},
    {"type": "tool_search"},
]
ASKED = [
    {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "<permissions>all</permissions>"}],
    },
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "Add up numbers.txt into total.txt."}],
    },
]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def next_step(prompt: str) -> str:
    """What the model writes behind this prompt."""
    if (wrote := re.search(r"content of total.txt: (\d+)", prompt)) is not None:
        return f"<think>It is there.</think>The total is {wrote[1]}."
    if "patched total.txt" in prompt:
        return call("files__read", path="total.txt")
    if (listed := re.search(r"numbers.txt says ([\d ]+)\.", prompt)) is not None:
        total = sum(map(int, listed[1].split()))
        return "<think>Now I add.</think>Writing it.\n" + call(
            "apply_patch", input=f"*** Add File: total.txt\n+{total}\n"
        )
    return "<think>First I look.</think>" + call("shell", command=["cat", "numbers.txt"])


async def engine(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    for byte in next_step(bytes(body["token_ids"]).decode()).encode():
        sink.send_tokens([byte])
        await asyncio.sleep(0)
    sink.send_tokens([], finish_reason="stop")


class Agent:
    """Runs the tools on a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ran: list[str] = []

    def outputs(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The results of the calls among these items."""
        found = []
        for item in items:
            match item:
                case {"type": "function_call", "name": "shell", "call_id": id, "arguments": arguments}:
                    command = json.loads(arguments)["command"]
                    assert command[0] == "cat"
                    said = f"{command[1]} says {(self._directory / command[1]).read_text()}."
                    found.append({"type": "function_call_output", "call_id": id, "output": said})
                case {"type": "custom_tool_call", "name": "apply_patch", "call_id": id, "input": patch}:
                    head, *lines = patch.splitlines()
                    name = head.removeprefix("*** Add File: ")
                    (self._directory / name).write_text("\n".join(line.removeprefix("+") for line in lines))
                    found.append({"type": "custom_tool_call_output", "call_id": id, "output": f"patched {name}"})
                case {
                    "type": "function_call",
                    "name": "read",
                    "namespace": "files",
                    "call_id": id,
                    "arguments": arguments,
                }:
                    path = json.loads(arguments)["path"]
                    text = f"content of {path}: {(self._directory / path).read_text()}"
                    parts = [{"type": "input_text", "text": text}]
                    found.append({"type": "function_call_output", "call_id": id, "output": parts})
                case {"type": "function_call" | "custom_tool_call"}:
                    raise AssertionError(f"a call of nothing that was offered: {item}")
                case _:
                    continue
            self.ran.append(item["name"])
        return found


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[tuple[Cluster, ScriptedWorker, openai.AsyncOpenAI]]:
    # The agent offers tools that run elsewhere, and works without them.
    settings: dict[str, Any] = {"http_host": "127.0.0.1", "http_port": 0, "ignore_unsupported_fields": True}
    async with cluster(tmp_path, **settings) as found:
        server = HttpServer(found.frontend)
        await server.start()
        config = ModelRuntimeConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
        worker = await found.worker(engine, runtime_config=config)
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
            yield found, worker, client
        await server.close()


def codex(items: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "instructions": "You are a coding agent.\n" * 200,
        "input": items,
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "extra_body": {"client_metadata": {"session": "x"}},
        **more,
    }


async def test_an_agent_that_keeps_its_own_history(house: Any, tmp_path: Path) -> None:
    _, worker, client = house
    (tmp_path / "numbers.txt").write_text("17 25")
    agent, items = Agent(tmp_path), list[Any](ASKED)
    for _ in range(10):
        done: list[dict[str, Any]] = []
        completed = None
        async for event in await client.responses.create(stream=True, store=False, **codex(items)):
            if event.type == "response.output_item.done":
                done.append(event.item.to_dict())
            elif event.type == "response.completed":
                completed = event.response
        assert completed is not None
        assert [item.to_dict() for item in completed.output] == done
        assert completed.usage is not None
        assert completed.usage.output_tokens > 0
        # Of reasoning such an agent keeps what is packed, and no plain text.
        items += [{**item, "content": None} if item["type"] == "reasoning" else item for item in done]
        outputs = agent.outputs(done)
        if not outputs:
            break
        items += outputs
    assert agent.ran == ["shell", "apply_patch", "read"]
    assert (tmp_path / "total.txt").read_text() == "42"
    assert completed is not None
    assert completed.output_text == "The total is 42."
    last = bytes(worker.requests[-1]["token_ids"]).decode()
    assert [last.count(thought) for thought in ("First I look.", "Now I add.")] == [1, 1]
    assert len(worker.requests) == 4


async def test_an_agent_whose_history_is_stored(house: Any, tmp_path: Path) -> None:
    _, worker, client = house
    (tmp_path / "numbers.txt").write_text("40 2 0")
    agent, items, previous = Agent(tmp_path), list[Any](ASKED), openai.omit
    for _ in range(10):
        async with client.responses.stream(**codex(items, previous_response_id=previous)) as stream:
            async for _event in stream:
                pass
            response = await stream.get_final_response()
        items, previous = agent.outputs([item.to_dict() for item in response.output]), response.id
        if not items:
            break
    assert agent.ran == ["shell", "apply_patch", "read"]
    assert (tmp_path / "total.txt").read_text() == "42"
    assert response.output_text == "The total is 42."
    assert (await client.responses.retrieve(response.id)).output_text == "The total is 42."
    assert len(worker.requests) == 4
