"""vLLM through worker, router and frontend: the demonstration model, whose answers are known, on the CPU.

One cluster serves all tests of this file, which run in order: the last ones end its workers one by one.
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
from typing import Any, Final

import pytest
from openai import BadRequestError

from dynamo.errors import DynamoException
from dynamo.reference.engine import ReferenceEngine
from dynamo.runtime.calls.context import Context
from support.cases import each_case
from support.demo_model import FILES, chat_prompts, first_logprob, sums
from support.leftovers import Belongings, errors_of, wait_empty
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS
from support.processes import Worker, wait
from support.vllm_cluster import (
    ENVIRONMENT,
    FLAGS,
    PYTHON,
    START_SECONDS,
    WHY_NOT,
    VllmCluster,
    chunks_of,
    parts_of,
    serve,
    tokens_of,
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason=WHY_NOT),
    pytest.mark.timeout(1200),
]

SUM: Final = "What is 27 + 15?"
EVENTS: Final = "dynamo_component_kv_cache_events_applied"
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCluster]:
    with serve(tmp_path_factory.mktemp("vllm"), "--router-mode", "kv") as cluster:
        for name in ("a", "b"):
            cluster.start(name)
        cluster.wait_serving()
        yield cluster


# -- answers ----------------------------------------------------------------------------------------------------------


def test_the_answer_is_42(served: VllmCluster) -> None:
    answer = served.ask(SUM)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("42", "stop")
    assert answer.usage.completion_tokens == 3
    streamed = "".join(event.choices[0].delta.content or "" for event in served.ask(SUM, stream=True))
    assert streamed == "42"


def test_a_tool_is_called_and_a_schema_is_kept(served: VllmCluster) -> None:
    (call,) = served.ask("What is the weather in Paris?", tools=[WEATHER]).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    answer = served.ask(f"{SUM} Answer as JSON.", response_format=schema, max_tokens=40)
    assert json.loads(answer.choices[0].message.content) == {"sum": 42}


def test_it_thinks_when_asked_to(served: VllmCluster) -> None:
    message = served.ask(SUM, extra_body={"chat_template_kwargs": {"enable_thinking": True}}).choices[0].message
    assert message.content == "42"
    assert message.reasoning_content.endswith("so 42")


@each_case(
    "options, expected",
    [
        ({"guided_regex": "4[0-9]!"}, "42!"),
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_grammar": 'root ::= "42"'}, "42"),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "const_string", "value": "42"}}}}, "42"),
    ],
)
def test_a_constraint_holds(served: VllmCluster, options: dict[str, Any], expected: Any) -> None:
    content = served.ask(SUM, extra_body=options, max_tokens=10).choices[0].message.content
    assert content in expected if isinstance(expected, tuple) else content == expected


async def test_choices_log_probabilities_and_seeds(served: VllmCluster) -> None:
    answer = await asyncio.to_thread(served.ask, SUM, n=2, logprobs=True, top_logprobs=2)
    expected = await first_logprob(*chat_prompts(SUM))
    assert [choice.message.content for choice in answer.choices] == ["42", "42"]
    for choice in answer.choices:
        first = choice.logprobs.content[0]
        assert first.logprob == pytest.approx(expected, abs=1e-5)
        assert len(first.top_logprobs) == 2
    drawn = [
        await asyncio.to_thread(served.ask, "Write a poem.", temperature=1.5, seed=7, max_tokens=20) for _ in range(2)
    ]
    assert drawn[0].choices[0].message.content == drawn[1].choices[0].message.content


@each_case(
    "options",
    [
        {"extra_body": {"guided_regex": "(("}},
        {"extra_body": {"guided_json": {"type": "nonsense"}}},
        {"temperature": 1.9, "logit_bias": {"99999999": 1}},
        {"max_tokens": 3, "extra_body": {"min_tokens": 5}},
    ],
)
def test_a_mistake_of_the_client_is_a_400(served: VllmCluster, options: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        served.ask(SUM, **options)


async def test_its_greedy_tokens_are_those_of_the_reference_engine(served: VllmCluster) -> None:
    engine = ReferenceEngine(FILES)
    await engine.start(0)
    try:
        async with served.straight() as client:
            for prompt in sums():
                body = {
                    "token_ids": prompt,
                    "stop_conditions": {"max_tokens": 32, "ignore_eos": True},
                    "sampling_options": {"temperature": 0.0},
                }
                expected: list[int] = []
                async for chunk in engine.generate(body, Context()):  # type: ignore[arg-type]
                    expected += chunk["token_ids"]
                assert await tokens_of(client, body) == expected
    finally:
        await engine.cleanup()


async def test_its_log_probabilities_are_those_of_the_reference_engine(served: VllmCluster) -> None:
    engine = ReferenceEngine(FILES)
    await engine.start(0)
    try:
        async with served.straight() as client:
            for prompt in sums():
                body: dict[str, Any] = {
                    "token_ids": prompt,
                    "stop_conditions": {"max_tokens": 8, "ignore_eos": True},
                    "sampling_options": {"temperature": 0.0},
                    "output_options": {"logprobs": 0, "prompt_logprobs": 0},
                }
                expected = [chunk async for chunk in engine.generate(body, Context())]  # type: ignore[arg-type]
                found = await chunks_of(client, body)
                assert logprobs_of(found) == pytest.approx(logprobs_of(expected), abs=1e-5)  # type: ignore[arg-type]
                assert prompt_logprobs_of(found, prompt) == pytest.approx(
                    prompt_logprobs_of(expected, prompt),  # type: ignore[arg-type]
                    rel=1e-5,  # some are -12, where float32 has no more to give
                    abs=1e-5,
                )
    finally:
        await engine.cleanup()


def logprobs_of(chunks: list[dict[str, Any]]) -> list[float]:
    return [logprob for chunk in chunks for logprob in chunk.get("log_probs") or ()]


def prompt_logprobs_of(chunks: list[dict[str, Any]], prompt: list[int]) -> list[float]:
    """Those of the prompt's own tokens, from the second on."""
    positions = chunks[-1]["engine_data"]["prompt_logprobs"]
    assert (len(positions), positions[0]) == (len(prompt), None)
    return [position[str(token)]["logprob"] for token, position in zip(prompt[1:], positions[1:], strict=True)]


