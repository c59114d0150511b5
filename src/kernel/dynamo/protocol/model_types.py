"""What a model takes, what it serves and which role a worker plays: the enums of the model card.

The numbers are the native ones; the card carries names (`"Chat | Completions"`, `"Tokens"`, `"aggregated"`).
"""

from __future__ import annotations

from enum import Enum, IntFlag
from typing import Final

from dynamo.errors import InvalidArgument


class ModelInput(Enum):
    """What the frontend sends to the worker. `LLMEngine` takes `Tokens`; `RawEngine` takes `Text` or `Tensor`."""

    Text = 1
    Tokens = 2
    Tensor = 3

    def __str__(self) -> str:
        return self.name


class WorkerType(Enum):
    """The role of a worker in a deployment. The card spells it in lower case."""

    Prefill = 1
    Decode = 2
    Encode = 3
    Aggregated = 4

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def from_card(cls, text: str) -> WorkerType:
        """Read the card's spelling, any case. Raises InvalidArgument for an unknown role."""
        for role in cls:
            if str(role) == text.strip().lower():
                return role
        raise InvalidArgument(f"unknown worker type {text!r}; use one of {', '.join(map(str, cls))}")


class ModelType(IntFlag):
    """The OpenAI surfaces a model serves; members combine with `|`."""

    Empty = 0
    Chat = 1 << 0
    Completions = 1 << 1
    Embedding = 1 << 2
    TensorBased = 1 << 3
    Prefill = 1 << 4  # a marker written by older prefill workers; the role itself is in `WorkerType`
    Images = 1 << 5
    Audios = 1 << 6
    Videos = 1 << 7
    Realtime = 1 << 8
    Classify = 1 << 9
    Pooling = 1 << 10
    Rerank = 1 << 11

    def __str__(self) -> str:
        """Return the spelling of the card; no bits give the empty string."""
        return " | ".join(flag.name or "" for flag in type(self) if flag in self)

    @classmethod
    def from_card(cls, text: str) -> ModelType:
        """Read `"Chat | Completions"`. Names this version does not know are skipped: a newer worker may have them."""
        found = cls.Empty
        for word in text.split("|"):
            flag = cls.__members__.get(word.strip())
            if flag is not None:
                found |= flag
        return found

    def supports_chat(self) -> bool:
        return ModelType.Chat in self

    def supports_completions(self) -> bool:
        return ModelType.Completions in self

    def supports_embedding(self) -> bool:
        return ModelType.Embedding in self

    def supports_tensor(self) -> bool:
        return ModelType.TensorBased in self

    def supports_prefill(self) -> bool:
        return ModelType.Prefill in self

    def supports_images(self) -> bool:
        return ModelType.Images in self

    def supports_audios(self) -> bool:
        return ModelType.Audios in self

    def supports_videos(self) -> bool:
        return ModelType.Videos in self

    def supports_realtime(self) -> bool:
        return ModelType.Realtime in self

    def supports_classify(self) -> bool:
        return ModelType.Classify in self

    def supports_pooling(self) -> bool:
        return ModelType.Pooling in self

    def supports_rerank(self) -> bool:
        return ModelType.Rerank in self


_ENDPOINT_TYPES: Final = {
    "chat": ModelType.Chat,
    "completions": ModelType.Completions,
    "embedding": ModelType.Embedding,
    "embeddings": ModelType.Embedding,
    "tensor": ModelType.TensorBased,
    "image": ModelType.Images,
    "images": ModelType.Images,
    "video": ModelType.Videos,
    "videos": ModelType.Videos,
    "audio": ModelType.Audios,
    "audios": ModelType.Audios,
    "classify": ModelType.Classify,
    "pooling": ModelType.Pooling,
    "rerank": ModelType.Rerank,
    "score": ModelType.Rerank,  # what scores a pair ranks documents
}

VECTORS: Final = ModelType.Embedding | ModelType.Classify | ModelType.Pooling | ModelType.Rerank
"""What is served by `LLMEngine.embed`."""


def parse_endpoint_types(text: str) -> ModelType:
    """Read `WorkerConfig.endpoint_types`: a comma list, any case (`"chat,completions"`).

    `prefill` is a role, not an endpoint type. Raises InvalidArgument for an unknown word or an empty list.
    """
    words = [word for word in (part.strip().lower() for part in text.split(",")) if word]
    if not words:
        raise InvalidArgument(f"endpoint types are empty; use a comma list of {', '.join(_ENDPOINT_TYPES)}")
    found = ModelType.Empty
    for word in words:
        flag = _ENDPOINT_TYPES.get(word)
        if flag is None:
            raise InvalidArgument(f"unknown endpoint type '{word}'; use a comma list of {', '.join(_ENDPOINT_TYPES)}")
        found |= flag
    return found
