"""The records that frame an engine's work on a request, where spans are records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Self

import pytest

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, LLMEngine, RawEngine
from dynamo.errors import DynamoException, InvalidArgument
from dynamo.protocol.model_types import ModelInput
from dynamo.runtime.calls.context import Context
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.worker.lifecycle import ShutdownTimes
from dynamo.worker.worker import Worker
from support.machine_log import machine_log
from support.patience import PATIENCE_SECONDS

QUICK = ShutdownTimes(grace_seconds=0.0, timeout_seconds=30)


class Hooks:
    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        raise NotImplementedError

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m")

    async def cleanup(self) -> None: ...


class Tokens(Hooks, LLMEngine):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        if request["token_ids"] == [9]:
            raise InvalidArgument("no nines")
        yield {"token_ids": [7], "index": 0, "finish_reason": "stop"}


class Raw(Hooks, RawEngine):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        yield {"said": request["prompt"]}


async def serve(engine: Any, *bodies: Any, **options: Any) -> None:
    """Serve these requests, of which any may fail."""
    async with DistributedRuntime(asyncio.get_running_loop(), "mem", "mem") as runtime:
        config = WorkerConfig(namespace="ns", discovery_backend="mem", request_plane="mem", **options)
        worker = Worker(engine, config, runtime=runtime, times=QUICK, embedded=True)
        task = asyncio.create_task(worker.run())
        await asyncio.wait_for(worker.wait_serving(), PATIENCE_SECONDS)
        client = await runtime.endpoint("ns.backend.generate").client("round-robin")
        for body in bodies:
            with suppress(DynamoException):
                async for _ in await client.generate(body, annotated=False):
                    pass
        worker.request_stop()
        await asyncio.wait_for(task, PATIENCE_SECONDS)


async def test_records_frame_the_work_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stops = {"stop_conditions": {"max_tokens": 1}}
    with machine_log(monkeypatch, capsys, DYN_LOGGING_SPAN_EVENTS="1") as log:
        await serve(Tokens(), {"token_ids": [1, 2], **stops}, {"token_ids": [9], **stops})
        found = [record for record in log.records(target="request_span") if record["span_name"] == "engine.generate"]
        completed = log.records("request completed")
    assert [(record["message"], record["input_tokens"]) for record in found] == [
        ("SPAN_FIRST_ENTRY", 2),
        ("SPAN_CLOSED", 2),
        ("SPAN_FIRST_ENTRY", 1),
        ("SPAN_CLOSED", 1),
    ]
    for record in found:
        assert (record["model"], record["disagg_role"]) == ("m", "agg")
    assert found[1]["duration_us"] >= 0
    assert [record["request_id"] for record in found[::2]] == [record["request_id"] for record in completed]
    assert [record["span_name"] for record in completed] == ["handle_payload"] * 2
    assert completed[0]["output_tokens"] == 1  # what the stream was like is on the record of the whole request


async def test_a_raw_engines_span_has_the_id_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"model_input": ModelInput.Text, "endpoint_types": "images", "model_name": "m"}
    with machine_log(monkeypatch, capsys, DYN_LOGGING_SPAN_EVENTS="1") as log:
        await serve(Raw(), {"prompt": "x"}, **options)
        found = [record for record in log.records(target="request_span") if record["span_name"] == "engine.generate"]
    assert [record["message"] for record in found] == ["SPAN_FIRST_ENTRY", "SPAN_CLOSED"]
    assert all("disagg_role" not in record and record["request_id"] for record in found)
