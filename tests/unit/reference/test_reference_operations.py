"""Controls and updates of a running engine: memory, weights, adapters, profiles, and streams that outlast them."""

from __future__ import annotations

import asyncio
import pstats
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.contract.conformance import mock_context
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import WorkerUnavailable
from dynamo.reference import Options, ReferenceEngine
from dynamo.reference.core import Core
from dynamo.reference.kv_transfer import TransferOptions
from dynamo.reference.weights import NO_WEIGHTS
from support.adapters import write_adapter
from support.cases import each_case
from support.reference_models import hold_after

SMALL = Options(block_size=4, kv_cache_mb=2, max_num_seqs=8, max_num_batched_tokens=32, max_loras=2)


def request(tokens: list[int], max_tokens: int = 40, **more: Any) -> Any:
    stops = {"max_tokens": max_tokens, "ignore_eos": True}
    return {"token_ids": tokens, "stop_conditions": stops, "sampling_options": {"temperature": 0.0}, **more}


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[ReferenceEngine]:
    engine = ReferenceEngine(directory, SMALL)
    await engine.start(1)
    try:
        yield engine
    finally:
        await engine.cleanup()


async def answer(engine: ReferenceEngine, body: Any) -> list[int]:
    async with aclosing(engine.generate(body, mock_context())) as stream:
        return [token async for chunk in stream for token in chunk["token_ids"]]


async def control(engine: ReferenceEngine, name: str, **body: Any) -> dict[str, Any]:
    refusal = await engine.validate_engine_control(name, body)
    return refusal if refusal is not None else await engine.engine_control(name, body)


def core_of(engine: ReferenceEngine) -> Core:
    assert engine._steps is not None
    return engine._steps._core


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleeping_engine_holds_no_memory_and_its_streams_go_on_afterwards(
    level: int, models: dict[str, Path]
) -> None:
    async with running(models["llama"]) as engine:
        body = request(list(range(20)), 60)
        whole = await answer(engine, body)
        context = mock_context()
        async with aclosing(engine.generate(body, context)) as stream:
            hold_after(engine, 5)
            begun = [token for _ in range(5) for token in (await anext(stream))["token_ids"]]
            assert await control(engine, "sleep", level=level) == {"status": "ok", "is_sleeping": True, "level": level}
            core = core_of(engine)
            assert (core.cache.keys.size, core.pool.held, core.pool.available) == (0, 0, core.pool.blocks)
            assert (core.model.weights is NO_WEIGHTS) == (level == 2)
            with pytest.raises(WorkerUnavailable, match="sleeps"):
                await answer(engine, body)
            assert (await control(engine, "resume_generation"))["status"] == "error"
            assert await control(engine, "wake_up") == {"status": "ok", "is_sleeping": False}
            rest = [token async for chunk in stream for token in chunk["token_ids"]]
        assert begun + rest == whole
        assert await answer(engine, body) == whole


