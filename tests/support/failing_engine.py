"""An engine that does what its plan says, for tests over real processes. Writes down every call.

`python tests/support/failing_engine.py` reads its plan, JSON, from the variable FAILING_ENGINE:

    journal  file that gets one line for each call, in order
    fail     {hook: "Kind: message"}: what the hook raises
    sleep    {hook: seconds}: how long it takes (awaiting)
    block    {hook: seconds}: how long it blocks the event loop
    give     {hook: value}: what it returns
    config   members of WorkerConfig; engine: members of EngineConfig
    pace     seconds between the tokens of a stream
    linger   seconds that a job of the loop's executor goes on after the clean-up
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Self

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, LLMEngine
from dynamo.contract.modes import DisaggregationMode
from dynamo.llm import exceptions
from dynamo.protocol.model_types import ModelInput
from dynamo.worker.run import run

PLAN: dict[str, Any] = json.loads(os.environ.get("FAILING_ENGINE", "{}"))


def note(line: str) -> None:
    with Path(PLAN["journal"]).open("a") as journal:
        journal.write(line + "\n")


def failure(text: str) -> BaseException:
    kind, _, message = text.partition(": ")
    found = getattr(exceptions, kind, None) or getattr(__import__("builtins"), kind)
    error: BaseException = found(message)
    return error


def play(hook: str) -> None:
    """The part of a hook's plan that needs no awaiting."""
    note(hook)
    if (seconds := PLAN.get("block", {}).get(hook)) is not None:
        time.sleep(seconds)
    if (text := PLAN.get("fail", {}).get(hook)) is not None:
        raise failure(text)


async def act(hook: str) -> Any:
    if (seconds := PLAN.get("sleep", {}).get(hook)) is not None:
        note(f"{hook}...")
        await asyncio.sleep(seconds)
    play(hook)
    return PLAN.get("give", {}).get(hook)


class FailingEngine(LLMEngine):
    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        import argparse

        argparse.ArgumentParser().parse_args(argv)
        await act("from_args")
        members: dict[str, Any] = dict(PLAN.get("config", {}))
        if "disaggregation_mode" in members:
            members["disaggregation_mode"] = DisaggregationMode(members["disaggregation_mode"])
        if "model_input" in members:
            members["model_input"] = ModelInput[members["model_input"]]
        return cls(), WorkerConfig(**{"namespace": "ns", "discovery_backend": "file"} | members)

    async def start(self, worker_id: int) -> EngineConfig:
        await act("start")
        if (seconds := PLAN.get("linger")) is not None:
            asyncio.get_running_loop().run_in_executor(None, time.sleep, seconds)
        return EngineConfig(**({"model": "failing"} | PLAN.get("engine", {})))

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        note("generate")
        count = request["stop_conditions"]["max_tokens"]
        try:
            for number in range(count):
                await asyncio.sleep(PLAN.get("pace", 0.0))
                if context.is_stopped():
                    yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                    return
                last = {"finish_reason": "length"} if number == count - 1 else {}
                yield {"token_ids": [number], "index": 0, **last}
        finally:
            note("generated")

    async def register_prometheus(self, metrics: Any) -> None:
        await act("register_prometheus")

    def component_metrics_dp_ranks(self) -> list[int]:
        play("component_metrics_dp_ranks")
        return PLAN.get("give", {}).get("component_metrics_dp_ranks", [])

    async def kv_event_sources(self) -> list[Any]:
        return await act("kv_event_sources") or []

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        play("attach_snapshot_publisher")

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        await act("on_endpoint_ready")

    def supported_controls(self) -> set[str]:
        play("supported_controls")
        return set(PLAN.get("give", {}).get("supported_controls", []))

    def supported_updates(self) -> set[str]:
        play("supported_updates")
        return set(PLAN.get("give", {}).get("supported_updates", []))

    async def health_check_payload(self) -> dict[str, Any] | None:
        return await act("health_check_payload")

    async def abort(self, context: Any) -> None:
        note("abort")

    async def drain(self) -> None:
        await act("drain")

    async def is_quiescent(self) -> bool | None:
        return await act("is_quiescent")

    async def cleanup(self) -> None:
        await act("cleanup")


if __name__ == "__main__":
    run(FailingEngine)
