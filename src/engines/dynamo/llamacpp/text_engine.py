"""llama.cpp as an engine of text, for a GGUF file alone: llama.cpp has tokenizer and template, and answers in OpenAI's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, Final, Self

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, RawEngine, RawRequest, RawResponseChunk
from dynamo.contract.health_check import build_raw_health_check_payload
from dynamo.engines.cache_scope import CacheScope
from dynamo.errors import InvalidArgument
from dynamo.llamacpp.arguments import LlamaArguments, read_arguments
from dynamo.llamacpp.scores import walk_chat
from dynamo.llamacpp.slots import LlamaSlots, map_llama_error, walk_events
from dynamo.protocol.model_types import ModelInput
from dynamo.runtime.calls.context import Context

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
