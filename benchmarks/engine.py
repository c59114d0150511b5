"""The bench's engine: one token per chunk, either as fast as the loop goes or one every `delay` seconds."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator

from dynamo.common.backend import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from dynamo.common.backend.run import run
from dynamo.runtime import Context


class BenchEngine(LLMEngine):
    """`--delay 0`: never waits (burst); otherwise one token per stream every `--delay` seconds (paced)."""

    def __init__(self, model: str, delay: float) -> None:
        self.model, self.delay = model, delay

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[BenchEngine, WorkerConfig]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", required=True)
        parser.add_argument("--delay", type=float, default=0.0)
        parser.add_argument("--discovery-backend", default="file")
        args = parser.parse_args(argv)
        config = WorkerConfig(
            namespace="dynamo",
            component="bench",
            model_name=args.model,
            served_model_name="bench",
            discovery_backend=args.discovery_backend,
            enable_kv_routing=False,
        )
        return cls(args.model, args.delay), config

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="bench", context_length=65536)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        count = (request.get("stop_conditions") or {}).get("max_tokens") or 16
        delay = self.delay
        with_logprobs = (request.get("output_options") or {}).get("logprobs") is not None
        for i in range(count - 1):
            if context.is_stopped():
                yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                return
            if delay:
                await asyncio.sleep(delay)
            if with_logprobs:
                yield {"token_ids": [1000 + i % 20000], "index": 0, "log_probs": [-0.25]}
            else:
                yield {"token_ids": [1000 + i % 20000], "index": 0}
        if delay:
            await asyncio.sleep(delay)
        yield {
            "token_ids": [999],
            "index": 0,
            "finish_reason": "length",
            "completion_usage": {
                "prompt_tokens": len(request["token_ids"]),
                "completion_tokens": count,
                "total_tokens": len(request["token_ids"]) + count,
            },
        }

    async def cleanup(self) -> None:
        pass


if __name__ == "__main__":
    run(BenchEngine)
