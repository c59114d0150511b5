"""Requests for vectors: what an engine that embeds receives, and what it yields for each input."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Required, TypedDict, runtime_checkable

from dynamo.contract.chunks import Routing
from dynamo.errors import InvalidArgument

if TYPE_CHECKING:
    from dynamo.runtime.calls.context import Context


class EmbedRequest(TypedDict, total=False):
    """Several inputs, each of which becomes one vector. Only `token_ids` is certain; other members may be None."""

    token_ids: Required[list[list[int]]]  # the inputs, none of them empty; special tokens are in them
    model: str  # as the client named it
    task: str  # "embed" (where it is absent, too), "classify", "score", "token_embed", "token_classify"
    dimensions: int | None  # how long the vectors should be; None: as the model makes them
    use_activation: bool | None  # False: logits in place of probabilities
    normalize: bool | None  # whether vectors get the length 1; None: as the model is configured
    encoding_format: str | None  # what the client reads; the engine need not care
    routing: Routing  # `lora_name`, `priority`
    mdc_sum: str | None  # checksum of the model card the frontend used
    annotations: list[str]


class Embedding(TypedDict, total=False):
    """The vector of one input. Every input has one, in any order."""

    index: Required[int]  # which input
    embedding: Required[Any]  # a list of floats, little-endian float32 as bytes, or an array of float32 or float64
    shape: Sequence[int] | None  # (tokens, size), of a task whose result is a vector for each token


@runtime_checkable
class Embeds(Protocol):
    """Turns inputs into vectors: embeddings, classes, scores."""

    def embed(self, request: EmbedRequest, context: Context) -> AsyncGenerator[Embedding, None]:
        """Yield one `Embedding` for each input; implement it as `async def` with `yield`. Calls run concurrently.

        Called where the worker's endpoint types have embedding, classify, pooling, score or rerank; beside `generate` where they
        have chat, too. All inputs are known at once: submit them in one go. Once `context.is_stopped()`, return. The
        generator is closed promptly on every path.

        Raises:
            InvalidArgument: the request cannot be served (a task or length the model does not have); the message
                reaches the client.
            EngineShutdown: this engine is gone; another worker gets the request.
        """
        raise InvalidArgument("this engine makes no embeddings")


def embedding(index: int, vector: Any, shape: Sequence[int] | None = None) -> Embedding:
    """Make the result for one input. `vector`: floats, bytes of little-endian float32, or an array."""
    made: Embedding = {"index": index, "embedding": vector}
    if shape is not None:
        made["shape"] = shape
    return made
