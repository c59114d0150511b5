"""SGLang's `Engine` behind the contract; the model runs in processes that SGLang starts.

request -> `read_generation` -> Engine.async_generate -> `SglangAnswer` -> chunks
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Final

from dynamo.contract.chunks import CompletionUsage, usage
from dynamo.contract.embedding import Embedding, EmbedRequest, embedding
from dynamo.contract.engine import EngineConfig, GenerateChunk, GenerateRequest
from dynamo.contract.kv_events import KvEventSource
from dynamo.contract.requests.generation import (
    Feature,
    GenerationLimits,
    GenerationRequest,
    OutputConstraint,
    read_generation,
    read_generation_defaults,
)
from dynamo.contract.requests.logprobs import extract_from_sglang_meta
from dynamo.contract.requests.output_grammar import grammar_of
from dynamo.contract.requests.structural_tag import serialize_structural_tag
from dynamo.contract.requests.vectors import EMBED, inputs_within, task_among
from dynamo.engines.adapter import AdapterEngine
from dynamo.errors import EngineShutdown, HttpError, InvalidArgument
from dynamo.runtime.base.process_guard import (
    descendants,
    end_processes,
    note_shared_memory,
    private_directory,
    shared_memory_of,
    temporary_files_in,
)
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.context import Context
from dynamo.sglang.arguments import MARK, SglangArguments, events_source, read_arguments, server_arguments
from dynamo.sglang.engine_thread import EngineThread, kept_logging
from dynamo.sglang.operations import SglangOperations

# From the contract's request to SGLang's sampling parameters, and from its outputs to chunks: plain values.

MAX_SEED: Final = 2**31  # SGLang keeps seeds as 32-bit integers


def sampling_parameters(asked: GenerationRequest) -> dict[str, Any]:
    """Return SGLang's `sampling_params`. Every option is set: its default of `max_new_tokens` is 128."""
    found: dict[str, Any] = {
        "max_new_tokens": asked.max_tokens,
        "min_new_tokens": asked.min_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k or -1,
        "min_p": asked.min_p,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repetition_penalty": asked.repetition_penalty,
        "ignore_eos": asked.ignore_eos,
        "stop_token_ids": list(asked.stop_token_ids),
        "skip_special_tokens": False,
    }
    if asked.seed is not None:
        found["sampling_seed"] = asked.seed % MAX_SEED
    if asked.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in asked.logit_bias.items()}
    if asked.constraint is not None:
        found |= _constraint(asked.constraint)
    return found


def _constraint(constraint: OutputConstraint) -> dict[str, Any]:
    value = constraint.value
    match constraint.kind:
        case "json":
            return {"json_schema": json.dumps(value)}
        case "choice":
            return {"regex": "|".join(re.escape(text) for text in value)}
        case "grammar":
            return {"ebnf": value}
        case "structural_tag":
            return {"structural_tag": serialize_structural_tag(value)}
    return {"regex": value}


def logprob_arguments(asked: GenerationRequest) -> dict[str, Any]:
    """Return the arguments of `async_generate` that request log probabilities; {} for none."""
    if asked.logprobs is None:
        return {}
    return {"return_logprob": True, "top_logprobs_num": asked.logprobs}


class SglangAnswer:
    """One request's outputs, as they come: each holds new tokens only."""

    __slots__ = ("_asked", "_cached", "_tokens", "is_complete")

    def __init__(self, asked: GenerationRequest) -> None:
        self._asked = asked
        self._tokens = 0
        self._cached: int | None = None
        self.is_complete = False

    def chunk(self, output: Mapping[str, Any]) -> GenerateChunk | None:
        """Return what one output adds; None for nothing. After the last chunk `is_complete` is true.

        Raises InvalidArgument or HttpError for a request that SGLang refused: it does so with a finish reason, whose tokens
        mean nothing. Raises EngineShutdown for one that it gave up.
        """
        meta = output["meta_info"]
        reason = meta.get("finish_reason")
        check_not_aborted(reason)
        ids = [int(token) for token in output.get("output_ids") or ()]
        self._tokens += len(ids)
        self._cached = meta.get("cached_tokens", self._cached)
        chunk: GenerateChunk = {"token_ids": ids, "index": 0}
        if self._asked.logprobs is not None and ids:
            chosen, alternatives = extract_from_sglang_meta(meta)
            if chosen is not None and len(chosen) == len(ids):
                chunk["log_probs"] = chosen
                if self._asked.logprobs and alternatives is not None:
                    chunk["top_logprobs"] = alternatives
        if reason is None:
            return chunk if ids else None
        self.is_complete = True
        chunk["finish_reason"] = "length" if reason["type"] == "length" else "stop"
        chunk["completion_usage"] = self.usage()
        return chunk

    def cancelled(self) -> GenerateChunk:
        """Return the last chunk of a request that was cancelled."""
        return {"token_ids": [], "index": 0, "finish_reason": "cancelled", "completion_usage": self.usage()}

    def usage(self) -> CompletionUsage:
        return usage(len(self._asked.prompt), self._tokens, cached_tokens=self._cached)


