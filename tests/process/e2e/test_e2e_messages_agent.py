"""A coding agent over the Messages API, sending what Claude Code sends, until the program in its folder is right.

The model is a script that reads its prompt: what it calls next depends on the results that it finds there. The agent is
real: it runs the calls in a folder, and sends everything back as blocks.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic", reason="pip install -e '.[dev]'")


from dynamo.frontend.http.server import HttpServer  # noqa: E402
from dynamo.protocol.records import ModelRuntimeConfig  # noqa: E402
from dynamo.runtime.calls.context import Context  # noqa: E402
from dynamo.runtime.calls.request_plane.base import ResponseSink  # noqa: E402
from support.frontend_cluster import Cluster, cluster  # noqa: E402
from support.patience import PATIENCE_SECONDS  # noqa: E402

BROKEN = 'def greet(name):\n    return "Hello, " + nam + "! \\U0001f600 \\\\"\n'
CHECK = "from greeting import greet\nassert greet('Zoë') == 'Hello, Zoë! \\U0001f600 \\\\'\nprint('all 1 passed')\n"
TASK = "Make check.py pass."
TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": f"{name} " + "(" + "a long description of a tool, as agents have them. " * 40 + ")",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {member: {"type": "string"} for member in members},
            "required": list(members),
            "additionalProperties": False,
        },
        **more,
    }
    for name, members, more in (
        ("Read", ["file_path"], {}),
        ("Edit", ["file_path", "old_string", "new_string"], {"eager_input_streaming": True}),
        ("Bash", ["command"], {"cache_control": {"type": "ephemeral"}}),
    )
]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def next_step(prompt: str) -> str:
    """Return what the model writes behind this prompt."""
    if "small request" in prompt:
        return "greeting"
    if "all 1 passed" in prompt:
        return "<think>\nThe check passes.\n</think>\n\nFixed: `nam` was a typo of `name`."
    if "The file has been edited" in prompt:
        return call("Bash", command="check.py")
    if "NameError" in prompt and "1\tdef greet" in prompt:
        return "I fix the name.\n\n" + call(
            "Edit", file_path="greeting.py", old_string='"Hello, " + nam + "', new_string='"Hello, " + name + "'
        )
    return (
        "<think>\nI look first.\n</think>\n\nI read the file and run the check.\n"
        + call("Read", file_path="greeting.py")
        + "\n"
        + call("Bash", command="check.py")
    )


async def model(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    text = next_step(bytes(body["token_ids"]).decode())
    for number, token in enumerate(text.encode()):
        sink.send_tokens([token])
        if number % 7 == 0:
            await asyncio.sleep(0)
    sink.send_tokens([], finish_reason="stop")


class Agent:
    """The loop of a coding agent."""

    def __init__(self, client: Any, folder: Path) -> None:
        self._client, self._folder = client, folder
        self.messages: list[dict[str, Any]] = []
        self.turns: list[Any] = []

    def options(self) -> dict[str, Any]:
        billing = f"x-anthropic-billing-header: cc_version=2.1.{len(self.turns)}; cch=0{len(self.messages)}"
        return {
            "model": "m",
            "messages": self.messages,
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
            ],
            "tools": TOOLS,
            "thinking": {"type": "adaptive"},
        }

    async def work(self) -> Any:
        reminder = {"type": "text", "text": "<system-reminder>\nBe brief.\n</system-reminder>\n"}
        self.messages.append({"role": "user", "content": [reminder, {"type": "text", "text": TASK}]})
        while len(self.turns) < 8:
            counted = await self._client.messages.count_tokens(**self.options())
            message = await self._ask()
            assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
            self.messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
            calls = [block for block in message.content if block.type == "tool_use"]
            assert (message.stop_reason == "tool_use") == bool(calls)
            if not calls:
                return message
            results: list[dict[str, Any]] = [self._run(block) for block in calls]
            self.messages.append({"role": "user", "content": [*results, reminder]})
        raise AssertionError("the agent did not come to an end")

    async def _ask(self) -> Any:
        async with self._client.beta.messages.stream(
            max_tokens=32_000,
            extra_body={"temperature": 1, "service_tier": "auto", "speed": "fast"},
            metadata={"user_id": "user_1"},
            betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            **self.options(),
        ) as stream:
            async for _ in stream:
                pass
            message = await stream.get_final_message()
        self.turns.append(message)
        return message

    def _run(self, block: Any) -> dict[str, Any]:
        given, is_error = block.input, False
        match block.name:
            case "Read":
                lines = (self._folder / given["file_path"]).read_text().splitlines()
                said = "\n".join(f"{number}\t{line}" for number, line in enumerate(lines, 1))
            case "Edit":
                path = self._folder / given["file_path"]
                assert path.read_text().count(given["old_string"]) == 1
                path.write_text(path.read_text().replace(given["old_string"], given["new_string"]))
                said = "The file has been edited."
            case _:
                done = subprocess.run(
                    [sys.executable, "-B", given["command"]],
                    cwd=self._folder,
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE_SECONDS,
                    check=False,
                )
                said, is_error = done.stdout + done.stderr, done.returncode != 0
        content = [{"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}]
        return {"type": "tool_result", "tool_use_id": block.id, "content": content, "is_error": is_error}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Any]]:
    async with cluster(tmp_path / "models", http_host="127.0.0.1", http_port=0) as found:
        server = HttpServer(found.frontend)
        await server.start()
        card = ModelRuntimeConfig(tool_call_parser="hermes", reasoning_parser="qwen3", context_length=100_000)
        await found.worker(model, runtime_config=card)
        address = f"http://127.0.0.1:{server.port}"
        try:
            async with anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as client:
                yield found, client
        finally:
            await server.close()


async def test_an_agent_works_until_the_program_is_right(house: tuple[Cluster, Any], tmp_path: Path) -> None:
    _, client = house
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "greeting.py").write_text(BROKEN)
    (folder / "check.py").write_text(CHECK)
    agent = Agent(client, folder)
    last = await agent.work()
    assert last.content[-1].text == "Fixed: `nam` was a typo of `name`."
    assert [[block.type for block in turn.content] for turn in agent.turns] == [
        ["thinking", "text", "tool_use", "tool_use"],
        ["text", "tool_use"],
        ["tool_use"],
        ["thinking", "text"],
    ]
    assert (folder / "greeting.py").read_text() == BROKEN.replace("nam +", "name +")
    assert len({block.id for turn in agent.turns for block in turn.content if block.type == "tool_use"}) == 4


async def test_the_conversation_of_an_agent_has_one_prefix_from_turn_to_turn(
    house: tuple[Cluster, Any], tmp_path: Path
) -> None:
    found, client = house
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "greeting.py").write_text(BROKEN)
    (folder / "check.py").write_text(CHECK)
    await Agent(client, folder).work()
    prompts = [bytes(request["token_ids"]).decode() for request in found.workers[0].requests]
    for before, after in itertools.pairwise(prompts):
        assert "billing" not in before
        assert after.startswith(before.removesuffix("assistant:").rstrip())


async def test_an_interrupted_turn_and_a_side_request_are_answered(house: tuple[Cluster, Any], tmp_path: Path) -> None:
    _, client = house
    use = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "x"}}
    messages = [
        {"role": "user", "content": TASK},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "of another"}, use]},
        {"role": "user", "content": [{"type": "text", "text": "[Request interrupted by user] small request"}]},
    ]
    said = await client.messages.create(model="m", max_tokens=512, messages=messages, tools=TOOLS)
    assert said.content[0].text == "greeting"
    search: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    # Its search runs at Anthropic: the agent learns that, where an answer without one would be made up.
    with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
        await client.messages.create(
            model="m",
            max_tokens=512,
            messages=[{"role": "user", "content": "small request: search"}],
            tools=[search],
            tool_choice={"type": "tool", "name": "web_search"},
        )
    side = await client.messages.create(
        model="m", max_tokens=512, messages=[{"role": "user", "content": "small request: a title"}]
    )
    assert side.content[0].text == "greeting"