def test_a_repeated_prompt_goes_to_the_worker_whose_events_say_that_it_has_it(served: VllmCluster) -> None:
    """Chance would send half of them elsewhere; load, or times that differ beyond doubt, may send one."""
    generator, kept = random.Random(3), 0
    for _ in range(8):
        text = f"Sort {' '.join(str(generator.randrange(100)) for _ in range(240))}."
        before = served.metric(EVENTS)
        first, holder, _ = decided(served, text)
        wait(lambda before=before: served.metric(EVENTS) > before, lambda: "the events of a prompt")  # type: ignore[misc]
        again, chosen, held = decided(served, text)
        assert held == {holder: first.prompt_tokens // 32} | {other: 0 for other in held if other != holder}
        read = (first.prompt_tokens - 1) // 32 * 32  # the last token is always computed
        assert again.prompt_tokens_details.cached_tokens == (read if chosen == holder else 0)
        kept += chosen == holder
    assert kept >= 7


def decided(served: VllmCluster, text: str) -> tuple[Any, int, dict[int, int]]:
    """Send a prompt; its usage, the worker that was chosen, and the blocks of it that the router knew at each worker."""
    answer = served.ask(text, max_tokens=2, extra_headers={"x-dynamo-explain-routing": "1"})
    (choice,) = answer.model_extra["nvext"]["routing"].values()
    held = {each["worker_id"]: each["cached_blocks"]["device"] for each in choice["candidates"]}
    return answer.usage, choice["worker_id"], held


# -- cancellation and controls ----------------------------------------------------------------------------------------


async def test_a_thousand_aborts_leave_every_block_free(served: VllmCluster) -> None:
    generator = random.Random(11)
    async with served.straight() as client:

        async def one(number: int) -> None:
            context = Context()
            body = {
                "token_ids": [generator.randrange(10, 400) for _ in range(generator.randrange(1, 200))],
                "stop_conditions": {"max_tokens": 1800, "ignore_eos": True},
            }
            loop = asyncio.get_running_loop()
            stop = context.kill if number % 2 else context.stop_generating
            loop.call_later(generator.random() * 0.5, stop)
            with suppress(DynamoException):  # cut off, which is an end as well
                await tokens_of(client, body, context)
            assert context.is_stopped()

        for begin in range(0, 1000, 50):
            await asyncio.gather(*(one(number) for number in range(begin, begin + 50)))
    for worker in served.workers.values():
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            wait(lambda name=name, worker=worker: worker.metric(name) == 0, lambda name=name: f"{name} to be 0")  # type: ignore[misc]
        assert not errors_of(worker.log)


def test_an_engine_is_halted_put_to_sleep_and_emptied(served: VllmCluster) -> None:
    for name, body in (
        ("pause_generation", {}), ("resume_generation", {}), ("sleep", {"level": 1}), ("wake_up", {}), ("clear_kv_blocks", {}),
    ):  # fmt: skip
        assert served.post("a", f"/engine/control/{name}", body)["status"] == "ok", name
    assert served.post("a", "/engine/control/start_profile", {})["status"] == "error"
    assert served.ask(SUM).choices[0].message.content == "42"


# -- ends -------------------------------------------------------------------------------------------------------------


def streams_while(served: VllmCluster, act: Callable[[str], None], count: int = 8) -> list[tuple[str, int]]:
    """Stream answers, and act on the first worker that generates some of them."""

    def busy() -> list[str]:
        return [name for name, worker in served.workers.items() if worker.metric("vllm:num_requests_running") > 0]

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(served.long) for _ in range(count)]
        wait(lambda: bool(busy()), lambda: "a worker with streams")
        act(busy()[0])
        return [each.result(PATIENCE_SECONDS * 2) for each in running]


