"""OpenAI's own client and the demonstration model over the Responses API: text, JSON, tools, and what is stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from support.serve_command import serve_command

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
SUM, ASKED = "What is 27 + 15?", "What is the weather in Paris?"


class Sum(BaseModel):
    sum: int


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    directory = tmp_path_factory.mktemp("served")
    with serve_command(directory, "--http-host", "127.0.0.1", "--http-port", "0", "--in-process") as command:
        command.wait_ready()
        with OpenAI(base_url=f"{command.url}/v1", api_key="none", max_retries=0) as made:
            yield made


def test_an_answer(client: OpenAI) -> None:
    response = client.responses.create(model="demo", input=SUM)
    assert (response.output_text, response.status, response.error) == ("42", "completed", None)
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_a_stream_of_events(client: OpenAI) -> None:
    events = list(client.responses.create(model="demo", input=SUM, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert deltas
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "42"


def test_the_stream_helper_puts_the_answer_together(client: OpenAI) -> None:
    with client.responses.stream(model="demo", input=SUM) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == snapshots[-1] == "42"


def test_an_answer_is_parsed_by_its_class(client: OpenAI) -> None:
    parsed = client.responses.parse(model="demo", input=SUM, text_format=Sum)
    assert parsed.output_parsed == Sum(sum=42)
    with client.responses.stream(model="demo", input=SUM, text_format=Sum) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == Sum(sum=42)


def test_an_answer_that_was_cut_has_no_completed_event(client: OpenAI) -> None:
    response = client.responses.create(model="demo", input="Count from 3 to 9.", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(model="demo", input="Count from 3 to 9.", max_output_tokens=2) as stream:
        kinds = [event.type for event in stream]
        with pytest.raises(RuntimeError, match=r"response\.completed"):
            stream.get_final_response()
    assert kinds[-1] == "response.incomplete"


@pytest.mark.parametrize("streams", [False, True])
def test_reasoning(client: OpenAI, streams: bool) -> None:
    options: dict[str, Any] = {"model": "demo", "input": SUM, "reasoning": {"effort": "low", "summary": "auto"}}
    if streams:
        with client.responses.stream(**options) as stream:
            thought = "".join(event.delta for event in stream if event.type == "response.reasoning_summary_text.delta")
            response: Any = stream.get_final_response()
    else:
        response = client.responses.create(**options)
        thought = response.output[0].summary[0].text
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == response.output[0].summary[0].text == thought
    assert response.output_text == "42"
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_tool_is_called_and_its_result_is_used(client: OpenAI, streams: bool, is_stored: bool) -> None:
    def ask(**options: Any) -> Any:
        if not streams:
            return client.responses.parse(model="demo", tools=[WEATHER], **options)
        with client.responses.stream(model="demo", tools=[WEATHER], **options) as stream:
            for _ in stream:
                pass
            return stream.get_final_response()

    first = ask(input=ASKED, store=is_stored)
    (call,) = first.output
    assert (call.type, call.name, call.parsed_arguments) == ("function_call", "get_weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps({"weather": "sunny"})}
    if is_stored:
        second = ask(input=[result], previous_response_id=first.id)
    else:
        spoken = call.to_dict()
        del spoken["parsed_arguments"]
        second = ask(input=[{"role": "user", "content": ASKED}, spoken, result], store=False)
    assert "sunny" in second.output_text


def test_the_tokens_of_a_prompt_are_counted(client: OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="demo", input=SUM, tools=[WEATHER])
    answer = client.responses.create(model="demo", input=SUM, tools=[WEATHER])
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_stored_response_is_read_listed_and_deleted(client: OpenAI) -> None:
    made = client.responses.create(model="demo", input=[{"role": "user", "content": SUM}], metadata={"a": "b"})
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    (item,) = client.responses.input_items.list(made.id)
    assert item.type == "message"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="demo", input=SUM, previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"


def test_the_errors_are_those_that_the_client_knows(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="nobody", input=SUM)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="demo", input=SUM, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.UnprocessableEntityError):
        client.responses.create(model="demo", input=SUM, background=True)
