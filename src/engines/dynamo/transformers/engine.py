"""transformers' continuous batching behind the contract, in the worker's process; it generates in a thread of its own.

request -> `read_generation` -> manager.add_request -> results, handed over to the event loop -> chunks
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import Empty
from typing import Any, ClassVar, Final

from dynamo.contract.embedding import Embedding, EmbedRequest
from dynamo.contract.engine import EngineConfig, GenerateChunk, GenerateRequest, usage
from dynamo.contract.requests.generation import (
    Feature,
    GenerationLimits,
    GenerationRequest,
    read_generation,
    read_generation_defaults,
)
from dynamo.contract.requests.output_grammar import grammar_of, read_thought_markers
from dynamo.contract.requests.pooling import read_pooling
from dynamo.engines.adapter import AdapterEngine
from dynamo.engines.cache_scope import CacheScope
from dynamo.errors import EngineShutdown, InvalidArgument, Unknown
from dynamo.runtime.calls.context import Context, on_loop
from dynamo.transformers.arguments import TransformersArguments, read_arguments
from dynamo.transformers.loading import LoadedTransformers, load_encoder, load_transformers
from dynamo.transformers.operations import TransformersOperations, embedding_operations
from dynamo.transformers.row_sampling import ARGUMENT, RowSampling
from dynamo.transformers.vectors import TransformersVectors
from dynamo.worker.hub import fetch_model

logger = logging.getLogger(__name__)

UNSUPPORTED: Final[frozenset[Feature]] = frozenset({"prompt_logprobs", "lora"})
HEALTH_SECONDS: Final = 0.25  # how often the generating thread is checked
STOP_SECONDS: Final = 2.0  # for the generating thread to finish its step


class TransformersEngine(AdapterEngine[TransformersArguments]):
    """Serves a Hugging Face model with transformers."""

    engine_name: ClassVar[str] = "transformers"
    reader = staticmethod(read_arguments)
    skips_teardown: ClassVar[bool] = True

    def __init__(self, arguments: TransformersArguments) -> None:
        super().__init__(arguments)
        self._loaded: LoadedTransformers | None = None
        self._limits: GenerationLimits | None = None
        self._grammars: _Grammars | None = None
        self._vectors: TransformersVectors | None = None  # of a worker that makes vectors
        self._numbers = count()
        self._scope = CacheScope(self.engine_name)
        self._operations: TransformersOperations | None = None  # of a worker that generates

    async def start(self, worker_id: int) -> EngineConfig:
        directory = Path(await fetch_model(self._arguments.model))
        if self._arguments.embeds:
            return await self._start_vectors(directory)
        loaded = await asyncio.to_thread(load_transformers, self._arguments, directory)
        self._loaded = loaded
        await self.check_wanted()
        self._grammars = _Grammars(directory, loaded)
        self._operations = TransformersOperations(loaded.manager, str(directory))
        self._controlled = self._operations.table
        self._limits = GenerationLimits(
            engine="transformers",
            context_length=loaded.context_length,
            vocab_size=loaded.vocab_size,
            unsupported=UNSUPPORTED,
            defaults=read_generation_defaults(directory),
        )
        return self.described(
            loaded.context_length,
            kv_cache_block_size=loaded.block_size,
            total_kv_blocks=loaded.blocks,
            max_num_seqs=self._arguments.max_num_seqs,
            max_num_batched_tokens=self._arguments.max_num_batched_tokens,
        )

    async def _start_vectors(self, directory: Path) -> EngineConfig:
        arguments = self._arguments
        loaded = await asyncio.to_thread(load_encoder, arguments, directory)
        mode = "last" if loaded.generates else "mean"
        pooling = read_pooling(directory, loaded.hidden_size, mode=arguments.pooling, default_mode=mode)
        self._vectors = TransformersVectors(
            loaded, pooling, max_inputs=arguments.max_num_seqs, max_tokens=arguments.max_num_batched_tokens
        )
        await self.check_wanted()
        self._controlled = embedding_operations()
        return self.described(loaded.context_length)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        self.check_task(embeds=False)
        loaded, limits, grammars = self._loaded, self._limits, self._grammars
        if loaded is None or limits is None or grammars is None or self._was_cleaned_up:
            raise self.not_running()
        self.check_serving()
        asked = read_generation(request, limits)
        if asked.cache_salt is not None and not self._scope.admits(asked.cache_salt):
            loaded.manager.batch_processor.cache.use_prefix_sharing = False  # it is read before each prompt
        matcher = None if asked.constraint is None else await asyncio.to_thread(grammars.matcher, asked)
        stops = asked.stop_token_ids
        ends = stops if matcher is None or stops else loaded.eos_token_ids  # a grammar that is complete ends the answer
        sampling = RowSampling(asked, ends, matcher, grammars.markers if _is_after_thoughts(asked) else None)
        sent = 0
        async for result in self._results(loaded.manager, asked, sampling, ends, context):
            if sampling.failure is not None:
                raise sampling.failure
            if result.error is not None:
                raise EngineShutdown(f"transformers gave the request up: {result.error}")
            tokens = [int(token) for token in result.generated_tokens[sent:]]
            chunk: GenerateChunk = {"token_ids": tokens, "index": 0}
            if asked.logprobs is not None:
                _add_logprobs(chunk, sampling, sent, asked.logprobs)
            sent += len(tokens)
            if result.is_finished():
                chunk["finish_reason"] = "stop" if tokens and tokens[-1] in ends else "length"
                chunk["completion_usage"] = usage(len(asked.prompt), sent)
                yield chunk
                return
            if tokens:
                yield chunk
        last = usage(len(asked.prompt), sent)
        yield {"token_ids": [], "index": 0, "finish_reason": "cancelled", "completion_usage": last}

    async def _results(
        self, manager: Any, asked: GenerationRequest, sampling: RowSampling, ends: tuple[int, ...], context: Context
    ) -> AsyncGenerator[Any, None]:
        """Yield the results of one request as they come; ends early once the context is stopped. Raises EngineShutdown."""
        if context.is_stopped():
            return
        results: asyncio.Queue[Any] = asyncio.Queue()  # at most one entry per token of the answer
        request_id = f"{context.id()}-{next(self._numbers)}"
        _drop_stray(manager)
        manager.register_result_handler(request_id, results.put_nowait)
        forget = context.on_cancel(on_loop(asyncio.get_running_loop(), lambda _killed: results.put_nowait(None)))
        is_finished = False
        try:
            accepted = manager.add_request(
                asked.prompt,
                request_id=request_id,
                max_new_tokens=asked.max_tokens,
                streaming=True,
                eos_token_id=list(ends),
                **{ARGUMENT: sampling},
            )
            if accepted is None:
                raise EngineShutdown("transformers does not take requests any more")
            while not is_finished:
                result = await results.get()
                if result is None or context.is_stopped():
                    return
                is_finished = result.is_finished()
                yield result
        finally:
            forget()
            if not is_finished:
                manager.cancel_request(request_id)
                manager.output_router.result_handlers.pop(request_id, None)

    async def embed(self, request: EmbedRequest, context: Context) -> AsyncGenerator[Embedding, None]:
        self.check_task(embeds=True)
        if self._vectors is None:
            raise self.not_running()
        async with aclosing(self._vectors.vectors(request, context)) as vectors:
            async for vector in vectors:
                yield vector

    async def wait_dead(self) -> str:
        while True:
            loaded = self._loaded
            if loaded is not None and not self._was_cleaned_up and not loaded.manager.is_running():
                return f"the thread that generates has ended: {loaded.manager.background_thread_status.fatal_error}"
            await asyncio.sleep(HEALTH_SECONDS)

    async def cleanup(self) -> None:
        self._was_cleaned_up = True
        if self._vectors is not None:
            await self._vectors.close()
        if self._operations is not None:
            await self._operations.close()
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            await asyncio.to_thread(loaded.manager.stop, block=True, timeout=STOP_SECONDS, hard_stop=True)


class _Grammars:
    """Compiles constraints for one model's vocabulary. Safe from several threads."""

    def __init__(self, directory: Path, loaded: LoadedTransformers) -> None:
        self._directory, self._loaded = directory, loaded
        self._tokenizer: Any = None
        self.markers: tuple[int, int] | None = None  # around the model's thoughts; read with the first constraint

    def matcher(self, asked: GenerationRequest) -> Any:
        """Return llguidance's matcher at the start of a request's constraint. Raises InvalidArgument naming the member."""
        assert asked.constraint is not None
        if self._tokenizer is None:
            self.markers = read_thought_markers(self._directory)
        # Thoughts are marked by their tokens, which a grammar cannot name: the sampler leaves them out.
        grammar = grammar_of(replace(asked.constraint, after_reasoning=False))
        import llguidance  # `grammar_of` has reported where it is missing

        if self._tokenizer is None:
            text = (self._directory / "tokenizer.json").read_text(encoding="utf-8")
            try:
                self._tokenizer = llguidance.LLTokenizer(
                    text, n_vocab=self._loaded.vocab_size, eos_token=list(self._loaded.eos_token_ids) or None
                )
            except ValueError as error:
                raise InvalidArgument(f"guided_decoding: the model's tokenizer.json cannot be used: {error}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidArgument(f"guided_decoding.{asked.constraint.kind} cannot be compiled: {matcher.get_error()}")
        return matcher


def _is_after_thoughts(asked: GenerationRequest) -> bool:
    return asked.constraint is not None and asked.constraint.after_reasoning


def _add_logprobs(chunk: GenerateChunk, sampling: RowSampling, sent: int, wanted: int) -> None:
    """Add the log probabilities of a chunk's tokens. Raises Unknown where the sampler has drawn other tokens."""
    tokens = chunk["token_ids"]
    found = sampling.logprobs[sent : sent + len(tokens)]
    if len(found) < len(tokens):
        raise Unknown("transformers reported a token that was not drawn")
    chunk["log_probs"] = [own for own, _ in found]
    if wanted:
        chunk["top_logprobs"] = [
            [{"rank": rank, "token_id": token, "logprob": value} for rank, (token, value) in enumerate(best, 1)]
            for _, best in found
        ]


def _drop_stray(manager: Any) -> None:
    """Drop results that came after their request was cancelled: transformers keeps them for a later read."""
    stray = manager.output_router.output_queue
    while True:
        try:
            stray.get_nowait()
        except Empty:
            return
