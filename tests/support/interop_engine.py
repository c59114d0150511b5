"""An engine that runs unchanged on ai-dynamo 1.6.1 and on ours: `python interop_engine.py MODEL_DIR LOG [options]`.

It says one sentence. What goes wrong is asked for by `max_tokens`; what the engine lives through is a line in LOG.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.run import run
from dynamo.llm import HttpError
from dynamo.llm import exceptions as kinds

SENTENCE = "count from 0 to 9"
FOREVER = 2000  # max_tokens (or somewhat less, where a stream has moved) of an answer that ends when it is cancelled
SILENT = 999  # max_tokens of one that never says anything

FAILURES: dict[int, Callable[[], Exception]] = {
    101: lambda: kinds.InvalidArgument("prompt too odd"),
    102: lambda: kinds.Cancelled("nobody wants it"),
    103: lambda: kinds.Unknown("a secret"),
    104: lambda: RuntimeError("a secret"),
    105: lambda: kinds.CannotConnect("kv store"),
    106: lambda: kinds.Disconnected("peer"),
    107: lambda: kinds.EngineShutdown("bye"),
    108: lambda: kinds.StreamIncomplete("no end"),
    109: lambda: kinds.WorkerUnavailable("not now"),
    110: lambda: kinds.ConnectionTimeout("slow"),
    111: lambda: HttpError(418, "I am a teapot"),
    112: lambda: HttpError(503, "a secret"),
    113: lambda: ValueError("a secret"),
    114: lambda: HttpError(429, "slow down"),
    115: lambda: HttpError(404, "no such adapter"),
    116: lambda: HttpError(422, "too odd"),
    117: lambda: HttpError(529, "a secret"),
}


class InteropEngine(LLMEngine):
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[InteropEngine, WorkerConfig]:
        parser = argparse.ArgumentParser()
        parser.add_argument("model_dir", type=Path)
        parser.add_argument("log", type=Path)
        parser.add_argument("--discovery-backend", default="file")
        parser.add_argument("--request-plane", default="tcp")
        arguments = parser.parse_args(argv)
        return cls(arguments), WorkerConfig(
            namespace="interop",
            component="backend",
            endpoint="generate",
            model_name=str(arguments.model_dir),
            served_model_name="tiny-model",
            discovery_backend=arguments.discovery_backend,
            request_plane=arguments.request_plane,
        )

    async def start(self, worker_id: int) -> EngineConfig:
        self.tokenizer = Tokenizer.from_file(str(self.arguments.model_dir / "tokenizer.json"))
        self.answer = self.tokenizer.encode(SENTENCE, add_special_tokens=False).ids
        self.requests = 0
        return EngineConfig(
            model="tiny-model",
            served_model_name="tiny-model",
            llm=LlmRegistration(context_length=40_000, kv_cache_block_size=16),
        )

    def note(self, line: str) -> None:
        with self.arguments.log.open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        self.requests += 1
        self.note("request")
        limit = request["stop_conditions"]["max_tokens"]
        if limit in FAILURES:
            raise FAILURES[limit]()
        sent, forever = 0, limit > FOREVER // 2
        try:
            while not context.is_stopped():
                if limit == SILENT:
                    await asyncio.sleep(0.001)
                    continue
                for token_id in self.answer:
                    yield {"token_ids": [token_id], "index": 0}
                    sent += 1
                    await asyncio.sleep(0.001 if forever else 0)
                if not forever:
                    prompt = len(request["token_ids"])
                    usage = {"prompt_tokens": prompt, "completion_tokens": sent, "total_tokens": prompt + sent}
                    yield {"token_ids": [], "index": 0, "finish_reason": "stop", "completion_usage": usage}
                    return
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
        finally:
            self.note("generate left")

    async def abort(self, context: Any) -> None:
        self.note("abort")

    async def cleanup(self) -> None:
        self.note("cleanup")


if __name__ == "__main__":
    run(InteropEngine, sys.argv[1:])
