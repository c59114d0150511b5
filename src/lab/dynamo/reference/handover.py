"""How the tokens of media get from an encode worker to the worker that computes the prompt: in its answer, or as an embedding.

An embedding of this engine is the one vector of tokens of all parts. It is a tensor like any other, so it takes the way of
`dynamo.common.multimodal`, and the answer shows whether it arrived.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from dynamo.common.multimodal import (
    EMBEDDING_RECEIVER_FACTORIES,
    EMBEDDING_SENDER_FACTORIES,
    EmbeddingReceiver,
    EmbeddingSender,
    EmbeddingTransferMode,
    TransferRequest,
)
from dynamo.contract.engine import GenerateRequest
from dynamo.errors import InvalidArgument
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.reference.media import MAX_PART_TOKENS, MAX_PARTS, EncodedMedia

DTYPE: Final = np.int32

Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_PART_TOKENS)]


class HandedOver(msgspec.Struct, frozen=True):
    """`encoder_result` with a handle in place of the tokens."""

    digests: list[str]
    lengths: Annotated[list[Length], msgspec.Meta(max_length=MAX_PARTS)]  # in tokens, of each part
    transfer_mode: EmbeddingTransferMode
    embedding: TransferRequest


class EncodedSender:
    """What an encode worker answers with."""

    def __init__(self, mode: EmbeddingTransferMode | None = None) -> None:
        """None: the tokens are in the answer."""
        self._mode = mode
        self._sender: EmbeddingSender | None = None
        self.is_closed = False

    def start(self) -> None:
        """Raises InvalidArgument for a mode that cannot be used here."""
        if self._mode is not None and self._sender is None:
            self._sender = EMBEDDING_SENDER_FACTORIES[self._mode]()

    async def result(self, found: EncodedMedia) -> JsonObject:
        """Return `encoder_result`; what it has a handle to is held for a while. Raises as `send_embeddings`."""
        if self._sender is None or self._mode is None:
            return found.to_result()
        vector = np.array([token for part in found.token_ids for token in part], DTYPE)
        embedding, _ = await self._sender.send_embeddings(vector)
        lengths = [len(part) for part in found.token_ids]
        return dict(msgspec.to_builtins(HandedOver([*found.digests], lengths, self._mode, embedding)))

    async def close(self) -> None:
        """Let what was answered be taken for a moment, and remove the rest."""
        self.is_closed = True
        if self._sender is not None:
            await self._sender.aclose()


@cache
def _receiver(mode: EmbeddingTransferMode) -> EmbeddingReceiver:
    found: EmbeddingReceiver = EMBEDDING_RECEIVER_FACTORIES[mode]()
    return found


async def with_tokens(request: GenerateRequest) -> GenerateRequest:
    """Return the request with the tokens in `encoder_result` where that has a handle to them, which is used up.

    Raises InvalidArgument where it is wrong, and Disconnected where the embedding is gone: it may be encoded again.
    """
    result: Any = request.get("encoder_result")
    if not isinstance(result, dict) or "embedding" not in result:
        return request
    try:
        handed = msgspec.convert(result, HandedOver)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"encoder_result: {error}") from error
    receiver = _receiver(handed.transfer_mode)
    number, vector = await receiver.receive_embeddings(handed.embedding)
    try:
        if vector.dtype != DTYPE or vector.shape != (sum(handed.lengths),):
            raise InvalidArgument(
                f"encoder_result: an embedding of {vector.dtype} {list(vector.shape)}, where {sum(handed.lengths)} tokens "
                "are announced"
            )
        tokens = vector.tolist()
    finally:
        receiver.release_tensor(number)
    parts, start = [], 0
    for length in handed.lengths:
        parts.append(tokens[start : start + length])
        start += length
    return {**request, "encoder_result": {"digests": handed.digests, "token_ids": parts}}