class SglangObjects(SglangAnswer):
    """The same for the route of a frontend whose clients read SGLang's own objects."""

    __slots__ = ("_rid",)

    def __init__(self, asked: GenerationRequest, rid: object) -> None:
        """`rid`: the client's name of the request."""
        super().__init__(asked)
        self._rid = rid

    def chunk(self, output: Mapping[str, Any]) -> GenerateChunk | None:
        found = super().chunk(output)
        if found is None:
            return None
        shown = {**output, "meta_info": {**output["meta_info"], "id": self._rid}}
        relayed: GenerateChunk = {"token_ids": [], "index": 0, "engine_data": {"sglang_response": shown}}
        if self.is_complete:
            relayed["finish_reason"] = found["finish_reason"]
            relayed["completion_usage"] = found["completion_usage"]
        return relayed


def answer_of(request: GenerateRequest, asked: GenerationRequest) -> SglangAnswer:
    """Return what turns the outputs for a request into chunks."""
    extra = request.get("extra_args")
    envelope = extra.get("sglang_tito") if isinstance(extra, Mapping) else None
    return SglangObjects(asked, envelope.get("rid")) if isinstance(envelope, Mapping) else SglangAnswer(asked)


def check_not_aborted(reason: Mapping[str, Any] | None) -> None:
    """Raise InvalidArgument or HttpError for a finish reason with which SGLang refused a request, EngineShutdown for one with
    which it gave it up."""
    if reason is not None and reason["type"] == "abort":
        raise _refusal(reason)


def _refusal(reason: Mapping[str, Any]) -> Exception:
    message, status = str(reason.get("message") or "SGLang ended the request by itself"), reason.get("status_code")
    if status is None:
        return EngineShutdown(message)
    return InvalidArgument(message) if int(status) in (400, 422) else HttpError(int(status), message)


# Vectors instead of tokens: the inputs of a request to SGLang's tokenizer manager, each a request of its own there.


def inputs_of(request: EmbedRequest, context_length: int, vocab_size: int) -> list[list[int]]:
    """Return the inputs of a request. Raises InvalidArgument naming the field for what SGLang does not do."""
    task_among(request, (EMBED,))
    if request.get("normalize") is False:
        raise InvalidArgument("normalize: SGLang makes vectors of the length 1 only")
    if (request.get("routing") or {}).get("lora_name"):
        raise InvalidArgument("routing.lora_name: adapters are not built for SGLang")
    return inputs_within(request, context_length, vocab_size)


async def vector_of(
    thread: EngineThread, context: Context, ids: list[int], dimensions: int | None, rid: str
) -> list[float] | None:
    """Return the vector of one input; None when the context was stopped first. `rid`: its name at SGLang.

    Raises InvalidArgument where SGLang refuses it, EngineShutdown where it gives it up.
    """

    async def submit(engine: Any) -> AsyncIterator[Any]:
        from sglang.srt.managers.io_struct import EmbeddingReqInput

        asked = EmbeddingReqInput(input_ids=ids, rid=rid, dimensions=dimensions)
        outputs: AsyncIterator[Any] = engine.tokenizer_manager.generate_request(asked, None)
        return outputs

    is_answered = False
    try:
        async with aclosing(thread.outputs(context, submit)) as outputs:
            async for output in outputs:
                is_answered = True
                if context.is_stopped():
                    return None
                check_not_aborted(output["meta_info"].get("finish_reason"))
                vector: list[float] = output["embedding"]
                return vector
    except ValueError as error:  # SGLang's checks of a request
        raise InvalidArgument(f"dimensions: {error}" if dimensions is not None else str(error)) from error
    finally:
        if not is_answered and thread.engine is not None:
            thread.call(thread.engine.tokenizer_manager.abort_request, rid)
    if not context.is_stopped():
        raise EngineShutdown("SGLang ended an input without its vector")
    return None


logger = logging.getLogger(__name__)

UNSUPPORTED: Final[frozenset[Feature]] = frozenset({"prompt_logprobs", "allowed_token_ids", "lora"})
HEALTH_SECONDS: Final = 0.5  # how often SGLang's processes are checked
END_SECONDS: Final = 2.0  # for SGLang to end its processes; what is left is killed


