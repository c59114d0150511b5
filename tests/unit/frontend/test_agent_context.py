"""What an engine learns of the agent behind a request, and of its session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.access import bearer, closed_cluster, key
from support.frontend_cluster import cluster

SESSION = {"x-dynamo-session-id": "s"}
TOOL_TURN: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}, {"type": "text", "text": "so"}]},
]  # fmt: skip
CALLED = [
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
]


async def test_the_trigger_of_a_request_reaches_the_engine_from_every_api(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with cluster(tmp_path, anthropic_api=True) as found:
        worker = await found.worker()
        for path, body, trigger in (
            ("chat/completions", chat, "user_message"),
            ("completions", {"prompt": "hi"}, "other"),
            ("messages", {**chat, "max_tokens": 9}, "user_message"),
            ("messages", {"messages": TOOL_TURN, "max_tokens": 9}, "tool_result"),
            ("responses", {"input": "hi"}, "user_message"),
            ("responses", {"input": CALLED}, "tool_result"),
        ):
            answer = await found.client.call("POST", f"/v1/{path}", {"model": "m", **body}, headers=SESSION)
            assert answer.status == 200, answer.body
            assert worker.requests[-1]["agent_context"] == {"session_id": "s", "input_trigger": trigger}, path
            assert worker.requests[-1]["image_cache_scope"] == "s"


async def test_headers_of_agents_reach_the_engine_with_a_session_alone(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    agent = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a", "x-codex-w": "1", "x-openai-subagent": "r"}
    async with cluster(tmp_path) as found:
        worker = await found.worker()
        for headers in ({"x-codex-w": "1"}, agent):
            assert (await found.client.call("POST", "/v1/chat/completions", body, headers=headers)).status == 200
        without, with_session = worker.requests
        assert "agent_context" not in without
        assert "image_cache_scope" not in without
        assert with_session["agent_context"]["agent_headers"] == {name: [value] for name, value in agent.items()}
        assert with_session["image_cache_scope"] == "a"
        refused = await found.client.call("POST", "/v1/chat/completions", {**body, "image_cache_scope": "mine"})
        assert (refused.status, refused.json["error"]["param"]) == (400, "image_cache_scope")


async def test_two_owners_of_keys_never_share_the_scope_of_images(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with closed_cluster(tmp_path, key("one"), key("two")) as found:
        worker = await found.worker()
        for id in ("one", "two"):
            headers = {**bearer(id), **SESSION}
            assert (await found.client.call("POST", "/v1/chat/completions", body, headers=headers)).status == 200
        first, second = (request["image_cache_scope"] for request in worker.requests)
        assert first != second
