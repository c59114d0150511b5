"""What a worker gets for a request of a client, to the byte: members, their order, and what is absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from dynamo.protocol.records import ModelRuntimeConfig
from support.frontend_cluster import cluster, say

TOOL: Final = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
RED: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
PICTURE: Final = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": RED}}]

CASES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "limits and stops": {"max_tokens": 5, "min_tokens": 2, "stop": ["x", "y"], "stop_token_ids": [7], "ignore_eos": False},
    "token stops": {"stop": [1, 2], "max_completion_tokens": 3},
    "ignore eos": {"ignore_eos": True, "stop": "x"},
    "sampling": {
        "temperature": 0.5, "top_p": 0.9, "top_k": 0, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.1, "seed": 3, "n": 2, "include_stop_str_in_output": True, "logit_bias": {"5": 1.0},
    },
    "log probabilities": {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_tokens_as_token_ids": True},
    "greedy": {"nvext": {"greed_sampling": True, "annotations": ["request_id", "mine"], "extra_fields": ["timing"]}},
    "routing": {"priority": 2, "cache_salt": "s", "nvext": {"dp_rank": 0, "agent_hints": {"osl": 9, "strict_priority": 1}}},
    "token ids": {"nvext": {"token_data": [5, 6, 7], "max_thinking_tokens": 4}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "reasoning": {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 9},
    "media options": {"media_io_kwargs": {"video": {"fps": 1}}, "mm_processor_kwargs": {"size": 2}},
    "media": {"messages": [{"role": "user", "content": PICTURE}]},
}  # fmt: skip

HEADERS: Final = {"x-dynamo-session-id": "s1", "x-dynamo-parent-session-id": "s0", "x-dynamo-session-final": "1"}


@pytest.mark.parametrize("case", CASES)
async def test_a_chat_for_its_worker(tmp_path: Path, case: str) -> None:
    config = ModelRuntimeConfig(
        tool_call_parser="hermes" if "tools" in CASES[case] else None,
        reasoning_parser="qwen3" if case == "reasoning" else None,
        runtime_data={"media": ["image"]},
    )
    async with cluster(tmp_path) as found:
        worker = await found.worker(say("a"), runtime_config=config)
        headers = HEADERS if case in ("routing", "media options") else None
        answer = await found.client.chat(**CASES[case], headers=headers)
        assert answer.status == 200, answer.body
    assert [as_sent(each) for each in worker.requests] == KNOWN[case], case


async def test_completions_for_their_workers(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(say("a"))
        for prompt, members in (("hi", {"echo": True, "suffix": "b"}), (["a", "b"], {"logprobs": 1, "seed": 4})):
            answer = await found.client.completion(prompt, **members)
            assert answer.status == 200, answer.body
    assert sorted(as_sent(each) for each in worker.requests) == sorted(KNOWN["completions"])


def as_sent(body: Any) -> str:
    """Return a request as text: equal texts are equal bytes, of either wire."""
    assert body["mdc_sum"]
    body = {**body, "mdc_sum": "of the card"}
    text = json.dumps(body)
    assert msgspec.msgpack.encode(json.loads(text)) == msgspec.msgpack.encode(body)
    return text


KNOWN: Final[dict[str, list[str]]] = json.loads((Path(__file__).parent / "worker_requests.json").read_text())