class SglangEngine(AdapterEngine[SglangArguments]):
    """Serves a model with SGLang."""

    engine_name: ClassVar[str] = "SGLang"
    reader = staticmethod(read_arguments)
    has_child_processes: ClassVar[bool] = True
    skips_teardown: ClassVar[bool] = True

    def __init__(self, arguments: SglangArguments) -> None:
        super().__init__(arguments)
        self._thread = EngineThread()
        self._limits: GenerationLimits | None = None
        self._directory: Path | None = None  # of temporary files; SGLang itself leaves them
        self._children: dict[int, str] = {}
        self._numbers = count()
        self._tells_thoughts = False  # SGLang has a reasoning parser of its own

    async def start(self, worker_id: int) -> EngineConfig:
        logger.warning("SGLang is marked: %s", MARK)
        if threading.current_thread() is threading.main_thread():
            # SGLang's processes send it to their parent when they fail; `wait_dead` finds what happened.
            with suppress(NotImplementedError, RuntimeError):
                asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, lambda: None)
        try:
            await self._thread.start(self._make)
        except (InvalidArgument, EngineShutdown):
            raise
        except Exception as error:
            raise EngineShutdown(f"SGLang did not start: {error} (its own log, above, says more)") from error
        await self.check_wanted()
        self._children = await asyncio.to_thread(descendants, os.getpid())
        if self._directory is not None:
            await asyncio.to_thread(note_shared_memory, self._directory, [os.getpid(), *self._children])
        manager = self._thread.engine.tokenizer_manager
        facts = self._thread.engine._scheduler_init_result.scheduler_infos[0]
        settings = self._thread.engine.server_args
        directory = await asyncio.to_thread(Path(self._arguments.model).expanduser)
        self._limits = GenerationLimits(
            engine="SGLang",
            context_length=int(manager.model_config.context_len),
            vocab_size=int(manager.model_config.vocab_size),
            unsupported=UNSUPPORTED,
            defaults=read_generation_defaults(directory) if directory.is_dir() else {},
        )
        self._tells_thoughts = bool(settings.reasoning_parser)
        self._controlled = SglangOperations(self._thread, self._arguments.model).table
        tokens = facts.get("max_total_num_tokens")
        return self.described(
            self._limits.context_length,
            declared={} if self._arguments.embeds else {"sglang_generate": True},  # its route of tokens
            kv_cache_block_size=settings.page_size,
            total_kv_blocks=None if tokens is None else int(tokens) // (settings.page_size or 1),
            max_num_seqs=settings.max_running_requests,
            max_num_batched_tokens=settings.max_prefill_tokens,
        )

    def _make(self) -> Any:
        from sglang.srt.entrypoints.engine import Engine

        self._directory = private_directory("sglang")
        with kept_logging(), temporary_files_in(self._directory):
            return Engine(server_args=server_arguments(self._arguments, self._directory))

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        limits, thread = self._limits, self._thread
        if limits is None or thread.engine is None:
            raise self.not_running()
        self.check_task(embeds=False)
        self.check_serving()
        asked = read_generation(request, limits)
        if asked.constraint is not None and asked.constraint.kind in ("json", "regex"):
            await asyncio.to_thread(
                grammar_of, replace(asked.constraint, after_reasoning=False)
            )  # a mistake is named before SGLang's processes see it
        answer = answer_of(request, asked)
        if context.is_stopped():
            yield answer.cancelled()
            return
        rid = f"{context.id()}-{next(self._numbers)}"
        abort = thread.engine.tokenizer_manager.abort_request
        arguments: dict[str, Any] = {
            "input_ids": asked.prompt,
            "sampling_params": sampling_parameters(asked),
            "rid": rid,
        }
        if asked.constraint is not None and asked.constraint.after_reasoning and self._tells_thoughts:
            arguments["require_reasoning"] = True  # the constraint holds behind the thoughts
        if asked.cache_salt is not None:
            arguments["cache_salt"] = asked.cache_salt
        arguments |= logprob_arguments(asked)
        try:
            async with (
                aclosing(
                    thread.outputs(context, lambda engine: engine.async_generate(stream=True, **arguments))
                ) as outputs,
                aclosing(self.answered(outputs, answer, context)) as chunks,
            ):
                async for chunk in chunks:
                    yield chunk
        except ValueError as error:
            raise InvalidArgument(str(error)) from error  # SGLang's checks of a request
        finally:
            if not answer.is_complete:
                thread.call(abort, rid)

    async def embed(self, request: EmbedRequest, context: Context) -> AsyncGenerator[Embedding, None]:
        limits, thread = self._limits, self._thread
        if limits is None or thread.engine is None:
            raise self.not_running()
        self.check_task(embeds=True)
        self.check_serving()
        inputs = inputs_of(request, limits.context_length, limits.vocab_size)
        if context.is_stopped():
            return
        async with Background() as work:
            running = [
                work.start(
                    vector_of(thread, context, ids, request.get("dimensions"), f"{context.id()}-{next(self._numbers)}"),
                    f"input {index}",
                    is_awaited=True,
                )
                for index, ids in enumerate(inputs)
            ]
            for index, each in enumerate(running):
                vector = await each
                if vector is None:
                    return
                yield embedding(index, vector)

    async def wait_dead(self) -> str:
        while True:
            if self._children and not self._was_cleaned_up:
                left = await asyncio.to_thread(descendants, os.getpid())
                if any(left.get(number) != mark for number, mark in self._children.items()):
                    return "a process of SGLang has ended"
            await asyncio.sleep(HEALTH_SECONDS)

    async def cleanup(self) -> None:
        self._was_cleaned_up = True
        mine = await asyncio.to_thread(descendants, os.getpid()) if self._thread.engine is not None else {}
        shared = await asyncio.to_thread(shared_memory_of, mine)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._thread.close()
        await asyncio.to_thread(end_processes, mine, shared)
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def kv_event_sources(self) -> list[KvEventSource]:
        engine = self._thread.engine
        if engine is None or engine.server_args.dp_size > 1:
            return []
        source = events_source(engine.server_args.kv_events_config)
        return [] if source is None else [source]
