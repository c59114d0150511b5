"""Anthropic's own client against `dynamo serve` and nothing else: text, tools, thinking, JSON, counts, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic", reason="pip install -e '.[dev]'")

from support.serve_command import serve_command  # noqa: E402

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
SUM, ASKED = "What is 27 + 15?", "What is the weather in Paris?"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("served")
    with serve_command(directory, "--http-host", "127.0.0.1", "--http-port", "0", "--in-process") as command:
        command.wait_ready()
        with anthropic.Anthropic(base_url=command.url, api_key="none", max_retries=0) as made:
            yield made


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def ask(request: pytest.FixtureRequest, client: Any) -> Any:
    def one(*turns: Any, **more: Any) -> Any:
        messages = [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns]
        options: dict[str, Any] = {"model": "demo", "max_tokens": 400, "messages": messages, **more}
        if not request.param:
            return client.messages.create(**options)
        with client.messages.stream(**options) as stream:
            return stream.get_final_message()

    return one


def test_the_first_question_is_answered(ask: Any) -> None:
    message = ask(SUM)
    assert [(block.type, block.text) for block in message.content] == [("text", "42")]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "demo")
    assert message.usage.output_tokens > 0
    assert message.id.startswith("msg_")


def test_a_tool_is_called_and_what_it_said_is_told(ask: Any) -> None:
    called = ask(ASKED, tools=[WEATHER])
    (block,) = called.content
    assert (block.type, block.name, block.input) == ("tool_use", "get_weather", {"city": "Paris"})
    assert called.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": '{"temperature": 21, "condition": "sunny"}'}
    turns = [ASKED, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert ask(*turns, tools=[WEATHER]).content[0].text == "temperature: 21, condition: sunny"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_is_called_when_the_client_demands_it(ask: Any, choice: Any) -> None:
    message = ask(ASKED, tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert [block.input for block in message.content if block.type == "tool_use"] == [{"city": "Paris"}]
    assert message.stop_reason == "tool_use"


def test_thinking_is_a_block_of_its_own_which_may_come_back(ask: Any) -> None:
    message = ask(SUM, thinking={"type": "enabled", "budget_tokens": 200})
    thinking, text = message.content
    assert thinking.thinking.strip() == "7 + 5 = 12, write 2, carry 1; 2 + 1 + 1 = 4; so 42"
    assert thinking.signature
    assert text.text.strip() == "42"
    assert ask(SUM, {"role": "assistant", "content": message.content}, SUM).content[-1].text.strip() == "42"
    (only,) = ask(SUM, thinking={"type": "disabled"}).content
    assert only.text == "42"


def test_a_schema_is_filled_in(ask: Any) -> None:
    message = ask(SUM, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert json.loads(message.content[0].text) == {"sum": 42}


def test_a_begun_answer_is_continued(ask: Any) -> None:
    message = ask("Count from 3 to 9.", {"role": "assistant", "content": "3, 4, 5,"})
    assert message.content[0].text.strip() == "6, 7, 8, 9"


def test_stop_reasons(ask: Any) -> None:
    stopped = ask("Count from 3 to 9.", stop_sequences=[", 6"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ", 6")
    assert stopped.content[0].text == "3, 4, 5"
    assert ask("Count from 3 to 9.", max_tokens=3).stop_reason == "max_tokens"


def test_a_stream_is_text_as_it_is_written(client: Any) -> None:
    question: Any = [{"role": "user", "content": "Count from 3 to 9."}]
    for _ in range(20):  # tokens that come while the machine is busy share an event, at times all of them
        with client.messages.stream(model="demo", max_tokens=100, messages=question) as stream:
            pieces = list(stream.text_stream)
        assert "".join(pieces) == "3, 4, 5, 6, 7, 8, 9"
        if len(pieces) > 1:
            return
    pytest.fail("the text came in one piece twenty times")


def test_the_count_of_tokens_is_that_of_the_usage(client: Any) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [WEATHER],
        "system": "Be short.",
    }
    count = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(max_tokens=50, **asked).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


def test_models_are_listed(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.type) == ("demo", "model")
    assert client.models.retrieve("demo").created_at == model.created_at


def test_the_packages_own_loop_of_tools_ends_with_the_answer(client: Any) -> None:
    asked: list[str] = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Get the weather of a city

        Args:
            city: its name
        """
        asked.append(city)
        return '{"temperature": 21}'

    runner = client.beta.messages.tool_runner(
        model="demo", max_tokens=200, tools=[get_weather], messages=[{"role": "user", "content": ASKED}]
    )
    assert runner.until_done().content[0].text == "temperature: 21"
    assert asked == ["Paris"]
