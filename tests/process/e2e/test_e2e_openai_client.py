"""OpenAI's own client, unchanged, gets what it expects; in its blocking and in its asynchronous form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from support.http_client import script
from support.processes import Stack

MODEL = "scripted"
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.frontend.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
async def async_client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{stack.frontend.url}/v1", api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert {MODEL, "narrow"} <= {model.id for model in client.models.list()}
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.body is not None


def test_a_chat_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_a_streamed_chat_answer_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers=script(["say", "héllo wörld 😀", 0.002]),
    )
    *chunks, last = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "héllo wörld 😀"
    assert [delta.role for delta in deltas].count("assistant") == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len("héllo wörld 😀".encode())


def test_completions_of_every_form_of_prompt(client: openai.OpenAI) -> None:
    forms: list[tuple[str | list[str] | list[int] | list[list[int]], int]] = [
        ("hi", 1),
        (["hi", "ho", "he"], 3),
        ([104, 105], 1),
        ([[104], [105]], 2),
    ]
    for prompt, choices in forms:
        answer = client.completions.create(model=MODEL, prompt=prompt)
        assert [(one.index, one.text, one.finish_reason) for one in answer.choices] == [
            (index, "Hello", "stop") for index in range(choices)
        ]


def test_a_streamed_completion(client: openai.OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="hi", stream=True, max_tokens=3)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hel"
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stop", ["l", ["nothing", "lo", "l"]])
def test_stop_strings(client: openai.OpenAI, stop: str | list[str]) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, stop=stop)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("He", "stop")


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    items = answer.choices[0].logprobs.content or []
    assert "".join(item.token for item in items) == "Hello"
    assert [item.logprob for item in items] == [-0.5] * 5
    assert [[one.logprob for one in item.top_logprobs] for item in items] == [[-0.5, -1.0]] * 5

    completion = client.completions.create(model=MODEL, prompt="hi", logprobs=1)
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.tokens == list("Hello")
    assert completion.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4]


def test_two_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, n=2)
    assert [(one.index, one.message.content) for one in answer.choices] == [(0, "Hello"), (1, "Hello")]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10

    texts = {0: "", 1: ""}
    finished = []
    for chunk in client.chat.completions.create(model=MODEL, messages=HI, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finished += [choice.index] if choice.finish_reason else []
    assert texts == {0: "Hello", 1: "Hello"}
    assert sorted(finished) == [0, 1]


def test_errors_are_the_exceptions_it_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Temperature must be between 0 and 2, got 3"):
        client.chat.completions.create(model=MODEL, messages=HI, temperature=3)
    with pytest.raises(openai.NotFoundError, match="Model not found"):
        client.chat.completions.create(model="nobody", messages=HI)
    with pytest.raises(openai.UnprocessableEntityError, match="too odd"):
        client.chat.completions.create(model=MODEL, messages=HI, extra_headers=script(["raise", 422, "too odd"]))
    with pytest.raises(openai.InternalServerError, match="Service temporarily overloaded"):
        client.chat.completions.create(model=MODEL, messages=HI, extra_headers=script(["raise", 529, "x"]))
    broken = script(["say", "ab", 0.01], ["raise", "InvalidArgument", "not like this"])
    with pytest.raises(openai.APIError, match="not like this"):
        list(client.chat.completions.create(model=MODEL, messages=HI, stream=True, extra_headers=broken))


async def test_the_asynchronous_client(async_client: openai.AsyncOpenAI) -> None:
    assert MODEL in {model.id async for model in async_client.models.list()}
    answer = await async_client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "Hello"
    text = ""
    async for chunk in await async_client.chat.completions.create(model=MODEL, messages=HI, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == "Hello"
    completion = await async_client.completions.create(model=MODEL, prompt="hi", max_tokens=2)
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("He", "length")


async def test_leaving_the_stream_of_the_asynchronous_client_cancels(
    stack: Stack, tag: str, async_client: openai.AsyncOpenAI
) -> None:
    stream = await async_client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, extra_headers=script(["say", "x" * 5000, 0.002], tag=tag)
    )
    await anext(aiter(stream))
    await stream.close()
    await stack.scripted.sees("abort", tag)
    await stack.scripted.idle()
    assert stack.scripted.count("abort", tag) == 1
