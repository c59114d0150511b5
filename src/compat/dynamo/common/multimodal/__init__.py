"""Embeddings and processed media between the processes of one machine, and embeddings that are kept.

It imports without torch: a tensor may be of torch, of NumPy, or any buffer. What loads media is not here: the frontend does.
"""

from typing import Any

from dynamo.common.absent import load_name
from dynamo.common.multimodal.decoded_media import (
    DecodedMediaWriter,
    DecodedPixels,
    decoded_content_hash,
    read_decoded_media,
)
from dynamo.common.multimodal.embedding_transfer import (
    EMBEDDING_RECEIVER_FACTORIES,
    EMBEDDING_SENDER_FACTORIES,
    EmbeddingReceiver,
    EmbeddingSender,
    LocalEmbeddingReceiver,
    LocalEmbeddingSender,
    NixlReadEmbeddingReceiver,
    NixlReadEmbeddingSender,
    NixlWriteEmbeddingReceiver,
    NixlWriteEmbeddingSender,
    SharedMemoryEmbeddingReceiver,
    SharedMemoryEmbeddingSender,
    TransferRequest,
    check_transfer_mode,
)
from dynamo.common.multimodal.encoder_cache import AsyncEncoderCache
from dynamo.common.multimodal.mm_kwargs_shm import MmKwargs, MmKwargsShmWriter, read_mm_kwargs
from dynamo.contract.modes import EmbeddingTransferMode

__all__ = [
    "EMBEDDING_RECEIVER_FACTORIES", "EMBEDDING_SENDER_FACTORIES", "AsyncEncoderCache", "DecodedMediaWriter", "DecodedPixels", "EmbeddingReceiver",
    "EmbeddingSender",    "EmbeddingTransferMode", "LocalEmbeddingReceiver", "LocalEmbeddingSender", "MmKwargs", "MmKwargsShmWriter",
    "NixlReadEmbeddingReceiver", "NixlReadEmbeddingSender", "NixlWriteEmbeddingReceiver", "NixlWriteEmbeddingSender",
    "SharedMemoryEmbeddingReceiver", "SharedMemoryEmbeddingSender", "TransferRequest", "check_transfer_mode", "decoded_content_hash", "read_decoded_media", "read_mm_kwargs",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return load_name(__name__, name)
