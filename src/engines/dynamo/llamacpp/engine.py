"""llama.cpp as an engine of tokens, where the frontend has the tokenizer, and as one of text.

request -> `read_generation` -> `completion_body` -> llama.cpp's process -> `LlamaAnswer` -> chunks
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar, Final, Self

from dynamo.contract.chunks import CompletionUsage, GenerateChunk, TopLogprob, usage
from dynamo.contract.config import WorkerConfig
from dynamo.contract.embedding import Embedding, EmbedRequest, embedding
from dynamo.contract.engine import EngineConfig, GenerateRequest, RawEngine, RawRequest, RawResponseChunk
from dynamo.contract.health_check import build_raw_health_check_payload
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
from dynamo.engines.operations import Body, EngineOperations, Operation
from dynamo.errors import InvalidArgument
from dynamo.llamacpp.arguments import LlamaArguments, read_arguments
from dynamo.llamacpp.scores import GENERATION, HeldScores, divided, walk_chat
from dynamo.llamacpp.slots import LlamaConnection, LlamaProcess, LlamaSlots, map_llama_error, walk_events
from dynamo.protocol.model_types import ModelInput
from dynamo.runtime.calls.context import Context

# From the contract's request to llama.cpp's, and from its events to chunks.

# Of the last event: the rest of it repeats the request and the whole prompt.
LAST_FIELDS: Final = (
    "tokens", "tokens_predicted", "stop", "stop_type", "truncated", "timings/cache_n", "completion_probabilities",
)  # fmt: skip


def completion_body(
    asked: GenerationRequest, grammar: str | None, context_length: int, *, uses_cache: bool = True
) -> dict[str, Any]:
    """Return the body of llama.cpp's `/completion`. Every option is set: its own defaults differ from the field's."""
    body: dict[str, Any] = {
        "prompt": asked.prompt,
        "n_predict": asked.max_tokens,
        "stream": True,
        "return_tokens": True,
        "response_fields": list(LAST_FIELDS),
        "cache_prompt": uses_cache,
        "ignore_eos": asked.ignore_eos,
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "min_p": asked.min_p,
        "typical_p": 1.0,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repeat_penalty": asked.repetition_penalty,
        "repeat_last_n": context_length,  # penalties cover the whole of it
        "dry_multiplier": 0.0,
        "n_probs": 0 if asked.logprobs is None else max(asked.logprobs, 1),  # 0 is off
    }
    if asked.seed is not None:
        body["seed"] = asked.seed % 2**32
    if asked.logit_bias:
        body["logit_bias"] = [[token, bias] for token, bias in asked.logit_bias.items()]
    if grammar is not None:
        body["grammar"] = grammar
    return body


async def walk_tokens(
    connection: LlamaConnection, process: LlamaProcess, body: dict[str, Any]
) -> AsyncGenerator[Any, None]:
    """Yield the events of a generation so that their tokens make up its whole text.

    llama.cpp sends no event for a token with which the text ends within a character. Once the character is complete its text
    comes as a whole, but of its tokens only the last one. The others are those into which llama.cpp itself divides that text.
    A model that wrote the character in other tokens keeps the text, and not the division. The tokens of an answer that its
    limit ends within a character are computed once more; where they are drawn at random, they are drawn anew.
    llama.cpp drops the log probabilities of all these tokens, so they are computed by requests of their own.
    """
    scores = HeldScores(process, body)
    sent: list[int] = []
    seen = 0
    while (event := await connection.next()) is not None:
        predicted = event.get("tokens_predicted", seen)
        if predicted - seen > 1 and event.get("content"):
            *held, last = await divided(process, event["content"])
            event["tokens"] = [last]
            yield {"tokens": held, "completion_probabilities": await scores.of(sent, held)}
            sent += held
        elif predicted > seen and event.get("stop_type") == "limit":
            again = {"n_predict": predicted - seen, "stream": False, "n_probs": 0, "grammar": ""}
            again["prompt"] = [*body["prompt"], *sent]
            event["tokens"] = (await process.call("POST", GENERATION, {**body, **again}))["tokens"]
            event["completion_probabilities"] = await scores.of(sent, event["tokens"])
        sent += event.get("tokens") or ()
        seen = predicted
        yield event


class LlamaAnswer:
    """One request's events, as they come."""

    __slots__ = ("_asked", "_cached", "_is_stopped", "_stops", "_tokens", "is_complete")

    def __init__(self, asked: GenerationRequest) -> None:
        self._asked = asked
        self._stops = frozenset(asked.stop_token_ids)
        self._tokens = 0
        self._is_stopped = False  # a stop token has come
        self._cached: int | None = None
        self.is_complete = False

    def chunk(self, event: Mapping[str, Any]) -> GenerateChunk | None:
        """Return what one event adds; None for nothing. After the last chunk `is_complete` is true.

        llama.cpp itself ends an answer at the end tokens of its file alone. At any other stop token the answer ends here,
        with the event behind that token, and the caller ends the request.
        """
        ids: list[int] = list(event.get("tokens") or ())
        probabilities: list[Any] = list(event.get("completion_probabilities") or ())
        is_last = self._is_stopped or bool(event.get("stop"))
        if self._is_stopped:
            ids = []
        elif (cut := next((place for place, token in enumerate(ids, 1) if token in self._stops), None)) is not None:
            ids, probabilities, self._is_stopped = ids[:cut], probabilities[:cut], True
        self._tokens += len(ids)
        chunk: GenerateChunk = {"token_ids": ids, "index": 0}
        if self._asked.logprobs is not None and len(probabilities) == len(ids) > 0:
            chunk["log_probs"] = [float(entry["logprob"]) for entry in probabilities]
            if self._asked.logprobs:
                chunk["top_logprobs"] = [_alternatives(entry, self._asked.logprobs) for entry in probabilities]
        if event.get("timings/cache_n") is not None:
            self._cached = int(event["timings/cache_n"])
        if not is_last:
            return chunk if ids else None
        self.is_complete = True
        chunk["finish_reason"] = "length" if not self._is_stopped and event.get("stop_type") == "limit" else "stop"
        chunk["completion_usage"] = self.usage()
        return chunk

    def cancelled(self) -> GenerateChunk:
        """Return the last chunk of a request that was cancelled."""
        return {"token_ids": [], "index": 0, "finish_reason": "cancelled", "completion_usage": self.usage()}

    def usage(self) -> CompletionUsage:
        return usage(len(self._asked.prompt), self._tokens, cached_tokens=self._cached)


