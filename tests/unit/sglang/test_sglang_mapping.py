"""Between the contract and SGLang, without SGLang: requests, outputs as they were recorded, and its thread."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from dynamo.contract.kv_events import ZmqSource
from dynamo.contract.requests.generation import GenerationLimits, GenerationRequest, read_generation
from dynamo.errors import EngineShutdown, HttpError, InvalidArgument
from dynamo.runtime.calls.context import Context
from dynamo.sglang.arguments import MARK, _without_events, events_source, read_arguments
from dynamo.sglang.engine import SglangAnswer, SglangObjects, answer_of, logprob_arguments, sampling_parameters
from dynamo.sglang.engine_thread import EngineThread, kept_logging
from support.cases import each_case
from support.demo_model import FILES
from support.patience import PATIENCE_SECONDS

LIMITS = GenerationLimits("SGLang", 100, 840)


def asked(**members: Any) -> GenerationRequest:
    return read_generation({"token_ids": [1, 2, 3], **members}, LIMITS)


def meta(reason: Any = None, **more: Any) -> dict[str, Any]:
    return {"id": "a1", "finish_reason": reason, "prompt_tokens": 3, "cached_tokens": 2, **more}


FIRST = {
    "output_ids": [33],
    "meta_info": meta(
        output_token_logprobs=[(-0.00099, 33, None)], output_top_logprobs=[[(-0.00099, 33, None), (-6.9, 34, None)]]
    ),
}
LAST = {
    "output_ids": [2],
    "meta_info": meta(
        {"type": "stop", "matched": 2},
        output_token_logprobs=[(-0.0002, 2, None)],
        output_top_logprobs=[[(-0.0002, 2, None), (-9.8, 25, None)]],
    ),
}


def test_recorded_outputs_become_chunks() -> None:
    answer = SglangAnswer(asked(output_options={"logprobs": 2}))
    first, last = answer.chunk(FIRST), answer.chunk(LAST)
    assert first is not None
    assert last is not None
    assert (first["token_ids"], first["log_probs"]) == ([33], [-0.00099])
    assert [entry["token_id"] for entry in first["top_logprobs"][0]] == [33, 34]
    assert (last["finish_reason"], answer.is_complete) == ("stop", True)
    assert last["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_the_route_of_tokens_gets_the_outputs_as_they_are() -> None:
    request: Any = {"token_ids": [1], "extra_args": {"sglang_tito": {"rid": "mine"}}}
    answer = answer_of(request, asked())
    assert isinstance(answer, SglangObjects)
    first, last = answer.chunk(FIRST), answer.chunk(LAST)
    shown: Any = FIRST["meta_info"]
    assert first == {
        "token_ids": [],
        "index": 0,
        "engine_data": {"sglang_response": {"output_ids": [33], "meta_info": {**shown, "id": "mine"}}},
    }
    assert last is not None
    assert (last["finish_reason"], answer.is_complete) == ("stop", True)
    assert last["completion_usage"]["completion_tokens"] == 2
    assert type(answer_of({"token_ids": [1]}, asked())) is SglangAnswer


@each_case(
    "reason, kind",
    [
        ({"type": "abort", "message": "bad", "status_code": 400}, InvalidArgument),
        ({"type": "abort", "message": "full", "status_code": 503}, HttpError),
        ({"type": "abort", "message": "paused"}, EngineShutdown),
    ],
)
def test_an_abort_is_an_error_and_its_token_is_junk(reason: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=reason["message"]):
        SglangAnswer(asked()).chunk({"output_ids": [7], "meta_info": meta(reason)})


def test_every_option_of_a_request_is_set() -> None:
    request = asked(
        sampling_options={"temperature": 0.0, "guided_decoding": {"choice": ["a.b", "c"]}},
        stop_conditions={"max_tokens": 5, "stop_token_ids": [7]},
        extra_args={"sampling_options": {"logit_bias": {"4": -2}}},
        output_options={"logprobs": 0},
    )
    found = sampling_parameters(request)
    expected = {"max_new_tokens": 5, "temperature": 0.0, "top_k": -1, "stop_token_ids": [7], "regex": r"a\.b|c"}
    assert {name: found[name] for name in expected} == expected
    assert found["logit_bias"] == {"4": -2.0}
    assert logprob_arguments(request) == {"return_logprob": True, "top_logprobs_num": 0}
    assert logprob_arguments(asked()) == {}


class Engine:
    """Streams as many outputs as it is asked for, on the thread's loop; a negative number is refused."""

    def __init__(self) -> None:
        self.is_shut_down = False
        self.followed: list[asyncio.AbstractEventLoop] = []

    async def async_generate(self, *, stream: bool, count: int) -> AsyncIterator[int]:
        assert stream
        self.followed.append(asyncio.get_running_loop())
        if count < 0:
            raise ValueError("refused")

        async def outputs() -> AsyncIterator[int]:
            for number in range(count):
                yield number
            if count == 0:
                await asyncio.get_running_loop().create_future()

        return outputs()

    def shutdown(self) -> None:
        self.is_shut_down = True


