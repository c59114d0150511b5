"""The engine behind the contract: streams, cancellation, events, load, and its one thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dynamo.contract.chunks import GenerateChunk
from dynamo.contract.conformance import mock_context, run_conformance
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.reference import Options, ReferenceEngine
from dynamo.reference.core import Core
from dynamo.runtime.calls.context import Context
from dynamo.worker.kv_publishing.publisher import ComponentSnapshot
from support.cases import each_case
from support.reference_models import hold_after

SMALL = Options(block_size=4, kv_cache_mb=2, max_num_seqs=8, max_num_batched_tokens=32)


def request(tokens: list[int], max_tokens: int = 12, **more: Any) -> Any:
    stops = {"max_tokens": max_tokens, "ignore_eos": True}
    return {"token_ids": tokens, "stop_conditions": stops, "sampling_options": {"temperature": 0.0}, **more}


@asynccontextmanager
async def running(directory: Path, options: Options = SMALL) -> AsyncIterator[ReferenceEngine]:
    engine = ReferenceEngine(directory, options)
    await engine.start(1)
    try:
        yield engine
    finally:
        await engine.cleanup()


async def collect(engine: ReferenceEngine, body: Any, context: Context | None = None) -> list[GenerateChunk]:
    async with aclosing(engine.generate(body, context or mock_context())) as stream:
        return [chunk async for chunk in stream]


async def settled(engine: ReferenceEngine) -> Core:
    """The core once the thread has done all that it was told."""
    assert engine._steps is not None
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    engine._steps.submit(lambda _core: loop.call_soon_threadsafe(done.set))
    await done.wait()
    return engine._steps._core


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
async def test_the_engine_keeps_the_contract(name: str, models: dict[str, Path]) -> None:
    await run_conformance(lambda: ReferenceEngine(models[name], SMALL))


async def test_the_config_says_what_the_router_may_count_on(models: dict[str, Path]) -> None:
    engine = ReferenceEngine(models["llama"], SMALL)
    config = await engine.start(1)
    assert await engine.start(1) is config
    assert (config.model, config.kv_cache_block_size, config.context_length) == ("llama", 4, 256)
    assert config.total_kv_blocks == 256 // 4 * 8
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (8, 32)
    await engine.cleanup()


async def test_a_stream_ends_with_the_usage_of_all_it_yielded(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        for cached in (0, 8):
            chunks = await collect(engine, request([5] * 9))
            assert [chunk.get("finish_reason") for chunk in chunks] == [None] * 11 + ["length"]
            assert chunks[-1]["completion_usage"] == {
                "prompt_tokens": 9,
                "completion_tokens": 12,
                "total_tokens": 21,
                "prompt_tokens_details": {"cached_tokens": cached},
            }


async def test_choices_are_streamed_by_index_and_counted_together(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        body = request([5] * 9, 6, sampling_options={"temperature": 1.0, "seed": 1, "n": 3})
        chunks = await collect(engine, body)
    ends = [chunk for chunk in chunks if "finish_reason" in chunk]
    assert sorted(chunk["index"] for chunk in ends) == [0, 1, 2]
    assert [("completion_usage" in chunk) for chunk in ends] == [False, False, True]
    assert ends[-1]["completion_usage"]["completion_tokens"] == 18


async def test_a_stop_token_is_not_counted_and_named_as_the_reason(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        tokens = [chunk["token_ids"][0] for chunk in await collect(engine, request([5, 6, 7], 12))]
        stop = next(token for n, token in enumerate(tokens) if n and token not in tokens[:n])
        body = request([5, 6, 7], stop_conditions={"max_tokens": 12, "stop_token_ids": [stop]})
        last = (await collect(engine, body))[-1]
    assert (last["finish_reason"], last["stop_reason"], last["token_ids"]) == ("stop", stop, [])
    assert last["completion_usage"]["completion_tokens"] == tokens.index(stop)


async def test_log_probabilities_have_the_shape_of_the_contract(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        options = {"logprobs": 2, "prompt_logprobs": 1}
        chunks = await collect(engine, request([5, 6, 7], 2, output_options=options))
    for chunk in chunks:
        (entries,) = chunk["top_logprobs"]
        assert [entry["rank"] for entry in entries] == [1, 2]
        assert (entries[0]["token_id"], entries[0]["logprob"]) == (chunk["token_ids"][0], chunk["log_probs"][0])
    prompt = chunks[-1]["engine_data"]["prompt_logprobs"]
    assert prompt[0] is None
    assert ["6" in prompt[1], "7" in prompt[2], len(prompt)] == [True, True, 3]


async def test_a_text_that_is_scored_has_the_token_that_ends_it(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        (drawn,) = (await collect(engine, request([5, 6, 7], 1)))[-1]["token_ids"]
        ended = {"max_tokens": 1, "stop_token_ids_hidden": [drawn]}
        options = {"logprobs": 1, "prompt_logprobs": 1}
        (chunk,) = await collect(engine, request([5, 6, 7], stop_conditions=ended, output_options=options))
    # Programs that score texts count on one token after the prompt, and leave it out.
    assert (chunk["finish_reason"], chunk["token_ids"], len(chunk["log_probs"])) == ("eos", [drawn], 1)


@pytest.mark.parametrize("way", ["close", "stop", "abort"])
async def test_a_request_that_is_cut_frees_its_blocks_at_once(way: str, models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        context = mock_context()
        hold_after(engine)
        stream = engine.generate(request([5] * 30, 200), context)
        await anext(stream)
        if way == "close":
            await stream.aclose()
        else:
            context.stop_generating()
            if way == "abort":
                await engine.abort(context)
            chunks = [chunk async for chunk in stream]
            assert chunks[-1]["finish_reason"] == "cancelled"
            tokens = 1 + sum(len(chunk["token_ids"]) for chunk in chunks)
            assert chunks[-1]["completion_usage"]["completion_tokens"] == tokens < 200
        core = await settled(engine)
        assert (core.pool.held, core.is_idle, engine._streams) == (0, True, {})


async def test_every_open_choice_of_a_stopped_request_is_ended(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        context = mock_context()
        body = request([5] * 9, 200, sampling_options={"temperature": 1.0, "seed": 1, "n": 3})
        hold_after(engine)
        stream = engine.generate(body, context)
        await anext(stream)
        context.stop_generating()
        chunks = [chunk async for chunk in stream]
        ends = [chunk for chunk in chunks if "finish_reason" in chunk]
        assert [(chunk["index"], chunk["finish_reason"]) for chunk in ends] == [(n, "cancelled") for n in range(3)]
        counted = chunks[-1]["completion_usage"]["completion_tokens"]
        assert counted == 1 + sum(len(chunk["token_ids"]) for chunk in chunks)
        assert (await settled(engine)).pool.held == 0


async def test_a_request_that_waits_for_its_turn_is_aborted_at_once(models: dict[str, Path]) -> None:
    options = Options(block_size=4, kv_cache_mb=2, max_num_seqs=1, max_num_batched_tokens=8)
    async with running(models["llama"], options) as engine:
        first = engine.generate(request([5] * 9, 240), mock_context())
        await anext(first)
        context = mock_context()
        second = asyncio.create_task(collect(engine, request([6] * 9), context))
        await asyncio.sleep(0)
        context.stop_generating()
        await engine.abort(context)
        (chunk,) = await second
        assert (chunk["finish_reason"], chunk["completion_usage"]["completion_tokens"]) == ("cancelled", 0)
        await first.aclose()


async def test_a_hundred_requests_cut_anywhere_leave_nothing_behind(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:

        async def one(number: int) -> None:
            context = mock_context()
            async with aclosing(engine.generate(request([number % 7] * (1 + number % 40), 30), context)) as stream:
                left = number * 13 % 35
                async for _ in stream:
                    left -= 1
                    if left == 0 and number % 2:
                        context.stop_generating()
                    elif left == 0:
                        break

        await asyncio.gather(*(one(number) for number in range(100)))
        core = await settled(engine)
        assert (core.pool.held, core.is_idle, engine._streams, engine._steps and engine._steps.results) == (
            0,
            True,
            {},
            {},
        )


class Recorder:
    """Stands in for both publishers."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.snapshots: list[ComponentSnapshot] = []

    def publish_batch(self, events: list[dict[str, Any]]) -> None:
        self.events += events

    def publish(self, rank: int, snapshot: ComponentSnapshot) -> None:
        assert rank == snapshot.dp_rank == 0
        self.snapshots.append(snapshot)


