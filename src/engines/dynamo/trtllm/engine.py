"""TensorRT-LLM's `LLM` behind the contract; ranks on several GPUs are processes that it starts.

request -> `read_generation` -> LLM.generate_async -> `TrtllmAnswer` -> chunks
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from dynamo.contract.chunks import CompletionUsage, GenerateChunk, usage
from dynamo.contract.engine import EngineConfig, GenerateRequest
from dynamo.contract.requests.generation import (
    Feature,
    GenerationLimits,
    GenerationRequest,
    OutputConstraint,
    read_generation,
    read_generation_defaults,
)
from dynamo.contract.requests.logprobs import extract_from_completion_output
from dynamo.contract.requests.output_grammar import grammar_of
from dynamo.contract.requests.structural_tag import serialize_structural_tag
from dynamo.engines.adapter import AdapterEngine
from dynamo.engines.operations import Body, EngineOperations, Operation
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.runtime.calls.context import Context, on_loop
from dynamo.trtllm.arguments import MARK, TrtllmArguments, read_arguments
from dynamo.worker.hub import fetch_model

# From the contract's request to TensorRT-LLM's `SamplingParams`, and from its outputs to chunks: plain values.

NO_END = -1  # as TensorRT-LLM writes "no end token"


def sampling_parameters(asked: GenerationRequest) -> dict[str, Any]:
    """Return keyword arguments of `SamplingParams`, without the constraint."""
    is_greedy = asked.temperature == 0
    ends = asked.stop_token_ids
    found: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "min_tokens": asked.min_tokens or None,
        "temperature": 1.0 if is_greedy else asked.temperature,
        "top_k": 1 if is_greedy else asked.top_k,  # 0 is off there
        "top_p": asked.top_p,
        "min_p": asked.min_p or None,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repetition_penalty": asked.repetition_penalty,
        "seed": asked.seed,
        "ignore_eos": asked.ignore_eos,
        "end_id": ends[0] if ends else NO_END,
        "pad_id": 0,
        "stop_token_ids": list(ends[1:]) or None,
        "logprobs": None if asked.logprobs is None else max(asked.logprobs, 1),
        "detokenize": False,
    }
    return {name: value for name, value in found.items() if value is not None}


def guided_parameters(constraint: OutputConstraint) -> dict[str, Any]:
    """Return keyword arguments of `GuidedDecodingParams`, which has no choice: a regex of the texts stands for it."""
    value = constraint.value
    match constraint.kind:
        case "json":
            return {"json": json.dumps(value)}
        case "choice":
            return {"regex": "|".join(re.escape(text) for text in value)}
        case "structural_tag":
            return {"structural_tag": serialize_structural_tag(value)}
    return {constraint.kind: value}


class TrtllmAnswer:
    """One request's outputs. They are cumulative: each holds every token so far."""

    __slots__ = ("_asked", "_cached", "_seen", "is_complete")

    def __init__(self, asked: GenerationRequest) -> None:
        self._asked = asked
        self._seen = 0
        self._cached: int | None = None
        self.is_complete = False

    def chunk(self, result: Any) -> GenerateChunk | None:
        """Return what one result adds; None for nothing. Raises EngineShutdown for a request that was given up."""
        output = result.outputs[0]
        self._cached = getattr(result, "cached_tokens", self._cached)
        ids = list(output.token_ids[self._seen :])
        chunk: GenerateChunk = {"token_ids": ids, "index": 0}
        if self._asked.logprobs is not None and ids:
            chosen, alternatives = extract_from_completion_output(output, self._seen)
            if chosen is not None:
                chunk["log_probs"] = chosen
            if alternatives is not None and self._asked.logprobs:
                chunk["top_logprobs"] = alternatives
        self._seen += len(ids)
        reason = output.finish_reason
        if reason is None:
            return chunk if ids else None
        if reason not in ("stop", "length"):
            raise EngineShutdown(f"TensorRT-LLM ended the request by itself ({reason})")
        self.is_complete = True
        chunk["finish_reason"] = reason
        chunk["completion_usage"] = self.usage()
        return chunk

    def cancelled(self) -> GenerateChunk:
        """Return the last chunk of a request that was cancelled."""
        return {"token_ids": [], "index": 0, "finish_reason": "cancelled", "completion_usage": self.usage()}

    def usage(self) -> CompletionUsage:
        return usage(len(self._asked.prompt), self._seen, cached_tokens=self._cached)


