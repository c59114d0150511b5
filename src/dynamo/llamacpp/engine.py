"""llama.cpp as an engine of tokens: the frontend has the tokenizer.

request -> `read_generation` -> `completion_body` -> llama.cpp's process -> `LlamaAnswer` -> chunks
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine
from dynamo.contract.health_check import build_health_check_payload
from dynamo.contract.requests.generation import (
    Feature,
    GenerationLimits,
    GenerationRequest,
    read_generation,
    read_generation_defaults,
)
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.llamacpp.answers import LlamaAnswer, completion_body
from dynamo.llamacpp.arguments import LlamaArguments, read_arguments
from dynamo.llamacpp.constraints import END_THINK, THINK, grammar_of
from dynamo.llamacpp.slots import LlamaSlots, map_llama_error
from dynamo.runtime.context import Context

__all__ = ["LlamaCppEngine"]

UNSUPPORTED: Final[frozenset[Feature]] = frozenset(
    {"min_tokens", "prompt_logprobs", "allowed_token_ids", "lora", "cache_salt"}
)


class LlamaCppEngine(LLMEngine):
    """Serves a GGUF file with llama.cpp, token ids in and out."""

    has_child_processes: ClassVar[bool] = True

    def __init__(self, arguments: LlamaArguments) -> None:
        self._arguments = arguments
        self._llama = LlamaSlots(arguments)
        self._limits: GenerationLimits | None = None
        self._markers: tuple[int, int] | None = None  # around the model's thoughts

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        arguments, worker = await asyncio.to_thread(read_arguments, argv)
        return cls(arguments), worker

    async def start(self, worker_id: int) -> EngineConfig:
        loaded = await self._llama.start()
        assert self._arguments.tokenizer is not None
        self._markers = read_thought_markers(self._arguments.tokenizer)
        self._limits = GenerationLimits(
            engine="llama.cpp",
            context_length=loaded.context_length,
            vocab_size=loaded.vocab_size,
            unsupported=UNSUPPORTED,
            defaults=read_generation_defaults(self._arguments.tokenizer),
        )
        return EngineConfig(
            model=str(self._arguments.file),
            served_model_name=self._arguments.served_name,
            context_length=loaded.context_length,
            max_num_seqs=loaded.slots,
        )

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        if self._limits is None:
            raise EngineShutdown("llama.cpp is not running")
        asked = read_generation(request, self._limits)
        answer = LlamaAnswer(asked)
        async with self._llama.events("/completion", await self._body(asked, self._limits), context) as events:
            async for event in events:
                if context.is_stopped():
                    break
                chunk = answer.chunk(event)
                if chunk is not None:
                    yield chunk
                if answer.is_complete:
                    return
        if not context.is_stopped():
            raise EngineShutdown("llama.cpp ended an answer without its last event")
        yield answer.cancelled()

    async def _body(self, asked: GenerationRequest, limits: GenerationLimits) -> dict[str, Any]:
        grammar = None
        if asked.constraint is not None:
            in_thoughts = is_thinking(asked.prompt, self._markers)
            grammar = await asyncio.to_thread(grammar_of, asked.constraint, is_thinking=in_thoughts)
        return completion_body(asked, grammar, limits.context_length)

    def map_error(self, error: Exception) -> Exception | None:
        return map_llama_error(error)

    async def wait_dead(self) -> str:
        return await self._llama.wait_ended()

    async def cleanup(self) -> None:
        await self._llama.close()

    async def health_check_payload(self) -> dict[str, Any] | None:
        return build_health_check_payload(0)


def read_thought_markers(directory: Path) -> tuple[int, int] | None:
    """Return the token ids around a model's thoughts, from its `tokenizer.json`; None where these are not one token each.

    Raises InvalidArgument for a file that cannot be read.
    """
    try:
        found = json.loads((directory / "tokenizer.json").read_bytes())
        added = {entry["content"]: int(entry["id"]) for entry in found.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{directory / 'tokenizer.json'} cannot be used: {error!r}") from error
    return (added[THINK], added[END_THINK]) if THINK in added and END_THINK in added else None


def is_thinking(prompt: Sequence[int], markers: tuple[int, int] | None) -> bool:
    """Return whether a prompt ends inside thoughts."""
    if markers is None:
        return False
    begin, end = markers
    return next((token == begin for token in reversed(prompt) if token in (begin, end)), False)
