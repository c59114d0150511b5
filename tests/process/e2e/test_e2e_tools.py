"""OpenAI's own client and a model whose text holds tool calls and reasoning: real processes, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from support.http_client import script
from support.processes import Stack, Worker

MODEL = "parsed"
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Wie ist das Wetter in Köln?"}]
PARAMETERS: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
THOUGHT = "<think>\nIch frage nach.\n</think>\n\n"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
PACE = 0.001  # seconds a byte: so that a stream is one, in many pieces


@pytest.fixture(scope="module")
def parsed(stack: Stack) -> Worker:
    worker = stack.cluster.worker(MODEL, MODEL, SCRIPTED_TOOL_PARSER="hermes", SCRIPTED_REASONING_PARSER="qwen3")
    stack.cluster.wait_ready(stack.frontend, worker)
    return worker


@pytest.fixture
def client(stack: Stack, parsed: Worker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.frontend.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def reasoning_of(message: Any) -> str | None:
    found: str | None = (message.model_extra or {}).get("reasoning_content")
    return found


def test_an_answer_with_calls_and_reasoning(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, tools=TOOLS, extra_headers=script(["say", THOUGHT + CALLS])
    )
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert reasoning_of(choice.message) == "Ich frage nach."
    functions = [call.function for call in choice.message.tool_calls or [] if call.type == "function"]
    assert [(one.name, json.loads(one.arguments)) for one in functions] == [("weather", {"city": "Köln"}), ("time", {})]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len((THOUGHT + CALLS).encode())
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(b"\nIch frage nach.\n</think>")


def test_the_clients_own_accumulation_of_a_stream_is_the_unary_answer(client: openai.OpenAI) -> None:
    text = f"{THOUGHT}Moment.\n{CALLS}"
    headers = script(["say", text, PACE])
    with client.chat.completions.stream(model=MODEL, messages=HI, tools=TOOLS, extra_headers=headers) as stream:
        thoughts = "".join(
            reasoning_of(event.chunk.choices[0].delta) or "" for event in stream if event.type == "chunk"
        )
        streamed = stream.get_final_completion().choices[0]
    unary = client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS, extra_headers=headers).choices[0]
    assert thoughts == reasoning_of(unary.message) == "Ich frage nach."
    assert streamed.message.content == unary.message.content == "Moment.\n"
    assert streamed.finish_reason == unary.finish_reason == "tool_calls"
    said = [
        [(call.function.name, call.function.arguments) for call in message.tool_calls or [] if call.type == "function"]
        for message in (streamed.message, unary.message)
    ]
    assert said[0] == said[1] == [("weather", '{"city": "Köln"}'), ("time", "{}")]


def test_a_call_and_its_result_go_back_into_the_conversation(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS, extra_headers=script(["say", CALLS]))
    message = first.choices[0].message
    results: list[ChatCompletionMessageParam] = [
        {"role": "tool", "tool_call_id": call.id, "content": "Regen"} for call in message.tool_calls or []
    ]
    again: Any = [*HI, message.model_dump(exclude_none=True), *results]
    second = client.chat.completions.create(
        model=MODEL, messages=again, tools=TOOLS, extra_headers=script(["say", "Es regnet."])
    )
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("Es regnet.", "stop")
    assert second.choices[0].message.tool_calls is None


def test_forced_calls(client: openai.OpenAI) -> None:
    required = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        tools=TOOLS,
        tool_choice="required",
        extra_headers=script(["say", '[{"name": "weather", "parameters": {"city": "Köln"}}]']),
    )
    (call,) = required.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Köln"}

    stream = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        stream=True,
        extra_headers=script(["say", '{"city": "Köln"}', PACE]),
    )
    pieces = [piece for chunk in stream for piece in chunk.choices[0].delta.tool_calls or []]
    assert [piece.id is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    functions = [piece.function for piece in pieces if piece.function is not None]
    assert functions[0].name == "weather"
    assert json.loads("".join(one.arguments or "" for one in functions)) == {"city": "Köln"}
    assert len(pieces) > 2  # the arguments were streamed


async def test_a_client_that_leaves_while_a_call_is_parsed_stops_the_engine(
    parsed: Worker, client: openai.OpenAI, tag: str
) -> None:
    headers = script(["say", "Moment.<tool_call>"], ["wait"], tag=tag)
    with client.chat.completions.create(
        model=MODEL, messages=HI, tools=TOOLS, stream=True, extra_headers=headers
    ) as stream:
        assert next(iter(stream)).choices[0].delta.content
    await parsed.sees("abort", tag)
