"""The bench's engine for ai-dynamo 1.6.1: the same class, but for how that version is told of a token pipeline."""

from __future__ import annotations

from engine import BenchEngine

from dynamo.common.backend import EngineConfig, LlmRegistration
from dynamo.common.backend.run import run


class NativeBenchEngine(BenchEngine):
    """`BenchEngine` with the nested registration that 1.6.1 insists on."""

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="bench", llm=LlmRegistration(context_length=65536))


if __name__ == "__main__":
    run(NativeBenchEngine)
