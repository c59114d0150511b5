"""Vectors instead of tokens: the inputs of a request to SGLang's tokenizer manager, each a request of its own there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from dynamo.contract.embedding import EmbedRequest
from dynamo.contract.requests.vectors import EMBED, inputs_within, task_among
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.runtime.calls.context import Context
from dynamo.sglang.answers import check_not_aborted
from dynamo.sglang.engine_thread import EngineThread


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