# What an operator may do: take the memory and give it back, where the release can.

NAME: Final = "TensorRT-LLM"
SLEEP_CONFIG: Final = "sleep_config"  # the argument of `LLM` without which it gives nothing back

_DRAIN: Final = "the LLM class of TensorRT-LLM halts no requests; POST /engine/drain takes the worker out"
_NO_MEMORY: Final = (
    "TensorRT-LLM gives memory back from 1.4 on, started with a sleep_config (--extra-engine-args or "
    "--override-engine-args)"
)
_OTHER_NAMES: Final = "the names are release_memory_occupation and resume_memory_occupation for TensorRT-LLM"
_NO_UPDATE: Final = (
    "the LLM class of TensorRT-LLM reads weights when it starts; start a new worker, then drain this one"
)
_NO_LORA: Final = "adapters are not built for TensorRT-LLM; vLLM and the reference engine have them"
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("pause_generation", "resume_generation"), _DRAIN),
    **dict.fromkeys(("sleep", "wake_up"), _OTHER_NAMES),
    "clear_kv_blocks": "KV cache clear not supported on this worker: the LLM class of TensorRT-LLM has no such call",
    **dict.fromkeys(
        ("start_profile", "stop_profile"), "TensorRT-LLM chooses the steps it profiles by TLLM_PROFILE_START_STOP"
    ),
    **dict.fromkeys(
        ("scale_elastic_ep", "is_scaling_elastic_ep", "ep_capacity"),
        "TensorRT-LLM has the ranks it was started with; start another worker",
    ),
    **dict.fromkeys(
        (
            "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed",
            "update_weights_from_ipc", "update_weight_version", "init_weights_update_group",
            "destroy_weights_update_group",
        ),
        _NO_UPDATE,
    ),
    **dict.fromkeys(("load_lora", "unload_lora", "list_loras"), _NO_LORA),
}  # fmt: skip


class TrtllmOperations:
    """The controls of one engine. On the event loop only."""

    def __init__(self, llm: Any, *, has_sleep_config: bool, running: Callable[[], int]) -> None:
        """`llm`: TensorRT-LLM's `LLM`. `running`: returns how many requests it serves."""
        self._llm, self._running = llm, running
        memory = {
            "release_memory_occupation": Operation(self._release),
            "resume_memory_occupation": Operation(self._resume),
        }
        can = has_sleep_config and hasattr(llm, "release") and hasattr(llm, "resume")
        refused = dict(REFUSED) if can else {**REFUSED, **dict.fromkeys(memory, _NO_MEMORY)}
        self.table = EngineOperations(NAME, memory if can else {}, {}, refused)

    async def _release(self, _body: Mapping[str, Any]) -> Body:
        if not self.table.halted_until:
            self.table.halted_until = "resume_memory_occupation"  # first: what arrives from here on goes elsewhere
            try:
                if running := self._running():
                    raise InvalidArgument(
                        f"{running} requests are running; drain the worker first (POST /engine/drain)"
                    )
                await asyncio.to_thread(self._llm.release)
            except BaseException:
                self.table.halted_until = ""
                raise
        return {"message": "memory released", "is_sleeping": True}

    async def _resume(self, _body: Mapping[str, Any]) -> Body:
        if self.table.halted_until:
            await asyncio.to_thread(self._llm.resume)
            self.table.halted_until = ""
        return {"message": "memory resumed"}


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
        self._running = 0  # requests

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
        self._controlled = TrtllmOperations(
            self._llm, has_sleep_config=SLEEP_CONFIG in given.engine, running=lambda: self._running
        ).table
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
        self.check_serving()
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
        self._running += 1
        forget = context.on_cancel(on_loop(asyncio.get_running_loop(), lambda _killed: results.abort()))
        try:
            # An abort is a result of its own, which is not one of the answer: `answered` stops before it.
            async with aclosing(self.answered(results, answer, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._running -= 1
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
