"""TensorRT-LLM's `LLM` behind the contract; ranks on several GPUs are processes that it starts.

request -> `read_generation` -> LLM.generate_async -> `TrtllmAnswer` -> chunks
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from dynamo.contract.engine import EngineConfig, GenerateChunk, GenerateRequest
from dynamo.contract.requests.generation import (
    Feature,
    GenerationLimits,
    GenerationRequest,
    read_generation,
    read_generation_defaults,
)
from dynamo.contract.requests.output_grammar import grammar_of
from dynamo.engines.adapter import AdapterEngine
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.runtime.calls.context import Context, on_loop
from dynamo.trtllm.answers import TrtllmAnswer, guided_parameters, sampling_parameters
from dynamo.trtllm.arguments import MARK, TrtllmArguments, read_arguments
from dynamo.worker.hub import fetch_model

logger = logging.getLogger(__name__)

UNSUPPORTED: Final[frozenset[Feature]] = frozenset({"logit_bias", "prompt_logprobs", "allowed_token_ids", "lora"})


class TrtllmEngine(AdapterEngine[TrtllmArguments]):
    """Serves a model with TensorRT-LLM."""

    engine_name: ClassVar[str] = "TensorRT-LLM"
    reader = staticmethod(read_arguments)
    has_child_processes: ClassVar[bool] = True
    skips_teardown: ClassVar[bool] = True

    def __init__(self, arguments: TrtllmArguments) -> None:
        super().__init__(arguments)
        self._llm: Any = None
        self._limits: GenerationLimits | None = None

    async def start(self, worker_id: int) -> EngineConfig:
        logger.warning("TensorRT-LLM is marked: %s", MARK)
        given = self._arguments
        directory = Path(await fetch_model(given.model))
        context_length, vocab_size = await asyncio.to_thread(_read_sizes, directory)
        self._llm = await asyncio.to_thread(self._make, directory)
        await self.check_wanted()
        self._limits = GenerationLimits(
            engine="TensorRT-LLM",
            context_length=given.max_seq_len or context_length,
            vocab_size=vocab_size,
            unsupported=UNSUPPORTED,
            defaults=read_generation_defaults(directory),
        )
        return self.described(
            self._limits.context_length,
            kv_cache_block_size=given.kv_block_size,
            max_num_seqs=given.max_batch_size,
            max_num_batched_tokens=given.max_num_tokens,
        )

    def _make(self, directory: Path) -> Any:
        from tensorrt_llm import LLM
        from tensorrt_llm.llmapi import KvCacheConfig

        given = self._arguments
        cache = KvCacheConfig(
            free_gpu_memory_fraction=given.free_gpu_memory_fraction,
            enable_block_reuse=True,
            tokens_per_block=given.kv_block_size,
        )
        try:
            return LLM(
                **{"kv_cache_config": cache, **given.engine, "model": str(directory), "skip_tokenizer_init": True}
            )
        except Exception as error:  # it raises whatever its parts raise
            raise EngineShutdown(f"TensorRT-LLM did not start: {error} (its own log, above, says more)") from error

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        llm, limits = self._llm, self._limits
        if llm is None or limits is None:
            raise self.not_running()
        asked = read_generation(request, limits)
        sampling = await self._sampling(asked)
        answer = TrtllmAnswer(asked)
        if context.is_stopped():
            yield answer.cancelled()
            return
        further = {} if asked.cache_salt is None else {"cache_salt": asked.cache_salt}
        try:
            results = llm.generate_async({"prompt_token_ids": asked.prompt}, sampling, streaming=True, **further)
        except ValueError as error:
            raise InvalidArgument(str(error)) from error  # its checks of a request
        forget = context.on_cancel(on_loop(asyncio.get_running_loop(), lambda _killed: results.abort()))
        try:
            # An abort is a result of its own, which is not one of the answer: `answered` stops before it.
            async with aclosing(self.answered(results, answer, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            forget()
            if not answer.is_complete:
                results.abort()

    async def _sampling(self, asked: GenerationRequest) -> Any:
        from tensorrt_llm import SamplingParams
        from tensorrt_llm.llmapi import GuidedDecodingParams

        guided = None
        if asked.constraint is not None:
            if asked.constraint.kind in ("json", "regex"):
                await asyncio.to_thread(
                    grammar_of, replace(asked.constraint, after_reasoning=False)
                )  # a mistake is named before it reaches the executor
            guided = GuidedDecodingParams(**guided_parameters(asked.constraint))
        try:
            return SamplingParams(**sampling_parameters(asked), guided_decoding=guided)
        except ValueError as error:
            raise InvalidArgument(str(error)) from error

    async def cleanup(self) -> None:
        self._was_cleaned_up = True
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)


def _read_sizes(directory: Path) -> tuple[int, int]:
    """Return the context length and the size of the vocabulary. Raises InvalidArgument naming the file and the field."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error
    config = config.get("text_config") or config
    found = []
    for name in ("max_position_embeddings", "vocab_size"):
        value = config.get(name)
        if not isinstance(value, int) or value < 1:
            raise InvalidArgument(f"{path}: {name} must be an integer above 0, got {value!r}")
        found.append(value)
    return found[0], found[1]
