from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo.cli.engines import load_engine
from dynamo.cli.usage import UsageError
from dynamo.contract.config import WorkerConfig
from dynamo.contract.conformance import run_conformance, run_raw_conformance
from dynamo.engines.callable.engine import CallableEngine, TextCallableEngine, TokenCallableEngine, engine_class
from dynamo.engines.callable.signature import CallableKind, Source, plan_call
from dynamo.errors import InvalidArgument
from dynamo.protocol.openai.plain_text import conversation_text, cut, read_chunk
from dynamo.runtime.calls.context import Context
from dynamo.worker.worker import Worker
from support import callables
from support.asgi_client import Exchange
from support.cases import each_case
from support.frontend_cluster import Cluster, cluster, memory_runtime
from support.patience import PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def _fresh_journal() -> None:
    callables.journal.clear()


class House:
    """A frontend over callables served by real workers, in one process."""

    def __init__(self, found: Cluster) -> None:
        self.cluster, self.client = found, found.client
        self._workers: list[tuple[Worker, asyncio.Task[None], Any]] = []

    async def serve(self, function: Callable[..., Any]) -> None:
        runtime = memory_runtime()
        engine, config = await engine_class(function, "m").from_args(["--namespace", "ns"])
        worker = Worker(engine, config, runtime=runtime, embedded=True)
        self._workers.append((worker, asyncio.create_task(worker.run()), runtime))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.cluster.frontend.models.wait_for(lambda: self.cluster.frontend.models.lookup("m") is not None)

    async def aclose(self) -> None:
        for worker, task, runtime in self._workers:
            worker.request_stop()
            await task
            await runtime.aclose()


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0")
    async with cluster(tmp_path) as found:
        served = House(found)
        yield served
        await served.aclose()


def said(answer: Exchange) -> str:
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


# -- signatures ----------------------------------------------------------------------------------------------------------


@each_case(
    ("function", "source", "kind"),
    [
        (callables.shout, Source.MESSAGES, CallableKind.ASYNC_GENERATOR),
        (callables.echo, Source.PROMPT, CallableKind.ASYNC_GENERATOR),
        (callables.whole, Source.PROMPT, CallableKind.COROUTINE),
        (callables.in_thread, Source.PROMPT, CallableKind.SYNC),
        (callables.ids, Source.TOKEN_IDS, CallableKind.ASYNC_GENERATOR),
        (callables.id_lists, Source.TOKEN_IDS, CallableKind.ASYNC_GENERATOR),  # by its annotation
        (functools.partial(callables.echo, temperature=1.0), Source.PROMPT, CallableKind.ASYNC_GENERATOR),
    ],
)
def test_the_signature_says_how_it_is_called(function: Any, source: Source, kind: CallableKind) -> None:
    call = plan_call(function, "f")
    assert (call.source, call.kind) == (source, kind)


def nothing() -> None: ...


def two(messages: Any, prompt: Any) -> None: ...


def strange(prompt: str, banana: int) -> None: ...


def by_position(prompt: str, /) -> None: ...