async def test_the_router_is_told_of_every_block_and_of_the_load(models: dict[str, Path]) -> None:
    async with running(models["llama"], Options(block_size=4, kv_cache_mb=1, max_num_seqs=1)) as engine:
        recorder = Recorder()
        source: Any
        (source,) = await engine.kv_event_sources()
        source.on_ready(recorder)
        engine.attach_snapshot_publisher(recorder)  # type: ignore[arg-type]
        prompt = list(range(11))
        chunks = await collect(engine, request(prompt, 6))
        await settled(engine)
        tokens = prompt + [token for chunk in chunks for token in chunk["token_ids"]]
        names = sequence_hashes(block_hashes(tokens, 4))
        assert [event["block_hashes"] for event in recorder.events] == [[name] for name in names]
        assert recorder.snapshots[0].kv_total_blocks == 64
        assert max(snapshot.kv_used_blocks for snapshot in recorder.snapshots) == 4
        assert (recorder.snapshots[-1].kv_used_blocks, recorder.snapshots[-1].kv_cache_hit_rate) == (0, 0.0)
        for number in range(8):
            await collect(engine, request([number + 20] * 60, 2))
        await settled(engine)
        removed = [name for event in recorder.events if event["type"] == "removed" for name in event["block_hashes"]]
        assert removed[: len(names)] == names[::-1]


