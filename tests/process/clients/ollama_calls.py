"""Ollama's own client: chat, prompts, tools, schemas, lists and errors. Run by `test_clients.py` with the address of a server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable

import ollama

URL = sys.argv[1]
SUM = [{"role": "user", "content": "What is 17 + 25?"}]
client = ollama.Client(host=URL)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


assert [model.model for model in client.list().models] == ["demo"]
assert client.ps().models[0].context_length == 2048
assert {"completion", "tools"} <= set(client.show("demo").capabilities or ())

whole = client.chat(model="demo", messages=SUM)
assert (whole.message.content, whole.done_reason) == ("42", "stop"), whole
assert whole.eval_count
assert whole.total_duration
*pieces, last = client.chat(model="demo:latest", messages=SUM, stream=True, keep_alive="5m", options={"num_ctx": 512})
assert "".join(piece.message.content or "" for piece in pieces) == "42"
assert (last.done, last.prompt_eval_count) == (True, whole.prompt_eval_count)
assert (
    "".join(piece.response for piece in client.generate(model="demo", prompt="What is 17 + 25?", stream=True)) == "42"
)

(call,) = client.chat(model="demo", messages=SUM, tools=[add]).message.tool_calls or [None]
assert call is not None
assert (call.function.name, call.function.arguments) == ("add", {"a": 17, "b": 25})
schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
assert json.loads(client.chat(model="demo", messages=SUM, format=schema).message.content or "").keys() == {"sum"}


assert client.generate(model="demo").done_reason == client.chat(model="demo").done_reason == "load"


def refused(call: Callable[..., object], **given: object) -> ollama.ResponseError:
    try:
        call(**given)
    except ollama.ResponseError as error:
        return error
    raise AssertionError(f"{given} was answered")


found = refused(client.chat, model="nope", messages=SUM)
assert (found.status_code, "'nope'" in found.error) == (404, True), found
for member, value in (("suffix", "b"), ("template", "{{ .Prompt }}"), ("context", [1])):
    found = refused(client.generate, model="demo", prompt="a", **{member: value})
    assert (found.status_code, f"`{member}`" in found.error) == (422, True), found
found = refused(client.generate, model="demo", keep_alive=0)
assert (found.status_code, "`keep_alive`" in found.error) == (422, True), found


def by_curl(path: str, body: dict[str, object]) -> dict[str, object]:
    """As the examples of Ollama's documentation do: without a header."""
    said = subprocess.run(["curl", "-sS", f"{URL}{path}", "-d", json.dumps(body)], capture_output=True, check=True)
    return dict(json.loads(said.stdout.splitlines()[-1]))


assert by_curl("/api/generate", {"model": "demo", "prompt": "What is 17 + 25?", "stream": False})["response"] == "42"
assert by_curl("/api/chat", {"model": "demo", "messages": SUM})["done_reason"] == "stop"
assert by_curl("/api/chat", {"model": "demo", "messages": []})["done_reason"] == "load"
assert "capabilities" in by_curl("/api/show", {"model": "demo"})
assert by_curl("/v1/chat/completions", {"model": "demo", "messages": SUM})["object"] == "chat.completion"


async def at_once() -> list[str]:
    asynchronous = ollama.AsyncClient(host=URL)
    answers = await asyncio.gather(*[asynchronous.chat(model="demo", messages=SUM) for _ in range(3)])
    return [answer.message.content or "" for answer in answers]


assert asyncio.run(at_once()) == ["42"] * 3
