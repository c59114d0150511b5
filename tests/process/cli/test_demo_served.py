"""`dynamo serve` and nothing else: a first question, a tool call, JSON and thoughts, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import OpenAI

from support.serve_command import serve_command

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
SUM, ASKED = "What is 27 + 15?", "What is the weather in Paris?"


@dataclass
class Said:
    """One answer, however it came."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str = ""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    directory = tmp_path_factory.mktemp("served")
    with serve_command(directory, "--http-host", "127.0.0.1", "--http-port", "0", "--in-process") as command:
        command.wait_ready()
        with OpenAI(base_url=f"{command.url}/v1", api_key="none", max_retries=0) as made:
            yield made


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def ask(request: pytest.FixtureRequest, client: OpenAI) -> Any:
    def one(text: str, **more: Any) -> Said:
        options: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": text}], **more}
        create = client.chat.completions.create
        said = Said()
        choices = (
            [(event.choices[0], event.choices[0].delta) for event in create(stream=True, **options)]
            if request.param
            else [(choice, choice.message) for choice in create(**options).choices]
        )
        for choice, part in choices:
            said.content += part.content or ""
            said.reasoning += getattr(part, "reasoning_content", None) or ""
            said.finish_reason = choice.finish_reason or said.finish_reason
            for call in part.tool_calls or ():
                if call.function.name:
                    said.calls.append((call.function.name, call.function.arguments))
                else:  # the next piece of the arguments
                    name, before = said.calls[-1]
                    said.calls[-1] = (name, before + call.function.arguments)
        return said

    return one


def test_the_first_question_is_answered(ask: Any) -> None:
    assert ask(SUM) == Said(content="42", finish_reason="stop")


def test_a_tool_is_called(ask: Any) -> None:
    said = ask(ASKED, tools=[WEATHER])
    assert [(name, json.loads(arguments)) for name, arguments in said.calls] == [("get_weather", {"city": "Paris"})]
    assert (said.content, said.finish_reason) == ("", "tool_calls")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called_when_the_client_demands_it(ask: Any, choice: Any) -> None:
    # One call: a list of several is not what this small model was trained to end.
    said = ask(ASKED, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    assert [(name, json.loads(arguments)) for name, arguments in said.calls] == [("get_weather", {"city": "Paris"})]


def test_a_schema_is_filled_in(ask: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert json.loads(ask(SUM, response_format=form).content) == {"sum": 42}


@pytest.mark.parametrize(
    "more", [{"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, {"reasoning_effort": "low"}]
)
def test_thoughts_are_told_apart_from_the_answer(ask: Any, more: dict[str, Any]) -> None:
    said = ask(SUM, **more)
    assert said.content.strip() == "42"
    assert said.reasoning.strip() == "7 + 5 = 12, write 2, carry 1; 2 + 1 + 1 = 4; so 42"


def test_what_a_tool_said_is_told(client: OpenAI) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages: Any = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": '{"temperature": 21, "condition": "sunny"}'},
    ]
    answer = client.chat.completions.create(model="demo", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    assert answer.choices[0].message.content == "temperature: 21, condition: sunny"
