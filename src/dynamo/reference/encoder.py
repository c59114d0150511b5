"""The encode worker of the reference engine: it turns the media of a request into tokens, and computes nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Self

from dynamo.contract.args import worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, final_chunk, usage
from dynamo.contract.health_check import build_health_check_payload
from dynamo.contract.requests.multimodal import encoder_terminal_chunk
from dynamo.errors import EngineShutdown
from dynamo.reference.config import ModelConfig, read_model_config
from dynamo.reference.flags import read_arguments
from dynamo.reference.media import MediaOptions
from dynamo.runtime.context import Context

__all__ = ["ReferenceEncoder"]


class ReferenceEncoder(LLMEngine):
    """Answers each request with one chunk that holds the digests and tokens of its media."""

    def __init__(self, directory: Path, media: MediaOptions, *, served_model_name: str | None = None) -> None:
        self._directory, self._media = directory, media
        self._name = served_model_name or directory.resolve().name
        self._config: ModelConfig | None = None
        self._is_closed = False

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        args, _, role = read_arguments(argv, may_encode=True)
        engine = cls(args.model, role.media, served_model_name=args.served_model_name)
        return engine, worker_config_from(args, model_name=str(engine._directory), served_model_name=engine._name)

    async def start(self, worker_id: int) -> EngineConfig:
        if self._is_closed:
            raise EngineShutdown("this engine was cleaned up; make a new one")
        self._config = await asyncio.to_thread(read_model_config, self._directory)
        return EngineConfig(model=self._name, served_model_name=self._name)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        config = self._config
        if config is None or self._is_closed:
            raise EngineShutdown("the reference encoder is not running")
        counts = usage(len(request["token_ids"]), 0)
        found = await asyncio.to_thread(self._media.encode, request, config.vocab_size, config.vision)
        if context.is_stopped():
            yield final_chunk("cancelled", usage=counts)
            return
        yield encoder_terminal_chunk(found.to_result(), completion_usage=counts)

    async def cleanup(self) -> None:
        self._is_closed = True

    async def health_check_payload(self) -> dict[str, Any] | None:
        return build_health_check_payload(bos_token_id=0)
