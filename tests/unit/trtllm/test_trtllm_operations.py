"""Controls of TensorRT-LLM, over a stand-in for its API: 1.2 has none, and 1.4 gives memory back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from dynamo.errors import WorkerUnavailable
from dynamo.runtime.calls.context import Context
from dynamo.trtllm.engine import TrtllmEngine
from support import fake_tensorrt_llm
from support.demo_model import FILES

MEMORY = ("release_memory_occupation", "resume_memory_occupation")
SLEEP = ("--override-engine-args", '{"sleep_config": {}}')


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    with fake_tensorrt_llm.installed():
        yield


async def started(*argv: str) -> TrtllmEngine:
    engine, _ = await TrtllmEngine.from_args(["--model", str(FILES), *argv])
    await engine.start(1)
    return engine


async def answer(engine: TrtllmEngine, tokens: int = 3) -> list[int]:
    request: Any = {"token_ids": [10], "stop_conditions": {"max_tokens": tokens}}
    return [token async for chunk in engine.generate(request, Context()) for token in chunk["token_ids"]]


async def test_what_the_release_cannot_do_is_refused_with_the_reason() -> None:
    engine = await started()
    assert (engine.supported_controls(), engine.supported_updates()) == (set(), set())
    for name, named in (
        ("pause_generation", "POST /engine/drain"),
        ("clear_kv_blocks", "KV cache clear not supported on this worker"),
        ("start_profile", "TLLM_PROFILE_START_STOP"),
        (MEMORY[0], "from 1.4 on, started with a sleep_config"),
    ):
        refused = await engine.engine_control(name, {})
        assert refused["status"] == "error"
        assert named in refused["message"]
    assert "start a new worker" in (await engine.engine_update("update_weights_from_disk", {}))["message"]
    await engine.cleanup()


async def test_memory_is_released_and_resumed() -> None:
    with fake_tensorrt_llm.installed(fake_tensorrt_llm.SleepingLLM):
        assert (await started()).supported_controls() == set()  # without a sleep_config it would give nothing back
        engine = await started(*SLEEP)
        assert engine.supported_controls() == set(MEMORY)
        assert (await engine.engine_control(MEMORY[0], {}))["status"] == "ok"
        assert (await engine.engine_control(MEMORY[0], {}))["status"] == "ok"  # again: nothing happens
        with pytest.raises(WorkerUnavailable, match=MEMORY[1]):
            await answer(engine)
        assert (await engine.engine_control(MEMORY[1], {}))["status"] == "ok"
        assert engine._llm.log == ["release", "resume"]
        assert await answer(engine) == [11, 12, 13]
        await engine.cleanup()


async def test_memory_is_not_released_under_a_running_request() -> None:
    with fake_tensorrt_llm.installed(fake_tensorrt_llm.SleepingLLM):
        engine = await started(*SLEEP)
        running = asyncio.ensure_future(answer(engine, 500))
        while not engine._llm.requests:
            await asyncio.sleep(0)
        refused = await engine.engine_control(MEMORY[0], {})
        assert refused == {
            "status": "error",
            "message": "1 requests are running; drain the worker first (POST /engine/drain)",
        }
        assert len(await running) == 500
        assert (await engine.engine_control(MEMORY[0], {}))["status"] == "ok"
        await engine.cleanup()
