"""SmolLM2 through `dynamo serve`, four requests at a time: what it must write, it writes, and what batches change is judged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

import jsonschema
import pytest

from support.http_client import CHAT
from support.real_models import PROMPTS, Answer, Server, bare_llama, served_llama
from support.real_prompts import SCHEMAS, THINGS, greedy_requests

pytestmark = [pytest.mark.models, pytest.mark.timeout(1800)]

SLOTS: Final = 4
NEARLY: Final = 0.3  # of log probabilities
ROUNDS: Final = min(100, PROMPTS)
MODES: Final = ("text", "tokens")
WEATHER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather of a city", "parameters": WEATHER},
}
T = TypeVar("T")


@pytest.fixture(scope="module")
def served(smollm2: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    root = tmp_path_factory.mktemp("at-once")
    python, file = smollm2
    with ExitStack() as stack:
        text = stack.enter_context(served_llama(root / "text", python, str(file), SLOTS, engine="llamacpp-text"))
        flags = ("--dyn-tool-call-parser", "hermes")
        tokens = stack.enter_context(served_llama(root / "tokens", python, "smollm2", SLOTS, *flags))
        yield {"text": text, "tokens": tokens}


@pytest.fixture(scope="module")
def alone(smollm2: tuple[str, Path]) -> Iterator[Server]:
    """llama.cpp's own server with one slot, where no request shares a batch."""
    with bare_llama(*smollm2, 1) as server:
        yield server


async def at_once(count: int, act: Callable[[int], Awaitable[T]]) -> Sequence[T]:
    """The results of so many calls, as many at a time as there are slots."""
    places = asyncio.Semaphore(SLOTS)

    async def one(number: int) -> T:
        async with places:
            return await act(number)

    return await asyncio.gather(*map(one, range(count)))


def drawn(number: int, text: str, **more: Any) -> dict[str, Any]:
    """A chat whose answer is drawn at random, always the same one."""
    thing = THINGS[number % len(THINGS)]
    messages = [{"role": "user", "content": f"{text} {thing} ({number})"}]
    return {"messages": messages, "temperature": 0.9, "seed": number, "max_tokens": 200, **more}


async def test_every_tool_call_is_valid(served: dict[str, Server]) -> None:
    """In tokens: by the template in its file the model knows no tools, so that llama.cpp itself lets it write what it likes."""

    async def call(number: int) -> list[Any]:
        body = drawn(number, "What is the weather in the city of", tools=[TOOL], parallel_tool_calls=False)
        named = {"type": "function", "function": {"name": "get_weather"}}
        reply = await served["tokens"].reply(CHAT, body, tool_choice=named if number % 2 else "required")
        assert reply.status == 200, reply.body
        (choice,) = reply.json()["choices"]
        assert choice["finish_reason"] == ("stop" if number % 2 else "tool_calls"), choice
        return list(choice["message"]["tool_calls"])

    for calls in await at_once(ROUNDS, call):
        (one,) = calls
        assert one["function"]["name"] == "get_weather"
        jsonschema.validate(json.loads(one["function"]["arguments"]), WEATHER)


@pytest.mark.parametrize("mode", MODES)
async def test_every_answer_fits_its_json_schema(served: dict[str, Server], mode: str) -> None:
    async def answer(number: int) -> str:
        schema = {"name": "answer", "schema": SCHEMAS[number % len(SCHEMAS)]}
        body = drawn(number, "Write JSON about", response_format={"type": "json_schema", "json_schema": schema})
        return (await served[mode].answer(CHAT, body, stream=number % 2 == 1)).text

    for number, text in enumerate(await at_once(ROUNDS, answer)):
        jsonschema.validate(json.loads(text), SCHEMAS[number % len(SCHEMAS)])


async def test_what_batches_change_is_nearly_a_tie(served: dict[str, Server], alone: Server) -> None:
    """llama.cpp sums in another order in a batch. Where an answer differs, both tokens there must be nearly as likely."""
    requests = [each for each in greedy_requests(ROUNDS) if not isinstance(each[1].get("prompt"), list)]
    expected = [await alone.answer(path, body) for path, body in requests]
    for mode, server in served.items():

        async def answer(number: int, server: Server = server) -> Answer:
            path, body = requests[number]
            return await server.answer(path, body, stream=number % 2 == 1)

        found = await at_once(len(requests), answer)
        differing = [number for number, one in enumerate(found) if not one.agrees_with(expected[number])]
        print(f"{mode}: {len(differing)} of {len(requests)} answers differ in a batch: {differing}")
        for number in differing:
            gap = await gap_at(alone, *requests[number], found[number].text)
            print(f"  {number}: {gap:.3f}: {expected[number].text!r}, {found[number].text!r}")
            assert gap < NEARLY, (requests[number], expected[number], found[number])


async def gap_at(server: Server, path: str, body: dict[str, Any], text: str) -> float:
    """How much likelier the first token that is not in `text` was than the next one."""
    wanted = {**body, "logprobs": True, "top_logprobs": 2} if path == CHAT else {**body, "logprobs": 2}
    (choice,) = (await server.reply(path, wanted)).json()["choices"]
    so_far = ""
    for token in choice["logprobs"]["content"]:
        so_far += token["token"]
        if not text.startswith(so_far):
            first, second = (each["logprob"] for each in token["top_logprobs"])
            return float(first - second)
    # Behind its own cached prompt, which changes sums as a batch does, it gives this answer now.
    assert so_far.startswith(text), (text, so_far)
    return 0.0