def _alternatives(entry: Mapping[str, Any], count: int) -> list[TopLogprob]:
    return [
        # Without its text, which llama.cpp leaves empty where it is a part of a character: the frontend has the tokenizer.
        {"rank": rank, "token_id": int(other["id"]), "logprob": float(other["logprob"])}
        for rank, other in enumerate(entry.get("top_logprobs") or (), 1)
        if rank <= count
    ]


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
        keeps_prompts = self._arguments.parameters.get(HOST_CACHE) != 0
        self._controlled = LlamaOperations(self._llama, keeps_prompts=keeps_prompts).table
        config = self.described(loaded.context_length, max_num_seqs=loaded.slots)
        config.model_aliases = list(self._arguments.aliases)
        return config

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        if self._limits is None:
            raise self.not_running()
        self.check_task(embeds=False)
        self.check_serving()
        asked = read_generation(request, self._limits)
        answer = LlamaAnswer(asked)
        body = await self._body(asked, self._limits)
        async with (
            self._llama.events(GENERATION, body, context, walk_tokens) as events,
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
        self.check_serving()
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


# What an operator may do with a running llama.cpp: halt its process, and empty its slots.

NAME: Final = "llama.cpp"
HOST_CACHE: Final = "cache_ram_mib"  # llama.cpp's parameter: how much memory keeps prompts that left their slot

_RESTART: Final = "llama.cpp reads a model once; start a worker with the other file, then drain this one"
_NO_MEMORY: Final = "llama.cpp has no call that gives its memory back; end this worker: a start takes a second"
_NO_LORA: Final = "llama.cpp takes adapters when it starts, as --set lora_adapters; loading them later is not built"
_NO_EXPERTS: Final = "llama.cpp runs in one process; there is no expert parallelism to scale"
_HOST_CACHE: Final = (
    "KV cache clear not supported on this worker: llama.cpp keeps prompts beside its slots, and no call empties that; "
    f"start it with --set {HOST_CACHE}=0"
)
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("sleep", "wake_up", "release_memory_occupation", "resume_memory_occupation"), _NO_MEMORY),
    **dict.fromkeys(("scale_elastic_ep", "is_scaling_elastic_ep", "ep_capacity"), _NO_EXPERTS),
    **dict.fromkeys(("start_profile", "stop_profile"), "llama.cpp has no profiler; perf sees its process"),
    **dict.fromkeys(
        (
            "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed",
            "update_weights_from_ipc", "update_weight_version", "init_weights_update_group",
            "destroy_weights_update_group",
        ),
        _RESTART,
    ),
    **dict.fromkeys(("load_lora", "unload_lora", "list_loras"), _NO_LORA),
}  # fmt: skip