@each_case(
    ("function", "sentence"),
    [
        (nothing, "takes no prompt: give it a parameter messages, prompt or token_ids"),
        (two, "'messages' and 'prompt' are both a prompt"),
        (strange, "parameter 'banana' is not known"),
        (by_position, "'prompt' is positional-only"),
    ],
)
def test_a_signature_that_cannot_be_served_is_named(function: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        plan_call(function, "f")


def test_a_command_line_names_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app_of_a_user.py").write_text("async def hi(prompt):\n    yield 'hi'\ndef no(x): ...\nseven = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert issubclass(load_engine("app_of_a_user:hi"), CallableEngine)
    with pytest.raises(UsageError, match="parameter 'x' is not known"):
        load_engine("app_of_a_user:no")
    with pytest.raises(UsageError, match="nor a function"):
        load_engine("app_of_a_user:seven")


@each_case("function", [callables.shout, callables.letters, callables.in_thread, callables.plain])
async def test_a_callable_of_text_keeps_the_contract(function: Any) -> None:
    if function is callables.in_thread:
        function = callables.plain  # endless by itself; cancellation is tested below
    await run_raw_conformance(engine_class(function))


@pytest.mark.parametrize("function", [callables.ids, callables.id_lists, callables.ids_in_thread])
async def test_a_callable_of_ids_keeps_the_contract(function: Any) -> None:
    await run_conformance(engine_class(function))


# -- through the frontend -------------------------------------------------------------------------------------------------


async def test_text_in_text_out_without_a_tokenizer(house: House) -> None:
    await house.serve(callables.shout)
    answer = await house.client.chat("hello wörld")
    assert said(answer) == "HELLO WÖRLD "
    assert answer.json["choices"][0]["finish_reason"] == "stop"
    assert answer.json["usage"] == {"prompt_tokens": 12, "completion_tokens": 13, "total_tokens": 25}  # UTF-8 bytes
    streamed = await house.client.chat("hello wörld", stream=True, stream_options={"include_usage": True})
    assert streamed.text() == "HELLO WÖRLD "
    assert streamed.finish_reasons()[-1] == "stop"
    assert streamed.chunks[-1]["usage"] == answer.json["usage"]


async def test_a_prompt_and_a_conversation_reach_either_kind(house: House) -> None:
    await house.serve(callables.echo)
    assert said(await house.client.completion("once", temperature=0.0)) == "once|0.0|16"
    assert said(await house.client.chat("once", max_tokens=3)) == "once|0.5|3"  # it takes max_tokens: nobody cuts
    answer = await house.client.completion(["one", "two"], n=2, temperature=1.0)
    assert answer.status == 200, answer.body
    assert [choice["text"] for choice in answer.json["choices"]] == ["one|1.0|16"] * 2 + ["two|1.0|16"] * 2
    assert answer.json["usage"]["prompt_tokens"] == 6


async def test_options_without_a_parameter_do_not_disturb_and_all_of_them_may_be_taken(house: House) -> None:
    await house.serve(callables.takes_everything)
    answer = await house.client.chat("x", temperature=0.1, top_p=0.5, seed=3, stop="END")
    request_id, _, options = said(answer).partition(" ")
    assert f"chatcmpl-{request_id}" == answer.json["id"]
    assert options == "['model', 'seed', 'stop', 'temperature', 'top_p']"


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_and_stop_strings_end_an_answer(house: House, stream: bool) -> None:
    await house.serve(callables.letters)
    for fields, text, reason, tokens in (
        ({"max_tokens": 4}, "abcd", "length", 4),
        ({"stop": ["fgh"]}, "abcde", "stop", 8),  # the tokens of the stop string were generated too
        ({"stop": ["zebra"]}, "abcdefghijklmnopqrstuvwxyz", "stop", 26),
        ({"stop": ["cd"], "include_stop_str_in_output": True}, "abcd", "stop", 4),
    ):
        if stream:
            answer = await house.client.chat("x", stream=True, stream_options={"include_usage": True}, **fields)
            found = answer.text(), answer.finish_reasons()[-1], answer.chunks[-1]["usage"]["completion_tokens"]
        else:
            answer = await house.client.chat("x", **fields)
            choice = answer.json["choices"][0]
            found = choice["message"]["content"], choice["finish_reason"], answer.json["usage"]["completion_tokens"]
        assert found[:2] == (text, reason)
        assert tokens <= found[2] <= 26  # what arrived in one batch with the stop counts, too
        assert reason != "length" or found[2] == tokens


async def test_a_client_that_leaves_closes_the_generator(house: House) -> None:
    await house.serve(callables.endless)
    exchange = house.client.begin_chat("x", stream=True)
    await exchange.until(lambda found: b"first" in found.body)
    exchange.disconnect()
    await exchange.done()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "endless closed" not in callables.journal:
            await asyncio.sleep(0.001)


async def test_a_sync_generator_runs_in_a_thread_and_is_closed_there(house: House) -> None:
    await house.serve(callables.in_thread)
    answer = await house.client.chat("x", max_tokens=9)
    assert said(answer) == "tick tick"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "in_thread closed" not in callables.journal:
            await asyncio.sleep(0.001)
    assert callables.journal == [False, "in_thread closed"]


@pytest.mark.parametrize(("function", "text"), [(callables.whole, "all of it"), (callables.plain, "olleh")])
async def test_a_function_that_returns_its_answer_is_served(house: House, function: Any, text: str) -> None:
    await house.serve(function)
    assert said(await house.client.completion("hello")) == text


async def test_a_callable_may_say_its_own_usage_and_reason(house: House) -> None:
    await house.serve(callables.counted)
    answer = await house.client.chat("a long prompt")
    assert answer.json["choices"][0]["finish_reason"] == "content_filter"
    assert answer.json["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


async def test_errors_are_typed(house: House) -> None:
    await house.serve(callables.refuses)
    refused = await house.client.chat("early")
    assert (refused.status, refused.json["message"]) == (400, "this prompt is not for me")
    broken = await house.client.chat("bug")
    assert (broken.status, "oops" in broken.body.decode()) == (500, False)
    late = await house.client.chat("late", stream=True)
    assert late.status == 200
    assert "this prompt is not for me" in late.body.decode()


async def test_what_is_no_text_is_named_in_the_log(house: House, caplog: pytest.LogCaptureFixture) -> None:
    await house.serve(callables.wrong)
    assert (await house.client.chat("x")).status == 500
    assert "m() gave int; a callable of text gives strings" in caplog.text


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"stop": [5]}, "stop"),
        ({"nvext": {"token_data": [1]}}, "token_data"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a+"}, "guided_regex"),
    ],
)
async def test_what_a_text_model_cannot_do_is_a_400_that_names_the_field(
    house: House, fields: dict[str, Any], name: str
) -> None:
    await house.serve(callables.shout)
    answer = await house.client.chat("x", **fields)
    assert answer.status == 400
    assert name in answer.json["message"]


