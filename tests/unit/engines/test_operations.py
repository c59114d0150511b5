"""Controls and updates of the engines of other projects: what is done, what is refused, and what a caller reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, GenerateChunk
from dynamo.engines.adapter import AdapterEngine
from dynamo.engines.operations import CONTROLS, UPDATES, EngineOperations, Operation
from dynamo.errors import InvalidArgument, WorkerUnavailable
from dynamo.runtime.calls.context import Context
from dynamo.runtime.distributed import DistributedRuntime
from support.cases import each_case


async def halve(body: Mapping[str, Any]) -> dict[str, Any]:
    if body.get("level") == 1:
        raise InvalidArgument("level must be even")
    return {"half": int(body["level"]) // 2}


def table(**done: Operation) -> EngineOperations:
    refused = {name: f"Machine has no {name}" for name in CONTROLS | UPDATES if name not in done}
    return EngineOperations("Machine", done, {}, refused)


@each_case(
    "name, body, answer",
    [
        ("sleep", {"level": 8}, {"status": "ok", "half": 4}),
        ("sleep", {"level": 1}, {"status": "error", "message": "level must be even"}),
        ("sleep", {}, {"status": "error", "message": "KeyError: 'level'"}),
        ("sleep", {"deep": 1}, {"status": "error", "message": "unknown field 'deep'; known are level"}),
        ("wake_up", {}, {"status": "error", "message": "Machine has no wake_up"}),
        ("nonsense", {}, {"status": "error", "message": "unknown operation 'nonsense'; there are sleep"}),
    ],
)
async def test_a_control_is_done_or_refused_in_words(name: str, body: Any, answer: Any) -> None:
    operations = table(sleep=Operation(halve, frozenset({"level"})))
    assert await operations.control(name, body) == answer
    before = operations.refusal(name, body)  # before anything is touched, only what the body shows
    assert before == (answer if "un" in str(answer) or name == "wake_up" else None)


def test_an_engine_does_or_refuses_every_operation() -> None:
    with pytest.raises(ValueError, match="neither done nor refused: clear_kv_blocks"):
        EngineOperations("Machine", {}, {}, dict.fromkeys((CONTROLS | UPDATES) - {"clear_kv_blocks"}, "no"))


async def test_one_operation_runs_at_a_time() -> None:
    inside, most = 0, 0

    async def count(_body: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1
        return {}

    operations = table(sleep=Operation(count), wake_up=Operation(count))
    await asyncio.gather(*(operations.control(name, {}) for name in ("sleep", "wake_up") * 5))
    assert (inside, most) == (0, 1)


@dataclass
class Arguments:
    model: str = "m"
    served_name: str = "s"
    embeds: bool = False


def read(_argv: list[str] | None = None) -> tuple[Arguments, WorkerConfig]:
    return Arguments(), WorkerConfig("ns")


class Engine(AdapterEngine[Arguments]):
    engine_name = "Machine"
    reader = staticmethod(read)

    async def start(self, worker_id: int) -> EngineConfig:
        self._controlled = table(sleep=Operation(halve, frozenset({"level"})))
        return self.described(128)

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        self.check_serving()
        yield {"token_ids": [1], "index": 0, "finish_reason": "stop"}

    async def cleanup(self) -> None:
        self._was_cleaned_up = True


async def test_what_is_refused_is_a_route_with_the_reason_and_is_not_advertised() -> None:
    engine = Engine(Arguments())
    assert engine.supported_controls() == set()  # it has not started
    await engine.start(1)
    assert (engine.supported_controls(), engine.supported_updates()) == ({"sleep"}, set())
    async with DistributedRuntime(asyncio.get_running_loop(), "mem", "mem") as runtime:
        await engine.on_endpoint_ready(runtime.endpoint("ns.comp.generate"))
        names = runtime.status_server.route_names
        assert {"control/wake_up", "update/load_lora"} <= set(names)
        assert "control/sleep" not in names  # the worker serves it, with all that a pause needs
        assert len(names) == len(CONTROLS | UPDATES) - 1


async def test_a_halted_engine_sends_requests_elsewhere() -> None:
    engine = Engine(Arguments())
    await engine.start(1)
    assert engine._controlled is not None
    engine._controlled.halted_until = "wake_up"
    with pytest.raises(WorkerUnavailable, match=r"Machine is halted; POST /engine/control/wake_up ends that"):
        await anext(engine.generate({}, Context()))