class LlamaOperations:
    """The controls of one llama.cpp. On the event loop only."""

    def __init__(self, llama: LlamaSlots, *, keeps_prompts: bool) -> None:
        """`keeps_prompts`: it has a cache of prompts beside its slots."""
        self._llama = llama
        controls = {
            "pause_generation": Operation(self._pause_generation),
            "resume_generation": Operation(self._resume_generation),
        }
        refused = dict(REFUSED)
        if keeps_prompts:
            refused["clear_kv_blocks"] = _HOST_CACHE
        else:
            controls["clear_kv_blocks"] = Operation(self._clear_kv_blocks)
        self.table = EngineOperations(NAME, controls, {}, refused)

    async def _pause_generation(self, _body: Mapping[str, Any]) -> Body:
        self.table.halted_until = "resume_generation"
        self._llama.halt()
        return {"message": "paused; running requests wait"}

    async def _resume_generation(self, _body: Mapping[str, Any]) -> Body:
        self._llama.go_on()
        self.table.halted_until = ""
        return {"message": "resumed"}

    async def _clear_kv_blocks(self, _body: Mapping[str, Any]) -> Body:
        self.table.check_serving()  # a process that is halted answers nothing
        await self._llama.erase()
        return {"status": "success", "message": "KV cache cleared"}


# llama.cpp as an engine of text, for a GGUF file alone: llama.cpp has tokenizer and template, and answers in OpenAI's shapes.

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
COMPLETION_TOKENS: Final = 16  # OpenAI's default of a completion, where chat goes on to the context's end

# Members of a body that name no option of the answer, or that llama.cpp must not see.
OWN: Final = frozenset(
    {"model", "stream", "stream_options", "nvext", "user", "metadata", "store", "cache_salt", "cache_prompt"}
)


class LlamaCppTextEngine(RawEngine):
    """Serves a GGUF file with llama.cpp, text in and out."""

    has_child_processes: ClassVar[bool] = True

    def __init__(self, arguments: LlamaArguments) -> None:
        self._arguments = arguments
        self._llama = LlamaSlots(arguments)
        self._scope = CacheScope("llama.cpp")

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        arguments, worker = await asyncio.to_thread(read_arguments, argv, model_input=ModelInput.Text)
        return cls(arguments), worker

    async def start(self, worker_id: int) -> EngineConfig:
        await self._llama.start()
        return EngineConfig(
            model=str(self._arguments.file),
            served_model_name=self._arguments.served_name,
            model_aliases=list(self._arguments.aliases),
        )

    async def generate(self, request: RawRequest, context: Context) -> AsyncGenerator[RawResponseChunk, None]:
        path, body = self._call(request)
        head = {"id": context.id(), "model": request.get("model") or self._arguments.served_name}
        walk = walk_chat if path == CHAT and body.get("logprobs") is True else walk_events
        async with self._llama.events(path, body, context, walk) as events:
            async for event in events:
                if context.is_stopped():
                    return
                event.pop("timings", None)  # llama.cpp's own
                yield {**event, **head}

    def _call(self, request: RawRequest) -> tuple[str, dict[str, Any]]:
        """Return where a request goes, and its body. Raises InvalidArgument for one that is neither chat nor completion."""
        body = {name: value for name, value in request.items() if name not in OWN and value is not None}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body["cache_prompt"] = self._scope.admits(request.get("cache_salt"))
        if isinstance(request.get("messages"), list):
            if "max_completion_tokens" in body:
                body["max_tokens"] = body.pop("max_completion_tokens")
            if body.get("logprobs") is True and not body.get("top_logprobs"):
                body["top_logprobs"] = 1  # llama.cpp lists twenty by itself, and with 0 reports none at all
            return CHAT, body
        if isinstance(request.get("prompt"), str | list):
            return COMPLETIONS, {"max_tokens": COMPLETION_TOKENS, **body}
        raise InvalidArgument("a request needs messages or a prompt: llama.cpp serves chat and completions here")

    def map_error(self, error: Exception) -> Exception | None:
        return map_llama_error(error)

    async def wait_dead(self) -> str:
        return await self._llama.wait_ended()

    async def cleanup(self) -> None:
        await self._llama.close()

    async def health_check_payload(self) -> dict[str, Any] | None:
        return build_raw_health_check_payload({"prompt": "a", "max_tokens": 1, "temperature": 0.0})