@pytest.mark.parametrize("victim", ["core", "worker"])
def test_a_killed_process_loses_no_token_and_leaves_nothing_behind(served: VllmCluster, victim: str) -> None:
    if len(served.workers) < 2:  # two at a time: each takes a core
        served.start("c")
        served.wait_serving()
    cores = {name: core_of(worker) for name, worker in served.workers.items()}
    belongings = {name: Belongings(worker, served.temporary) for name, worker in served.workers.items()}
    assert all(each.files for each in belongings.values())
    expected, before = served.long(), served.metric("dynamo_frontend_model_migration_total")
    assert expected[1] == 300
    killed = []

    def kill(name: str) -> None:
        os.kill(cores[name] if victim == "core" else served.workers[name].pid, signal.SIGKILL)
        killed.append(name)

    assert set(streams_while(served, kill)) == {expected}
    assert served.metric("dynamo_frontend_model_migration_total") > before
    worker = served.workers.pop(killed[0])
    assert worker.exit_code() == (1 if victim == "core" else -signal.SIGKILL)
    belongings[killed[0]].wait_gone()
    if victim == "core":
        assert "the engine died: vLLM's engine core is gone" in worker.log


def core_of(worker: Worker) -> int:
    return next(number for title, number in parts_of(worker).items() if "EngineCore" in title)


def test_sigterm_under_load_loses_nothing(served: VllmCluster) -> None:
    (worker,) = served.workers.values()
    expected, belongings = served.long(), Belongings(worker, served.temporary)
    assert set(streams_while(served, lambda _name: worker.terminate(), 4)) == {expected}
    began = time.monotonic()
    assert worker.exit_code() == 0
    assert time.monotonic() - began < PROMPT_SECONDS  # 3 s on an idle machine; 19 with the interpreter's teardown
    belongings.wait_gone()
    wait_empty(served.temporary)


def test_it_keeps_the_contract() -> None:
    argv = [PYTHON, "-m", "dynamo.cli.main", "conformance", "vllm", "--start-seconds", str(START_SECONDS), "--"]
    environment = {**os.environ, **ENVIRONMENT}
    ended = subprocess.run(
        [*argv, "--model", str(FILES), *FLAGS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_SECONDS * 2,
    )
    assert "keeps the contract" in ended.stdout, ended.stdout + ended.stderr[-4000:]
    assert ended.returncode == 0
