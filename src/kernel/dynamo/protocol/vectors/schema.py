"""The routes for vectors in the OpenAPI document, from the types that decode their requests."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from dynamo.protocol.openai.schema import ApiDescription, describe_operation, generation_errors, json_content
from dynamo.protocol.vectors.requests import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RankedDocument,
    RerankRequest,
    ScoreRequest,
)

# Answers are written as bytes; these types exist for the document, and for the tests that hold the answers to it.


class InputUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingEntry(Struct):
    object: str
    index: int
    embedding: list[float] | str  # text: base64 of little-endian float32


class EmbeddingList(Struct):
    object: str
    data: list[EmbeddingEntry]
    model: str
    usage: InputUsage


def _post(operation: str, summary: str, request: str, answer: str) -> dict[str, Any]:
    body, errors = json_content(request), generation_errors("ErrorBody")
    made = describe_operation(operation, summary, json_content(answer), meaning="The answer.", body=body, errors=errors)
    return {"post": made}


class ClassUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class ClassifiedInput(Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifiedList(Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[ClassifiedInput]
    usage: ClassUsage


class PooledInput(Struct):
    index: int
    object: str
    data: list[float | list[float]] | str
    shape: list[int] | None = None


class PooledList(Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[PooledInput]
    usage: InputUsage


class ScoredPair(Struct):
    index: int
    object: str
    score: float


class ScoreList(Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[ScoredPair]
    usage: InputUsage


class RankedEntry(Struct):
    """One document of `/v1/rerank`, whose answer is a list of them."""

    score: float
    index: int
    document: str | None = None


class RankedResult(Struct):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RankedResults(Struct):
    id: str
    model: str
    usage: InputUsage
    results: list[RankedResult]


def _listed(operation: dict[str, Any]) -> dict[str, Any]:
    """Return an operation whose answer is a list of what it names."""
    content = operation["post"]["responses"]["200"]["content"]["application/json"]
    content["schema"] = {"type": "array", "items": content["schema"]}
    return operation


_TYPES: Final[list[Any]] = [
    EmbeddingRequest, ClassifyRequest, PoolingRequest, ScoreRequest, RerankRequest,
    EmbeddingList, ClassifiedList, PooledList, ScoreList, RankedEntry, RankedResults,
]  # fmt: skip

VECTORS_API: Final = ApiDescription(
    _TYPES,
    {
        "/v1/embeddings": _post("createEmbedding", "Turn texts into vectors", "EmbeddingRequest", "EmbeddingList"),
        "/v1/classify": _post("classify", "Judge texts", "ClassifyRequest", "ClassifiedList"),
        "/v1/pooling": _post("pool", "Return what a model's pooling makes of texts", "PoolingRequest", "PooledList"),
        "/v1/score": _post("score", "Score pairs of texts", "ScoreRequest", "ScoreList"),
        "/v1/rerank": _listed(_post("rerankList", "Rank documents, as a list", "RerankRequest", "RankedEntry")),
        "/v2/rerank": _post("rerank", "Rank documents", "RerankRequest", "RankedResults"),
    },
)
