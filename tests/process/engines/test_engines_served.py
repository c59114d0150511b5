"""Real engines through worker, router and frontend: the demonstration model, whose answers are known, on the CPU.

For each engine one cluster serves all tests of this file, which run in order: the last ones end its workers one by one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from openai import BadRequestError

from dynamo.errors import DynamoException
from dynamo.reference.engine import ReferenceEngine
from dynamo.runtime.base.process_guard import descendants
from dynamo.runtime.calls.context import Context
from support.cases import each_case
from support.demo_model import FILES, chat_prompts, first_logprob, sums
from support.ends import end_idle
from support.engine_cluster import SGLANG, START_SECONDS, SUM, EngineCase, ServedEngine, served_engine, tokens_of
from support.leftovers import Belongings, errors_of, wait_empty
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

CASES: Final = (
    EngineCase(
        "llamacpp", "DYNAMO_LLAMACPP_PYTHON", lacks=frozenset({"min_tokens"}), is_gguf=True, core="llamacpp.server"
    ),
    EngineCase(
        "transformers",
        "DYNAMO_TRANSFORMERS_PYTHON",
        ("--kv-cache-mb", "64"),
        {"OMP_NUM_THREADS": "1"},
        lacks=frozenset({"cached_tokens"}),
        aborts=400,
    ),
    SGLANG,
)
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
UNSURE: Final = "How many letters?"  # the model is far from sure of the first token
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    case: EngineCase = request.param
    if not case.python:
        pytest.skip(case.why_not)
    with served_engine(case, tmp_path_factory.mktemp(case.name)) as engine:
        yield engine


# -- answers ----------------------------------------------------------------------------------------------------------


def test_the_answer_is_42(served: ServedEngine) -> None:
    answer = served.ask(SUM, temperature=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("42", "stop")
    assert answer.usage.completion_tokens == 3
    streamed = "".join(event.choices[0].delta.content or "" for event in served.ask(SUM, temperature=0, stream=True))
    assert streamed == "42"


def test_the_models_own_sampling_options_hold_where_a_request_has_none(served: ServedEngine) -> None:
    assert {served.ask("Write a poem.", max_tokens=12).choices[0].message.content for _ in range(4)}.__len__() == 1


def test_a_tool_is_called(served: ServedEngine) -> None:
    answer = served.ask("What is the weather in Paris?", tools=[WEATHER], temperature=0)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_thoughts_are_told_from_the_answer(served: ServedEngine) -> None:
    more = {"chat_template_kwargs": {"enable_thinking": True}}
    message = served.ask(SUM, temperature=0, extra_body=more).choices[0].message
    assert message.content.strip() == "42"
    assert message.reasoning_content.strip() == "7 + 5 = 12, write 2, carry 1; 2 + 1 + 1 = 4; so 42"


@each_case(
    "more, expected",
    [
        ({"extra_body": {"guided_regex": "4[0-9]!"}}, "42!"),
        ({"extra_body": {"guided_choice": ["yes", "no"]}}, "no"),
        ({"extra_body": {"guided_grammar": 'root ::= "42"'}}, "42"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            '{"sum": 42}',
        ),
    ],
)
def test_a_constraint_holds(served: ServedEngine, more: dict[str, Any], expected: str) -> None:
    if "guided" in served.case.lacks:
        with pytest.raises(BadRequestError, match="not built"):
            served.ask(SUM, **more)
        return
    answer = served.ask(f"{SUM} Answer as JSON." if "response_format" in more else SUM, max_tokens=40, **more)
    assert answer.choices[0].message.content == expected


def test_a_constraint_holds_behind_thoughts(served: ServedEngine) -> None:
    if "behind_thoughts" in served.case.lacks:
        pytest.skip("a constraint holds from the first token on")
    more = {"chat_template_kwargs": {"enable_thinking": True}, "guided_regex": "4[0-9]!"}
    message = served.ask(SUM, temperature=0, max_tokens=200, extra_body=more).choices[0].message
    assert message.content.strip() == "42!"
    assert "so 42" in message.reasoning_content


async def test_log_probabilities(served: ServedEngine) -> None:
    if "logprobs" in served.case.lacks:
        with pytest.raises(BadRequestError, match="not built"):
            await asyncio.to_thread(served.ask, SUM, logprobs=True)
        return
    wanted: dict[str, Any] = {} if "top_logprobs" in served.case.lacks else {"top_logprobs": 2}
    for text in (SUM, UNSURE):
        answer = await asyncio.to_thread(served.ask, text, temperature=0, logprobs=True, max_tokens=1, **wanted)
        first = answer.choices[0].logprobs.content[0]
        assert first.logprob == pytest.approx(await first_logprob(*chat_prompts(text)), rel=1e-3, abs=1e-5)
        assert len(first.top_logprobs or ()) == wanted.get("top_logprobs", 0)


def test_several_choices_and_seeds(served: ServedEngine) -> None:
    answer = served.ask(SUM, n=2)
    assert [choice.message.content for choice in answer.choices] == ["42", "42"]
    if "seed" in served.case.lacks:
        with pytest.raises(BadRequestError, match="seed"):
            served.ask(SUM, seed=7)
        return
    drawn = [served.ask("Write a poem.", temperature=1.5, seed=7, max_tokens=20) for _ in range(3)]
    assert len({one.choices[0].message.content for one in drawn}) == 1


def test_a_bias_a_stop_string_and_a_limit(served: ServedEngine) -> None:
    stopped = served.ask("Count from 3 to 9.", temperature=0, stop=["6"])
    assert stopped.choices[0].finish_reason == "stop"
    assert "5" in stopped.choices[0].message.content
    assert "6" not in stopped.choices[0].message.content
    assert served.ask("Count from 3 to 9.", temperature=0, max_tokens=3).choices[0].finish_reason == "length"
    if "logit_bias" in served.case.lacks:
        with pytest.raises(BadRequestError, match="logit_bias"):
            served.ask(SUM, logit_bias={"33": -100})
        return
    assert not served.ask(SUM, temperature=0, logit_bias={"33": -100}).choices[0].message.content.startswith("4")


@each_case(
    "options",
    [
        {"extra_body": {"guided_regex": "(("}},
        {"extra_body": {"guided_json": {"type": "nonsense"}}},
        {"extra_body": {"guided_grammar": "root ::= (("}},
        {"logit_bias": {"99999999": 1}},
        {"max_tokens": 3, "extra_body": {"min_tokens": 5}},
    ],
)
def test_a_mistake_of_the_client_is_a_400(served: ServedEngine, options: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        served.ask(SUM, **options)


async def test_its_greedy_tokens_are_those_of_the_reference_engine(served: ServedEngine) -> None:
    engine = ReferenceEngine(FILES)
    await engine.start(0)
    try:
        async with served.straight() as client:
            for prompt in sums():
                body = {
                    "token_ids": prompt,
                    "stop_conditions": {"max_tokens": 32},
                    "eos_token_ids": [2, 0],
                    "sampling_options": {"temperature": 0.0},
                }
                expected: list[int] = []
                async for chunk in engine.generate(body, Context()):  # type: ignore[arg-type]
                    expected += chunk["token_ids"]
                found = await tokens_of(client, body)
                assert found[: len(expected)] == expected
                assert set(found[len(expected) :]) <= {2}  # the reference engine keeps the end token to itself
    finally:
        await engine.cleanup()


def test_a_repeated_prompt_is_read_from_the_cache(served: ServedEngine) -> None:
    if "cached_tokens" in served.case.lacks:
        pytest.skip("does not report what its cache held")
    text = f"Sort {' '.join(str(number * 37 % 100) for number in range(60))}."
    counts = [served.ask(text, max_tokens=2, temperature=0).usage for _ in range(6)]  # two workers, in turn
    assert max(count.prompt_tokens_details.cached_tokens for count in counts[2:]) > counts[0].prompt_tokens // 2


# -- cancellation -----------------------------------------------------------------------------------------------------


async def test_random_aborts_leave_the_engine_free(served: ServedEngine) -> None:
    generator = random.Random(11)
    async with served.straight() as client:

        async def one(number: int) -> None:
            context = Context()
            body = {
                "token_ids": [generator.randrange(20, 400) for _ in range(generator.randrange(1, 200))],
                "stop_conditions": {"max_tokens": 1800, "ignore_eos": "ignore_eos" not in served.case.lacks},
            }
            stop = context.kill if number % 2 else context.stop_generating
            asyncio.get_running_loop().call_later(generator.random() * 0.5, stop)
            with suppress(DynamoException):  # cut off, which is an end as well
                await tokens_of(client, body, context)

        for begin in range(0, served.case.aborts, 50):
            await asyncio.gather(*(one(number) for number in range(begin, begin + 50)))
        for worker in served.workers.values():
            await worker.idle()
        # Were anything still held, so many at a time would wait for it.
        body = {"token_ids": sums(1)[0], "stop_conditions": {"max_tokens": 4}, "eos_token_ids": [2, 0]}
        await asyncio.wait_for(asyncio.gather(*(tokens_of(client, body) for _ in range(32))), PATIENCE_SECONDS)
    for worker in served.workers.values():
        assert not errors_of(worker.log)


# -- ends -------------------------------------------------------------------------------------------------------------


def streams_while(served: ServedEngine, act: Callable[[], None], count: int = 4) -> list[tuple[str, int]]:
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(served.long) for _ in range(count)]
        time.sleep(0.2)  # into the middle of them; none of what is asserted depends on it
        act()
        return [each.result(PATIENCE_SECONDS * 2) for each in running]


def test_a_killed_engine_ends_its_worker_and_loses_no_token(served: ServedEngine) -> None:
    worker = next(iter(served.workers.values()))
    parts = [number for number in descendants(worker.pid) if served.case.core and served.case.core in title_of(number)]
    if not served.case.core:
        pytest.skip("the engine has no process of its own")
    expected = served.long()
    del served.workers["a"]
    assert set(streams_while(served, lambda: os.kill(parts[0], signal.SIGKILL))) == {expected}
    assert worker.exit_code() == 1
    assert "the engine died" in worker.log


def title_of(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def test_a_killed_worker_loses_no_token_and_leaves_nothing_behind(served: ServedEngine) -> None:
    if len(served.workers) < 2:
        served.add_worker("c")
    expected = served.long()
    worker = served.workers.pop("b")
    belongings = Belongings(worker, served.temporary)
    assert set(streams_while(served, worker.kill)) == {expected}
    assert worker.exit_code() == -signal.SIGKILL
    belongings.wait_gone()


def test_an_idle_worker_ends_within_three_seconds_and_leaves_nothing_behind(served: ServedEngine) -> None:
    if served.case.name == "sglang":
        pytest.skip(
            "test_sglang_routing.py and test_engines_embeddings.py end idle workers: one more start takes minutes"
        )
    end_idle(served.add_worker("idle"), served.temporary)
    del served.workers["idle"]


def test_sigterm_under_load_loses_nothing_and_ends_in_time(served: ServedEngine) -> None:
    (worker,) = served.workers.values()
    expected, belongings = served.long(), Belongings(worker, served.temporary)
    assert set(streams_while(served, worker.terminate)) == {expected}
    began = time.monotonic()
    assert worker.exit_code() == 0
    assert time.monotonic() - began < PROMPT_SECONDS  # 3 s on an idle machine; 19 with the interpreter's teardown
    belongings.wait_gone()
    wait_empty(served.temporary)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_keeps_the_contract(case: EngineCase, tmp_path: Path) -> None:
    if not case.python:
        pytest.skip(case.why_not)
    argv = [case.python, "-m", "dynamo.cli.main", "conformance", case.name, "--start-seconds", str(START_SECONDS), "--"]
    ended = subprocess.run(
        [*argv, *case.arguments(tmp_path)],
        env={**os.environ, **case.environment},
        capture_output=True,
        text=True,
        timeout=START_SECONDS * 2,
    )
    assert "keeps the contract" in ended.stdout, ended.stdout + ended.stderr[-4000:]
    assert ended.returncode == 0
