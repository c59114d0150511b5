"""The bench's engine: one token per chunk, in one of three rhythms.

`--delay 0` never waits (burst). `--delay S` gives each stream a token every S seconds of its own (paced). `--step S` gives
every running stream a token at the same moment, once every S seconds, as an engine with continuous batching does (stepped).
With `--eager` the first token comes at once, and of paced streams the second after a part of the delay that is drawn, so that
streams that began together do not go on together.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import AsyncGenerator

from dynamo.common.backend import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from dynamo.common.backend.run import run
from dynamo.runtime import Context


class BenchEngine(LLMEngine):
    """`delay` and `step` are in seconds; see above."""

    def __init__(self, model: str, delay: float, step: float = 0.0, *, is_eager: bool = False) -> None:
        self.model, self.delay, self.step, self.is_eager = model, delay, step, is_eager
        self._next_step: asyncio.Future[None] | None = None
        self._step_at = 0.0  # loop time at which the step under way ends

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[BenchEngine, WorkerConfig]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", required=True)
        parser.add_argument("--delay", type=float, default=0.0)
        parser.add_argument("--step", type=float, default=0.0)
        parser.add_argument("--eager", action="store_true")
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
        return cls(args.model, args.delay, args.step, is_eager=args.eager), config

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="bench", context_length=65536)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        count = (request.get("stop_conditions") or {}).get("max_tokens") or 16
        delay, step = self.delay, self.step
        with_logprobs = (request.get("output_options") or {}).get("logprobs") is not None
        for i in range(count - 1):
            if context.is_stopped():
                yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                return
            if i or not self.is_eager:
                if delay:
                    await asyncio.sleep(delay * random.random() if i == 1 and self.is_eager else delay)
                elif step:
                    await self._stepped()
            if with_logprobs:
                yield {"token_ids": [1000 + i % 20000], "index": 0, "log_probs": [-0.25]}
            else:
                yield {"token_ids": [1000 + i % 20000], "index": 0}
        if count > 1 or not self.is_eager:
            if delay:
                await asyncio.sleep(delay)
            elif step:
                await self._stepped()
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

    def _stepped(self) -> asyncio.Future[None]:
        """Return the end of the step under way, which all streams await; steps end at multiples of the step's length.

        A timer may fire a moment early, so the next end is counted from the last one: else such a step would be two.
        """
        if self._next_step is None:
            loop = asyncio.get_running_loop()
            self._next_step = loop.create_future()
            self._step_at += self.step
            if self._step_at <= loop.time():
                self._step_at = (loop.time() // self.step + 1) * self.step
            loop.call_at(self._step_at, self._end_step)
        return self._next_step

    def _end_step(self) -> None:
        ended, self._next_step = self._next_step, None
        if ended is not None:
            ended.set_result(None)

    async def cleanup(self) -> None:
        pass


if __name__ == "__main__":
    run(BenchEngine)
