"""LiteLLM over chat, Messages and Responses. Run by `test_clients.py` with the address of a server as its argument."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would look for prices on the internet first

import litellm

URL = sys.argv[1]
_PRICES = {"litellm_provider": "anthropic", "mode": "chat", "input_cost_per_token": 0.0, "output_cost_per_token": 0.0}
litellm.register_model({"anthropic/demo": _PRICES, "demo": _PRICES})  # it fails on models whose prices it does not know
SUM = [{"role": "user", "content": "What is 27 + 15?"}]
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Get the weather of a city"}
CHAT: dict[str, Any] = {"model": "openai/demo", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
MESSAGES: dict[str, Any] = {"model": "anthropic/demo", "api_base": URL, "api_key": "none", "num_retries": 0}


def chat(options: dict[str, Any]) -> None:
    """LiteLLM's own form, which it translates to the API of the provider."""
    answer = litellm.completion(messages=SUM, max_tokens=100, **options)
    assert answer.choices[0].message.content.strip() == "42", answer
    assert answer.usage.completion_tokens > 0
    pieces = litellm.completion(messages=SUM, max_tokens=100, stream=True, **options)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces).strip() == "42"
    tools = [{"type": "function", "function": {**TOOL, "parameters": PARAMETERS}}]
    for stream in (False, True):
        called = litellm.completion(messages=ASKED, max_tokens=100, tools=tools, stream=stream, **options)
        whole = litellm.stream_chunk_builder(list(called)) if stream else called
        (call,) = whole.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"}), whole
        assert whole.choices[0].finish_reason == "tool_calls"
    try:
        litellm.completion(messages=SUM, max_tokens=100, **{**options, "model": options["model"] + "-nobody"})
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("a model that nobody serves was found")


async def messages() -> None:
    """Anthropic's form, passed through."""
    answer = await litellm.anthropic.messages.acreate(messages=SUM, max_tokens=100, **MESSAGES)
    assert answer["content"][0]["text"] == "42", answer
    stream = await litellm.anthropic.messages.acreate(messages=SUM, max_tokens=100, stream=True, **MESSAGES)
    data = b"".join([chunk if isinstance(chunk, bytes) else str(chunk).encode() async for chunk in stream])
    assert b"message_stop" in data, data


def responses() -> None:
    """OpenAI's Responses, passed through."""
    answer = litellm.responses(input="What is 27 + 15?", **CHAT)
    assert answer.output[-1].content[0].text == "42", answer
    kinds = [str(event.type) for event in litellm.responses(input="What is 27 + 15?", stream=True, **CHAT)]
    assert "completed" in kinds[-1].lower(), kinds


chat(CHAT)
chat(MESSAGES)
asyncio.run(messages())
responses()
print("litellm", litellm.__version__ if hasattr(litellm, "__version__") else "", "works")
