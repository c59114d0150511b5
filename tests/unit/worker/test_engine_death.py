"""An engine that reports its own end, and one that maps its own errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Self

import pytest

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, LLMEngine
from dynamo.errors import (
    Disconnected,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    Unknown,
    http_assertion,
)
from dynamo.runtime.calls.context import Context
from dynamo.runtime.discovery.base import INSTANCES
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.worker.engine_failures import ErrorMapping
from dynamo.worker.lifecycle import ShutdownTimes, State
from dynamo.worker.worker import Worker
from support.cases import each_case
from support.patience import PATIENCE_SECONDS

LONG = ShutdownTimes(
    grace_seconds=PATIENCE_SECONDS, timeout_seconds=int(PATIENCE_SECONDS)
)  # a dead engine waits for none


class Vanished(Exception):
    """An exception of the engine's own."""


class Mortal(LLMEngine):
    """Serves one token and then nothing; dies when it is told to."""

    def __init__(self) -> None:
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.calls: list[str] = []

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        raise AssertionError("not called")

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m")

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        yield {"token_ids": [7], "index": 0}
        await asyncio.get_running_loop().create_future()

    async def wait_dead(self) -> str:
        return await self.dead

    async def drain(self) -> None:
        self.calls.append("drain")

    async def cleanup(self) -> None:
        self.calls.append("cleanup")


@each_case("raises", [False, True])
async def test_a_dead_engine_leaves_discovery_moves_its_streams_and_fails_its_worker(raises: bool) -> None:
    engine = Mortal()
    config = WorkerConfig(namespace="ns", discovery_backend="mem", request_plane="mem")
    async with DistributedRuntime(asyncio.get_running_loop(), "mem", "mem") as runtime:
        worker = Worker(engine, config, runtime=runtime, times=LONG, embedded=True)
        task = asyncio.create_task(worker.run())
        client = await runtime.endpoint("ns.backend.generate").client("round-robin")
        await client.wait_for_instances()
        context = Context()
        stream = await client.open(client.pick(context), {"token_ids": [1]}, context)
        assert (await stream.next_batch())[0].token_ids == [7]
        if raises:
            engine.dead.set_exception(Vanished("core 3"))
        else:
            engine.dead.set_result("its core is gone")
        with pytest.raises(EngineShutdown) as caught:
            await asyncio.wait_for(stream.next_batch(), PATIENCE_SECONDS / 2)
        assert isinstance(caught.value.__cause__, Disconnected)
        stream.close()
        reason = "Vanished: core 3" if raises else "its core is gone"
        with pytest.raises(EngineShutdown, match=f"the engine died: {reason}"):
            await asyncio.wait_for(task, PATIENCE_SECONDS / 2)
        assert worker.state is State.CLOSED
        assert not await runtime.discovery.get_prefix(INSTANCES)
    assert engine.calls == ["cleanup"]


class Mapping(Mortal):
    def map_error(self, error: Exception) -> Exception | None:
        match error:
            case Vanished():
                return EngineShutdown("gone")
            case LookupError():
                return HttpError(404, "no such adapter")
            case ArithmeticError():
                raise RuntimeError("a bug in map_error")
            case OSError():
                return "not an exception"  # type: ignore[return-value]
        return None


@each_case(
    "raised, kind, text",
    [
        (Vanished("x"), EngineShutdown, "gone"),
        (LookupError("x"), InvalidArgument, None),
        (ArithmeticError("x"), Unknown, "ArithmeticError: x"),
        (OSError("x"), Unknown, "OSError: x"),
        (ValueError("x"), Unknown, "ValueError: x"),
        (InvalidArgument("x"), InvalidArgument, "x"),
    ],
)
async def test_an_engine_maps_errors_of_its_own_kinds(
    raised: Exception, kind: type[DynamoException], text: str | None
) -> None:
    typed = ErrorMapping(Mapping()).typed(raised)
    assert type(typed) is kind
    if text is None:
        assert http_assertion(typed) == (404, "no such adapter")
    else:
        assert str(typed) == text
    causes = {typed, typed.__cause__, getattr(typed.__cause__, "__cause__", None)}
    assert raised in causes
