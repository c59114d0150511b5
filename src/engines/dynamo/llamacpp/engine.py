"""llama.cpp as an engine of tokens: the frontend has the tokenizer.

request -> `read_generation` -> `completion_body` -> llama.cpp's process -> `LlamaAnswer` -> chunks
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar, Final

from dynamo.contract.embedding import Embedding, EmbedRequest, embedding
from dynamo.contract.engine import EngineConfig, GenerateChunk, GenerateRequest
from dynamo.contract.requests.generation import (
    Feature,
    GenerationLimits,
    GenerationRequest,
    read_generation,
    read_generation_defaults,
)
from dynamo.contract.requests.output_grammar import grammar_of, is_thinking, read_thought_markers
from dynamo.contract.requests.vectors import EMBED, inputs_within, task_among
from dynamo.engines.adapter import AdapterEngine
from dynamo.engines.cache_scope import CacheScope
from dynamo.errors import InvalidArgument
from dynamo.llamacpp.answers import LlamaAnswer, completion_body
from dynamo.llamacpp.arguments import LlamaArguments, read_arguments
from dynamo.llamacpp.slots import LlamaSlots, map_llama_error
from dynamo.runtime.calls.context import Context

UNSUPPORTED: Final[frozenset[Feature]] = frozenset({"min_tokens", "prompt_logprobs", "allowed_token_ids", "lora"})

INPUTS_AT_ONCE: Final = 8  # of one request: their vectors come as one text
EUCLIDEAN: Final = 2  # llama.cpp's number of a norm
NO_NORM: Final = -1


class LlamaCppEngine(AdapterEngine[LlamaArguments]):
    """Serves a GGUF file with llama.cpp, token ids in and out."""

    engine_name: ClassVar[str] = "llama.cpp"
    reader = staticmethod(read_arguments)
    has_child_processes: ClassVar[bool] = True

    def __init__(self, arguments: LlamaArguments) -> None:
        super().__init__(arguments)
        self._llama = LlamaSlots(arguments)
        self._limits: GenerationLimits | None = None
        self._scope = CacheScope(self.engine_name)
        self._markers: tuple[int, int] | None = None  # around the model's thoughts

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
        config = self.described(loaded.context_length, max_num_seqs=loaded.slots)
        config.model_aliases = list(self._arguments.aliases)
        return config

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        if self._limits is None:
            raise self.not_running()
        self.check_task(embeds=False)
        asked = read_generation(request, self._limits)
        answer = LlamaAnswer(asked)
        body = await self._body(asked, self._limits)
        async with (
            self._llama.events("/completion", body, context) as events,
            aclosing(self.answered(events, answer, context)) as chunks,
        ):
            async for chunk in chunks:
                yield chunk

    async def _body(self, asked: GenerationRequest, limits: GenerationLimits) -> dict[str, Any]:
        grammar = None
        if asked.constraint is not None:
            in_thoughts = is_thinking(asked.prompt, self._markers)
            grammar = await asyncio.to_thread(grammar_of, asked.constraint, is_thinking=in_thoughts)
        return completion_body(asked, grammar, limits.context_length, uses_cache=self._scope.admits(asked.cache_salt))

    async def embed(self, request: EmbedRequest, context: Context) -> AsyncGenerator[Embedding, None]:
        limits = self._limits
        if limits is None:
            raise self.not_running()
        self.check_task(embeds=True)
        task_among(request, (EMBED,))
        if request.get("dimensions") is not None:
            raise InvalidArgument("dimensions: llama.cpp makes vectors of one length only")
        inputs = inputs_within(request, limits.context_length, limits.vocab_size)
        norm = NO_NORM if request.get("normalize") is False else EUCLIDEAN
        for begin in range(0, len(inputs), INPUTS_AT_ONCE):
            body = {"content": inputs[begin : begin + INPUTS_AT_ONCE], "embd_normalize": norm}
            async with self._llama.events("/embedding", body, context) as events:
                async for found in events:
                    for one in found:
                        yield embedding(begin + one["index"], one["embedding"][0])

    def map_error(self, error: Exception) -> Exception | None:
        return map_llama_error(error)

    async def wait_dead(self) -> str:
        return await self._llama.wait_ended()

    async def cleanup(self) -> None:
        await self._llama.close()