def counted(count: int) -> Callable[[Any], Awaitable[AsyncIterator[int]]]:
    return lambda engine: engine.async_generate(stream=True, count=count)


async def test_the_engine_lives_on_a_loop_of_its_own() -> None:
    thread = EngineThread()
    await thread.start(Engine)
    engine = thread.engine
    assert [output async for output in thread.outputs(Context(), counted(3))] == [0, 1, 2]
    assert engine.followed[0] is not asyncio.get_running_loop()
    with pytest.raises(ValueError, match="refused"):
        [output async for output in thread.outputs(Context(), counted(-1))]
    context = Context()
    asyncio.get_running_loop().call_soon(context.stop_generating)

    async def silent() -> list[Any]:
        return [output async for output in thread.outputs(context, counted(0))]

    assert await asyncio.wait_for(silent(), PATIENCE_SECONDS) == []
    await thread.close()
    await thread.close()
    assert engine.is_shut_down


async def test_a_start_that_fails_is_raised_to_the_worker() -> None:
    def make() -> Any:
        raise SystemExit(2)

    thread = EngineThread()
    with pytest.raises(EngineShutdown, match="did not start"):
        await thread.start(make)
    await thread.close()


def test_the_workers_log_stays_the_workers() -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    with kept_logging():
        root.handlers[:] = []
        root.setLevel(logging.CRITICAL)
    assert (root.handlers, root.level) == before


def test_what_is_not_built_or_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ["--model-path", str(FILES)]
    with pytest.raises(InvalidArgument, match="pip install 'sglang"):
        read_arguments(model)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    for flags in (["--disaggregation-mode", "prefill"], ["--skip-tokenizer-init"], ["--enable-multimodal"]):
        with pytest.raises(InvalidArgument, match=flags[0]):
            read_arguments([*model, *flags])
    arguments, worker = read_arguments([*model, "--page-size", "16"])
    assert (arguments.served_name, arguments.sglang) == ("model", ("--page-size", "16"))
    assert worker.model_name == str(FILES)
    assert "speed not" in MARK
    for flag in ("--embedding-worker", "--is-embedding"):
        arguments, worker = read_arguments([*model, flag])
        assert (arguments.embeds, arguments.sglang, arguments.is_kv_routed) == (True, ("--is-embedding",), False)
        assert worker.endpoint_types == "embedding"


# -- KV events --------------------------------------------------------------------------------------------------------


@each_case(
    "flags, why_not",
    [
        ({"page_size": 16}, None),
        ({"page_size": 64}, None),
        ({"page_size": None}, "--page-size 1 is below 8"),
        ({"page_size": 4}, "--page-size 4 is below 8"),
        ({"page_size": 16, "dp_size": 2}, "--dp-size"),
        ({"page_size": 16, "disable_radix_cache": True}, "--disable-radix-cache"),
    ],
)
def test_events_are_published_where_routers_can_use_them(flags: dict[str, Any], why_not: str | None) -> None:
    found = _without_events(argparse.Namespace(**{"disable_radix_cache": False, "dp_size": 1, **flags}))
    assert found is None if why_not is None else why_not in str(found)


@each_case(
    "config, source",
    [
        (None, None),
        ("", None),
        ('{"publisher": "null"}', None),
        ('{"publisher": "zmq"}', ZmqSource("tcp://*:5557", topic="")),
        ('{"publisher": "zmq", "endpoint": "ipc:///x/e", "topic": "kv"}', ZmqSource("ipc:///x/e", topic="kv")),
    ],
)
def test_the_source_is_where_sglang_publishes(config: str | None, source: ZmqSource | None) -> None:
    assert events_source(config) == source