async def test_a_stream_can_be_cut_while_the_engine_sleeps(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        context = mock_context()
        async with aclosing(engine.generate(request([5] * 9, 200), context)) as stream:
            hold_after(engine)
            await anext(stream)
            await control(engine, "sleep")
            context.stop_generating()
            await engine.abort(context)
            chunks = [chunk async for chunk in stream]
        assert chunks[-1]["finish_reason"] == "cancelled"
        await control(engine, "wake_up")
        assert core_of(engine).scheduler.is_idle


async def test_a_paused_engine_keeps_everything_and_computes_nothing(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        body = request([5] * 9, 100)
        whole = await answer(engine, body)
        async with aclosing(engine.generate(body, mock_context())) as stream:
            hold_after(engine)
            begun = (await anext(stream))["token_ids"]
            assert await control(engine, "pause_generation") == {"status": "ok", "is_paused": True}
            held = core_of(engine).pool.held
            assert held > 0
            with pytest.raises(WorkerUnavailable, match="paused"):
                await answer(engine, body)
            assert core_of(engine).pool.held == held
            assert (await control(engine, "resume_generation"))["status"] == "ok"
            rest = [token async for chunk in stream for token in chunk["token_ids"]]
        assert begun + rest == whole


async def test_a_cleared_cache_finds_nothing_and_says_how_much_it_forgot(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        body = request(list(range(20)), 5)
        await answer(engine, body)
        assert await control(engine, "clear_kv_blocks") == {"status": "ok", "cleared_blocks": 6}
        async with aclosing(engine.generate(body, mock_context())) as stream:
            chunks = [chunk async for chunk in stream]
        usage: Any = chunks[-1]["completion_usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_profile_shows_the_forward_pass(models: dict[str, Path], tmp_path: Path) -> None:
    async with running(models["llama"]) as engine:
        assert (await control(engine, "stop_profile"))["message"].startswith("no profile is being taken")
        assert (await control(engine, "start_profile"))["status"] == "ok"
        assert (await control(engine, "start_profile"))["message"].startswith("a profile is being taken")
        await answer(engine, request([5] * 9))
        found = await control(engine, "stop_profile", path=str(tmp_path / "steps.prof"))
        assert "forward" in [row["function"] for row in found["functions"]]
        assert pstats.Stats(str(tmp_path / "steps.prof")).total_calls > 100  # type: ignore[attr-defined]
        assert (await control(engine, "start_profile"))["status"] == "ok"
        nowhere = await control(engine, "stop_profile", path=str(tmp_path / "none" / "x"))
        assert "cannot be written" in nowhere["message"]


async def test_weights_are_replaced_under_a_stream_that_goes_on(
    models: dict[str, Path],
    save_model: Callable[..., Path],
    configs: dict[str, dict[str, Any]],
    tensors_of: Callable[..., dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    other = save_model(tmp_path / "other", configs["llama"], tensors_of(configs["llama"], 8))
    body = request(list(range(20)), 60)
    async with running(other) as engine:
        theirs = await answer(engine, body)
    async with running(models["llama"]) as engine:
        ours = await answer(engine, body)
        async with aclosing(engine.generate(body, mock_context())) as stream:
            begun = [token for _ in range(3) for token in (await anext(stream))["token_ids"]]
            updated = await engine.engine_update("update_weights_from_disk", {"model_path": str(other)})
            assert updated == {"status": "ok", "model_path": str(other)}
            chunks = [chunk async for chunk in stream]
        tokens = begun + [token for chunk in chunks for token in chunk["token_ids"]]
        assert (len(tokens), chunks[-1]["finish_reason"], tokens[:3]) == (60, "length", ours[:3])
        assert await answer(engine, body) == theirs != ours
        await control(engine, "sleep", level=2)
        refused = await engine.engine_update("update_weights_from_disk", {"model_path": str(other)})
        assert "sleeps" in refused["message"]
        await control(engine, "wake_up")
        assert await answer(engine, body) == theirs  # what is read again is what was there last


async def test_weights_that_do_not_fit_change_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    async with running(models["llama"]) as engine:
        body = request([5] * 9, 6)
        before = await answer(engine, body)
        for path, said in (
            (models["qwen3"], "holds another kind of model: architecture, "),
            (tmp_path / "none", "there is no directory"),
        ):
            refused = await engine.engine_update("update_weights_from_disk", {"model_path": str(path)})
            assert (refused["status"], said in refused["message"]) == ("error", True)
        assert await answer(engine, body) == before


class FakeEndpoint:
    """Stands in for discovery: the cards at one endpoint."""

    def __init__(self) -> None:
        self.cards: dict[str | None, dict[str, Any]] = {
            None: {"display_name": "llama", "slug": "llama", "aliases": ["x"]}
        }

    async def published_model(self, suffix: str | None = None) -> dict[str, Any] | None:
        return self.cards.get(suffix)

    async def publish_model(self, card_json: dict[str, Any], suffix: str | None = None) -> None:
        self.cards[suffix] = card_json

    async def withdraw_model(self, suffix: str | None = None) -> None:
        self.cards.pop(suffix, None)


async def test_adapters_come_are_listed_serve_and_go(
    models: dict[str, Path],
    configs: dict[str, dict[str, Any]],
    tensors_of: Callable[..., dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / name, tensors_of(configs["llama"]), seed=seed)
    async with running(models["llama"]) as engine:
        endpoint = FakeEndpoint()
        await engine.on_endpoint_ready(endpoint)  # type: ignore[arg-type]
        plain = await answer(engine, request([5] * 9))
        loaded = await engine.engine_update("load_lora", {"lora_name": "A", "lora_path": str(tmp_path / "a")})
        assert loaded == {"status": "ok", "lora_name": "A", "lora_path": str(tmp_path / "a"), "rank": 4}
        native = {"lora_name": "B/b", "source": {"uri": f"file://{tmp_path / 'b'}"}}
        assert (await engine.engine_update("load_lora", native))["status"] == "ok"
        assert endpoint.cards["a"] == {"display_name": "A", "slug": "a", "lora": {"name": "A"}}
        listed = await engine.engine_update("list_loras", {})
        assert ([entry["lora_name"] for entry in listed["loras"]], listed["count"]) == (["A", "B/b"], 2)
        full = await engine.engine_update("load_lora", {"lora_name": "C", "lora_path": str(tmp_path / "c")})
        assert "at most --max-loras 2" in full["message"]
        bodies = [request([5] * 9), *(request([5] * 9, routing={"lora_name": name}) for name in ("A", "B/b"))]
        said = await asyncio.gather(*(answer(engine, body) for body in bodies))
        assert (said[0], len({tuple(tokens) for tokens in said})) == (plain, 3)
        assert (await engine.engine_update("unload_lora", {"lora_name": "A"}))["status"] == "ok"
        assert list(endpoint.cards) == [None, "b_b"]
        again = await engine.engine_update("unload_lora", {"lora_name": "A"})
        assert "no such adapter" in again["message"]


@each_case(
    ("name", "body", "said"),
    [
        ("load_lora", {}, "lora_name must be a string"),
        ("load_lora", {"lora_name": "x"}, "lora_path must be a string"),
        ("load_lora", {"lora_name": "x", "source": {"uri": "s3://x"}}, "source.uri must be a file:/// address"),
        ("load_lora", {"lora_name": "x", "lora_path": "/nowhere"}, "adapter_config.json cannot be read"),
        ("load_lora", {"lora_name": "x", "lora_paths": "y"}, "unknown field 'lora_paths'"),
        ("update_weights_from_disk", {}, "model_path must be a string"),
        ("no_such", {}, "unknown operation 'no_such'"),
    ],
)
async def test_an_update_that_cannot_be_done_says_why(
    name: str, body: dict[str, Any], said: str, models: dict[str, Path]
) -> None:
    async with running(models["llama"]) as engine:
        refused = await engine.engine_update(name, body)
        assert (refused["status"], said in refused["message"]) == ("error", True)


async def test_a_wrong_control_is_refused_before_the_instance_is_withdrawn(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        for body, said in (({"level": 3}, "level must be 1"), ({"depth": 1}, "unknown field 'depth'")):
            refusal = await engine.validate_engine_control("sleep", body)
            assert refusal is not None
            assert said in refusal["message"]
        assert await engine.validate_engine_control("sleep", {}) is None


async def test_too_little_memory_to_wake_up_is_said_and_the_engine_sleeps_on(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(models["llama"]) as engine:
        await control(engine, "sleep", level=2)
        monkeypatch.setattr("dynamo.reference.loading.available_memory_bytes", lambda: 10)
        assert "too little memory" in (await control(engine, "wake_up"))["message"]
        monkeypatch.undo()
        assert (await control(engine, "wake_up"))["status"] == "ok"
        assert len(await answer(engine, request([5] * 9, 5))) == 5


async def test_a_question_to_an_engine_that_ends_is_answered(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        pass
    assert (await control(engine, "clear_kv_blocks"))["status"] == "error"


async def test_blocks_that_wait_for_another_worker_keep_the_engine_awake(models: dict[str, Path]) -> None:
    engine = ReferenceEngine(
        models["llama"], SMALL, mode=DisaggregationMode.PREFILL, transfer=TransferOptions(host="127.0.0.1")
    )
    await engine.start(1)
    try:
        chunks = [chunk async for chunk in engine.generate(request([5] * 9), mock_context())]
        assert chunks[-1]["disaggregated_params"]
        assert "3 KV blocks are on their way" in (await control(engine, "sleep"))["message"]
        assert engine._operations is not None
        served = engine._operations._served
        engine._operations._served = served._replace(may_sleep=False)  # as with nixl
        refusal = await engine.validate_engine_control("sleep", {})
        assert refusal is not None
        assert "cannot sleep" in refusal["message"]
    finally:
        await engine.cleanup()
