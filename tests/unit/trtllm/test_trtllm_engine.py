"""TensorRT-LLM behind the contract, over a stand-in for its API: no GPU was there to run the real one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.contract.conformance import run_conformance
from dynamo.contract.requests.generation import GenerationLimits, OutputConstraint, read_generation
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.runtime.calls.context import Context
from dynamo.trtllm.arguments import MARK, read_arguments
from dynamo.trtllm.engine import TrtllmEngine, guided_parameters, sampling_parameters
from support import fake_tensorrt_llm
from support.cases import each_case
from support.demo_model import FILES
from support.patience import PATIENCE_SECONDS

LIMITS = GenerationLimits("TensorRT-LLM", 100, 840)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    with fake_tensorrt_llm.installed():
        yield


async def started(*argv: str) -> TrtllmEngine:
    engine, _ = await TrtllmEngine.from_args(["--model", str(FILES), *argv])
    await engine.start(1)
    return engine


async def chunks(engine: TrtllmEngine, context: Context | None = None, **members: Any) -> list[Any]:
    request: Any = {"token_ids": [10], **members}
    return [chunk async for chunk in engine.generate(request, context or Context())]


async def test_it_keeps_the_contract() -> None:
    async def make() -> TrtllmEngine:
        return (await TrtllmEngine.from_args(["--model", str(FILES)]))[0]

    await run_conformance(make)


async def test_flags_files_and_overrides_become_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "more.yaml").write_text("backend: pytorch\nmax_batch_size: 7\n")
    flags = ("--tensor-parallel-size", "2", "--kv-block-size", "64", "--max-batch-size", "3", "--max-seq-len", "512")
    more = ("--extra-engine-args", str(tmp_path / "more.yaml"), "--override-engine-args", '{"max_num_tokens": 99}')
    engine, _ = await TrtllmEngine.from_args(["--model", str(FILES), *flags, *more])
    config = await engine.start(1)
    (made,) = fake_tensorrt_llm.LLM.made
    assert (made["tensor_parallel_size"], made["max_batch_size"], made["max_num_tokens"]) == (2, 7, 99)
    assert (made["backend"], made["skip_tokenizer_init"], made["kv_cache_config"].tokens_per_block) == (
        "pytorch",
        True,
        64,
    )
    assert (config.context_length, config.kv_cache_block_size, config.served_model_name) == (512, 64, "model")
    assert MARK in caplog.text
    await engine.cleanup()


async def test_outputs_that_grow_become_chunks_of_new_tokens() -> None:
    engine = await started()
    found = await chunks(engine, eos_token_ids=[14], output_options={"logprobs": 2})
    assert [token for chunk in found for token in chunk["token_ids"]] == [11, 12, 13]  # the end token is kept back
    assert found[0]["log_probs"] == [-0.5]
    assert [entry["token_id"] for entry in found[0]["top_logprobs"][0]] == [11, 12]
    assert found[-1]["finish_reason"] == "stop"
    assert found[-1]["completion_usage"]["completion_tokens"] == 3
    found = await chunks(engine, stop_conditions={"max_tokens": 2})
    assert found[-1]["finish_reason"] == "length"
    await engine.cleanup()


async def test_random_aborts_reach_the_engine() -> None:
    engine = await started()
    generator = random.Random(5)

    async def one() -> str:
        context = Context()
        asyncio.get_running_loop().call_later(generator.random() * 0.05, context.stop_generating)
        found = await chunks(engine, context, stop_conditions={"max_tokens": 10**6, "ignore_eos": True})
        return str(found[-1]["finish_reason"])

    # The context's end may come first: 2,048 tokens are soon counted.
    reasons = await asyncio.wait_for(asyncio.gather(*(one() for _ in range(200))), PATIENCE_SECONDS)
    assert set(reasons) <= {"cancelled", "length"}
    assert "cancelled" in reasons
    assert all(request._aborted or request.outputs[0].finish_reason for request in engine._llm.requests)
    await engine.cleanup()


async def test_a_request_that_the_engine_ends_may_go_elsewhere() -> None:
    engine = await started()
    running = asyncio.ensure_future(chunks(engine, stop_conditions={"max_tokens": 1000}))
    while not engine._llm.requests:
        await asyncio.sleep(0)
    engine._llm.requests[0].abort()
    with pytest.raises(EngineShutdown, match="cancelled"):
        await running
    await engine.cleanup()
    with pytest.raises(EngineShutdown, match="not running"):
        await chunks(engine)


def test_every_option_of_a_request_is_set() -> None:
    options = {"temperature": 0.0, "seed": 3, "presence_penalty": 0.5}
    asked = read_generation(
        {
            "token_ids": [1],
            "sampling_options": options,
            "stop_conditions": {"stop_token_ids": [7]},
            "eos_token_ids": [2],
        },
        LIMITS,
    )
    found = sampling_parameters(asked)
    assert (found["top_k"], found["temperature"], found["end_id"], found["stop_token_ids"]) == (1, 1.0, 7, [2])
    fake_tensorrt_llm.SamplingParams(**found)
    assert guided_parameters(OutputConstraint("choice", ("a.b", "c"))) == {"regex": r"a\.b|c"}
    assert guided_parameters(OutputConstraint("json", {"type": "object"})) == {"json": '{"type": "object"}'}


async def test_a_mistake_of_a_request_is_named() -> None:
    engine = await started()
    for members, named in (
        ({"sampling_options": {"guided_decoding": {"regex": "(("}}}, r"guided_decoding\.regex"),
        ({"extra_args": {"sampling_options": {"logit_bias": {"1": 1}}}}, "logit_bias.*not built for TensorRT-LLM"),
    ):
        with pytest.raises(InvalidArgument, match=named):
            await chunks(engine, **members)
    await engine.cleanup()


@each_case(
    "argv, named",
    [
        (["--disaggregation-mode", "prefill"], "--disaggregation-mode"),
        (["--publish-kv-events"], "--publish-kv-events"),
        (["--max-beam-width", "2"], "--max-beam-width"),
        (["--override-engine-args", "["], "--override-engine-args is not JSON"),
        (["--override-engine-args", "[]"], "must hold an object"),
        (["--extra-engine-args", "/missing.yaml"], "--extra-engine-args"),
    ],
)
def test_a_command_line_that_cannot_be_served_is_refused(argv: list[str], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        read_arguments(["--model", str(FILES), *argv])


@each_case("text", ["max_num_tokens: !!int x", "a: 2001-99-99", "[" * 1500, "a: ["])
def test_a_file_of_arguments_that_is_no_yaml_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(text)
    with pytest.raises(InvalidArgument, match=r"^--extra-engine-args .* is not YAML: "):
        read_arguments(["--model", str(FILES), "--extra-engine-args", str(tmp_path / "more.yaml")])


async def test_a_start_that_fails_is_one_sentence() -> None:
    engine, _ = await TrtllmEngine.from_args(["--model", str(FILES), "--override-engine-args", '{"nonsense": 1}'])
    with pytest.raises(EngineShutdown, match=r"did not start.*nonsense"):
        await engine.start(1)
    await engine.cleanup()


def test_help_and_a_missing_package_say_where_it_stands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        read_arguments(["--help"])
    assert "not yet run on hardware" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(InvalidArgument, match="pip install tensorrt-llm"):
        read_arguments(["--model", str(FILES)])