async def test_a_publisher_that_fails_costs_no_answer(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with running(models["llama"]) as engine:
        source: Any
        (source,) = await engine.kv_event_sources()
        source.on_ready(None)
        engine._reports.events = object()  # type: ignore[assignment]
        assert len(await collect(engine, request([5] * 9, 3))) == 3
    assert "KV events were not published" in caplog.text


async def test_an_engine_that_fails_ends_every_request_and_takes_no_more(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(models["llama"]) as engine:
        monkeypatch.setattr(Core, "step", lambda _core: 1 / 0)
        found = await asyncio.gather(*(collect(engine, request([5])) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(error, EngineShutdown) and "ZeroDivisionError" in str(error) for error in found)
        with pytest.raises(EngineShutdown, match="failed"):
            await collect(engine, request([5]))


async def test_cleanup_ends_what_runs_and_its_thread(models: dict[str, Path]) -> None:
    engine = ReferenceEngine(models["llama"], SMALL)
    await engine.start(1)
    hold_after(engine)
    stream = engine.generate(request([5] * 9, 240), mock_context())
    await anext(stream)
    gate = threading.Event()  # holds the thread between two steps
    assert engine._steps is not None
    engine._steps.submit(lambda _core: gate.wait(10) and None)
    cleanup = asyncio.create_task(engine.cleanup())
    with pytest.raises(EngineShutdown, match="shutting down"):
        [chunk async for chunk in stream]
    gate.set()
    await cleanup
    await engine.cleanup()
    for refused in (collect(engine, request([5])), engine.start(1)):
        with pytest.raises(EngineShutdown):
            await refused
    assert "reference-steps" not in [thread.name for thread in threading.enumerate()]


async def test_guided_requests_are_compiled_off_the_loop_and_refused_before_the_first_chunk(
    speaking_model: Path,
) -> None:
    async with running(speaking_model) as engine:
        options: Any = {"temperature": 5.0, "seed": 1, "guided_decoding": {"choice": ["yes", "no"]}}
        chunks = await collect(engine, request([5], 20, sampling_options=options))
        tokenizer = Tokenizer.from_file(str(speaking_model / "tokenizer.json"))
        tokens = [token for chunk in chunks for token in chunk["token_ids"]]
        assert (tokenizer.decode(tokens) in ("yes", "no"), chunks[-1]["finish_reason"]) == (True, "eos")
        options["guided_decoding"] = {"regex": "("}
        with pytest.raises(InvalidArgument, match=r"guided_decoding\.regex cannot be compiled"):
            await collect(engine, request([5], sampling_options=options))


async def test_a_request_that_runs_out_of_tokens_fails_alone(speaking_model: Path) -> None:
    async with running(speaking_model) as engine:
        options = {"temperature": 0.0, "guided_decoding": {"regex": "ab"}, "n": 2}
        only_b: dict[str, Any] = {"extra_args": {"sampling_options": {"allowed_token_ids": [5]}}}
        failing = collect(engine, request([5], sampling_options=options, **only_b))
        failure: Any
        other: Any
        failure, other = await asyncio.gather(failing, collect(engine, request([6])), return_exceptions=True)
        assert isinstance(failure, InvalidArgument)
        assert "no token is left for position 1" in str(failure)
        assert isinstance(other, list)
        core = await settled(engine)
        assert (core.pool.held, engine._steps and engine._steps.results) == (0, {})


async def test_a_moved_request_counts_from_the_prompt_the_client_sent(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        body = request([5] * 9, 12, sampling_options={"temperature": 0.0, "frequency_penalty": 1.5})
        tokens = [token for chunk in await collect(engine, body) for token in chunk["token_ids"]]
        context = mock_context()
        context.prompt_tokens = 9
        moved = {**body, "token_ids": [*body["token_ids"], *tokens[:5]]}
        moved["stop_conditions"] = {**body["stop_conditions"], "max_tokens": 7}
        chunks = await collect(engine, moved, context)
        assert [token for chunk in chunks for token in chunk["token_ids"]] == tokens[5:]
        assert chunks[-1]["completion_usage"]["prompt_tokens"] == 9


async def test_a_prompt_over_the_limit_and_a_start_without_a_model_are_named(
    models: dict[str, Path], tmp_path: Path
) -> None:
    async with running(models["llama"]) as engine:
        with pytest.raises(InvalidArgument, match="256 tokens; this model takes at most 255"):
            await collect(engine, request([5] * 256))
    engine = ReferenceEngine(tmp_path / "none")
    with pytest.raises(InvalidArgument, match="there is no directory"):
        await engine.start(1)
    with pytest.raises(EngineShutdown, match="not running"):
        await collect(engine, request([5]))
    await engine.cleanup()


async def test_flags_become_options_and_the_workers_config(models: dict[str, Path]) -> None:
    argv = ["--model", str(models["qwen3"]), "--block-size", "8", "--max-num-seqs", "3", "--no-prefix-caching"]
    engine, config = await ReferenceEngine.from_args(argv)
    assert (config.model_name, config.served_model_name) == (str(models["qwen3"]), "qwen3")
    assert engine._options == Options(block_size=8, max_num_seqs=3, prefix_caching=False)
    assert await engine.kv_event_sources() == []


@each_case(
    ("argv", "said"),
    [
        (["--model"], "--model"),
        (["--model", "x", "--block-size", "0"], "--block-size must be at least 1"),
        (["--model", "x", "--max-num-batched-tokens", "5"], "--max-num-batched-tokens (5)"),
        (["--model", "x", "--disaggregation-mode", "encode"], "--disaggregation-mode encode"),
        (["--model", "x", "--kv-transfer", "pigeon"], "--kv-transfer"),
        (["--model", "x", "--kv-transfer-port", "70000"], "--kv-transfer-port must be in 0..65535"),
        (["--model", "x", "--kv-hold-seconds", "0"], "--kv-hold-seconds must be above 0"),
        (["--model", "x", "--kv-pull-seconds", "nan"], "--kv-pull-seconds must be above 0"),
    ],
)
async def test_a_bad_flag_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        await ReferenceEngine.from_args(argv)
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1


async def test_the_canary_is_a_token_the_model_knows(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        payload = await engine.health_check_payload()
        assert payload is not None
        assert payload["token_ids"] == [1]
        (chunk,) = await collect(engine, payload)
        assert chunk["finish_reason"] == "length"
