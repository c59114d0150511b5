"""`LLMUnaryClient` and `UnaryChatModel`: a model's answer as one value, for a program between a frontend and a worker.

client = await LLMUnaryClient.connect(runtime, "prod.backend.generate")
async def answer(request, *, context):
    return with_engine_data(await client.complete(request, context=context), {"checked": True})
await UnaryChatModel("path/to/model", "checker", public_model_name="checked").serve(runtime, answer)
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, Self

from dynamo.errors import CannotConnect
from dynamo.protocol.model_types import ModelInput, ModelType, WorkerType
from dynamo.runtime.calls.context import Context
from dynamo.runtime.client import Client
from dynamo.runtime.decorators import serve_unary_endpoint
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.worker.registration import register_model, unregister_model

__all__ = ["LLMUnaryClient", "UnaryChatModel"]

logger = logging.getLogger(__name__)

PREFIX: Final = "LLM endpoint returned"


class LLMUnaryClient:
    """Calls a worker of tokens, and returns its answer as one chunk."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @classmethod
    async def connect(cls, runtime: DistributedRuntime, endpoint_name: str) -> Self:
        """Return a client of an endpoint (`namespace.component.endpoint`), once an instance of it is there."""
        client = await runtime.endpoint(endpoint_name).client()
        await client.wait_for_instances()
        return cls(client)

    async def complete(self, request: Mapping[str, Any], *, context: Context | None = None) -> dict[str, Any]:
        """Return the last chunk of the answer, with the tokens and the text of all chunks.

        Raises RuntimeError for more than one choice, for logprobs, and for an answer without an end.
        """
        if _member(request, "sampling_options", "n") not in (None, 1):
            raise RuntimeError("LLMUnaryClient supports only n=1")
        if any(_member(request, "output_options", name) is not None for name in ("logprobs", "prompt_logprobs")):
            raise RuntimeError("LLMUnaryClient does not support logprobs")
        token_ids, texts = list[int](), list[str]()
        async with aclosing(await self._client.generate(request, annotated=False, context=context)) as chunks:
            async for chunk in chunks:
                if not isinstance(chunk, dict) or not isinstance(chunk.get("token_ids"), list):
                    raise RuntimeError(f"{PREFIX} an item that is not a chunk of tokens")
                if chunk.get("index"):
                    raise RuntimeError(f"{PREFIX} more than one choice")
                if chunk.get("log_probs") is not None or chunk.get("top_logprobs") is not None:
                    raise RuntimeError(f"{PREFIX} unsupported logprobs")
                token_ids += chunk["token_ids"]
                if chunk.get("text") is not None:
                    texts.append(chunk["text"])
                if chunk.get("finish_reason") is not None:
                    return {**chunk, "token_ids": token_ids, **({"text": "".join(texts)} if texts else {})}
        raise RuntimeError(f"{PREFIX} no finish_reason")


class UnaryChatModel:
    """A chat model whose answers are made by a function, one chunk each."""

    def __init__(
        self,
        model_path: str,
        service_name: str,
        public_model_name: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        """`model_path`: whose tokenizer and template frontends use. `public_model_name`: what clients call it.

        `chat_template`: a file that overrides the model's own template.
        """
        self._model_path, self._name, self._template = model_path, public_model_name, chat_template
        self._endpoint = f"{service_name}.app.generate"

    async def serve(self, runtime: DistributedRuntime, handler: Callable[..., Awaitable[Mapping[str, Any]]]) -> None:
        """Serve `async def handler(request[, context])`, which returns one chunk; return when the runtime is shut down."""
        endpoint = runtime.endpoint(self._endpoint)
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            endpoint,
            self._model_path,
            self._name,
            custom_template_path=self._template,
            worker_type=WorkerType.Aggregated,
        )
        try:
            await serve_unary_endpoint(endpoint, handler)
        finally:
            try:
                await unregister_model(endpoint)
            except CannotConnect:  # the runtime was closed meanwhile, and its records with it
                logger.debug("%s: the runtime is closed, and the model with it", self._endpoint)


def _member(request: Mapping[str, Any], group: str, name: str) -> object:
    members = request.get(group)
    return members.get(name) if isinstance(members, Mapping) else None
