"""The bodies of the answers to requests for vectors, and the routes for vectors in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from dynamo.protocol.openai.escaping import json_text
from dynamo.protocol.openai.schema import ApiDescription, describe_operation, generation_errors, json_content
from dynamo.protocol.vectors.requests import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RankedDocument,
    RerankRequest,
    ScoreRequest,
)
from dynamo.protocol.vectors.results import InputVector


def embeddings_body(vectors: Iterable[InputVector], *, model: str, prompt_tokens: int, base64: bool) -> bytes:
    """Return the body of `/v1/embeddings`."""
    encode = msgspec.json.encode
    entries = [
        b'{"object":"embedding","index":%d,"embedding":%b}'
        % (index, b'"%b"' % vector.base64() if base64 else encode(vector.floats().tolist()))
        for index, vector in enumerate(vectors)
    ]
    return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (
        b",".join(entries),
        json_text(model),
        usage_member(prompt_tokens),
    )


def classes_body(head: bytes, vectors: Sequence[InputVector], labels: Sequence[str], *, prompt_tokens: int) -> bytes:
    """Return the body of `/v1/classify`; `head` is what `result_head` returned."""
    entries = []
    for index, vector in enumerate(vectors):
        shares = vector.floats().tolist()
        best = max(range(len(shares)), key=shares.__getitem__)
        label = labels[best] if len(labels) == len(shares) else f"LABEL_{best}"
        entries.append(
            b'{"index":%d,"label":%b,"probs":%b,"num_classes":%d}'
            % (index, json_text(label), msgspec.json.encode(shares), len(shares))
        )
    counts = b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":0}' % (prompt_tokens, prompt_tokens)
    return b'%b,"data":[%b],"usage":%b}' % (head, b",".join(entries), counts)


def pooling_body(head: bytes, vectors: Sequence[InputVector], *, prompt_tokens: int, base64: bool) -> bytes:
    """Return the body of `/v1/pooling`: a vector, or a list of them where each token has one."""
    entries = []
    for index, vector in enumerate(vectors):
        shape = b""
        if vector.shape is not None:
            shape = b',"shape":' + msgspec.json.encode(list(vector.shape))
        data = b'"%b"' % vector.base64() if base64 else msgspec.json.encode(_rows(vector))
        entries.append(b'{"index":%d,"object":"pooling","data":%b%b}' % (index, data, shape))
    return b'%b,"data":[%b],"usage":%b}' % (head, b",".join(entries), usage_member(prompt_tokens))


def scores_body(head: bytes, scores: Sequence[float], *, prompt_tokens: int) -> bytes:
    """Return the body of `/v1/score`."""
    entries = [
        b'{"index":%d,"object":"score","score":%b}' % (index, msgspec.json.encode(score))
        for index, score in enumerate(scores)
    ]
    return b'%b,"data":[%b],"usage":%b}' % (head, b",".join(entries), usage_member(prompt_tokens))


def ranked_list(ranked: Sequence[tuple[int, float]], texts: Sequence[str] | None) -> bytes:
    """Return the body of `/v1/rerank`, the bare list of 1.6.1. `texts`: the documents, where they are requested."""
    return msgspec.json.encode(
        [
            {"score": score, "index": index, **({} if texts is None else {"document": texts[index]})}
            for index, score in ranked
        ]
    )


def ranked_results(
    id: str, model: str, ranked: Sequence[tuple[int, float]], texts: Sequence[str] | None, *, prompt_tokens: int
) -> bytes:
    """Return the body of `/rerank` and `/v2/rerank`: the object of Jina, Cohere and vLLM."""
    results = [
        {"index": index, "relevance_score": score, **({} if texts is None else {"document": {"text": texts[index]}})}
        for index, score in ranked
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return msgspec.json.encode({"id": id, "model": model, "usage": usage, "results": results})


def result_head(id: str, created: int, model: str) -> bytes:
    """Return the beginning of the answers that are lists with an id, without the comma behind it."""
    return b'{"id":%b,"object":"list","created":%d,"model":%b' % (json_text(id), created, json_text(model))


def _rows(vector: InputVector) -> list[float] | list[list[float]]:
    values = vector.floats().tolist()
    if vector.shape is None or len(vector.shape) == 1:
        return values
    width = vector.shape[-1]
    return [values[start : start + width] for start in range(0, len(values), width)]


def usage_member(prompt_tokens: int) -> bytes:
    """Return the usage of a request that generates nothing."""
    return b'{"prompt_tokens":%d,"total_tokens":%d}' % (prompt_tokens, prompt_tokens)


# The routes for vectors in the OpenAPI document, from the types that decode their requests.

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
