"""The smallest useful engine: it answers with the prompt.

    python examples/echo_engine.py --model-name echo --discovery-backend file
    python -m dynamo.frontend --discovery-backend file --http-port 8000

An engine sees token ids and yields token ids. Text is the frontend's business.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator

from dynamo._core import Context
from dynamo.common.backend import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from dynamo.common.backend.args import add_backend_arguments, worker_config_from
from dynamo.common.backend.engine import chunk, final_chunk, usage
from dynamo.common.backend.run import run


class EchoEngine(LLMEngine):
    """Says every prompt token again, one each `delay` seconds."""

    def __init__(self, model_name: str, delay: float) -> None:
        self.model_name = model_name
        self.delay = delay

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[EchoEngine, WorkerConfig]:
        parser = argparse.ArgumentParser("echo-engine")
        parser.add_argument("--model-name", default="echo")
        parser.add_argument("--delay", type=float, default=0.005, help="seconds per token")
        add_backend_arguments(parser)  # --namespace, --discovery-backend and all the other common flags
        args = parser.parse_args(argv)
        return cls(args.model_name, args.delay), worker_config_from(args, model_name=args.model_name)

    async def start(self, worker_id: int) -> EngineConfig:
        # A real engine loads its model here. A failure is an EngineShutdown; cleanup() runs all the same.
        return EngineConfig(model=self.model_name, context_length=4096)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        prompt = request["token_ids"]
        # Members may be None, so `or` and not a default of .get().
        limit = (request.get("stop_conditions") or {}).get("max_tokens") or len(prompt)
        count = min(limit, len(prompt))
        for done, token_id in enumerate(prompt[:count]):
            if context.is_stopped():  # the client left: say so within one step
                yield final_chunk("cancelled", usage=usage(len(prompt), done))
                return
            await asyncio.sleep(self.delay)
            yield chunk([token_id])
        # The last chunk, and no other, has a finish reason. It may carry tokens or, as here, none.
        yield final_chunk("length" if count == limit else "stop", usage=usage(len(prompt), count))

    async def cleanup(self) -> None:
        """Nothing to release. It must be safe twice, and without start()."""


if __name__ == "__main__":
    run(EchoEngine)