async def test_token_ids_as_a_prompt_are_a_400(house: House) -> None:
    await house.serve(callables.shout)
    answer = await house.client.completion([1, 2, 3])
    assert (answer.status, "prompt" in answer.json["message"]) == (400, True)


async def test_token_ids_in_token_ids_out(house: House) -> None:
    await house.serve(callables.id_lists)
    answer = await house.client.completion("x", max_tokens=7, seed=5)
    assert said(answer) == "ABCABCA"
    assert answer.json["choices"][0]["finish_reason"] == "length"
    assert answer.json["usage"]["completion_tokens"] == 7
    assert callables.journal == [5]


# -- plain values ---------------------------------------------------------------------------------------------------------


def test_a_lone_message_is_its_own_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "b"}]
    assert conversation_text([{"role": "user", "content": parts}]) == "a\nb"
    assert conversation_text([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]) == (
        "system: s\nuser: u"
    )


@each_case("tokens", range(9))
def test_a_cut_never_divides_a_code_point(tokens: int) -> None:
    found = cut("aöb€", tokens)
    assert "aöb€".startswith(found)
    assert len(found.encode()) <= tokens or tokens == 0


@each_case(
    ("chunk", "sentence"),
    [
        ("text", "expected an OpenAI chunk with choices, got str"),
        ({"choices": [{}, 5]}, "a choice must be an object"),
        ({"choices": [{"index": 0, "delta": {"tool_calls": [1]}}]}, "tool_calls"),
        ({"choices": [{"index": 0, "delta": {"content": 5}}]}, "must be strings"),
        ({"choices": [], "usage": 3}, "usage must be an object"),
    ],
)
def test_a_chunk_nobody_could_show_is_named(chunk: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_chunk(chunk)


async def books_in_text(prompt: str) -> AsyncIterator[Any]:
    yield {"text": "paid", "finish_reason": "stop"}
    callables.journal.append("booked")


async def books_in_ids(token_ids: list[int]) -> AsyncIterator[Any]:
    yield {"token_ids": [1], "finish_reason": "stop"}
    callables.journal.append("booked")


@pytest.mark.parametrize(
    ("function", "request_body"), [(books_in_text, {"prompt": "x"}), (books_in_ids, {"token_ids": [1]})]
)
async def test_the_code_behind_the_last_yield_of_a_callable_runs(function: Any, request_body: dict[str, Any]) -> None:
    engine, _ = await engine_class(function, "m").from_args(["--namespace", "ns"])
    assert isinstance(engine, TextCallableEngine | TokenCallableEngine)
    assert [item async for item in engine.generate(request_body, Context())]  # type: ignore[arg-type]
    assert callables.journal == ["booked"]


def test_the_worker_is_registered_as_one_that_takes_text() -> None:
    async def made() -> WorkerConfig:
        return (await engine_class(callables.shout).from_args(["--model-name", "loud"]))[1]

    config = asyncio.run(made())
    assert (str(config.model_input), config.served_model_name, config.endpoint_types) == (
        "Text",
        "loud",
        "chat,completions",
    )
