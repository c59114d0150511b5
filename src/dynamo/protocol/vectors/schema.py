"""The routes for vectors in the OpenAPI document, from the types that decode their requests."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from dynamo.protocol.openai.schema import ApiDescription, generation_errors, json_content
from dynamo.protocol.vectors.requests import EmbeddingRequest

__all__ = ["VECTORS_API"]


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
    return {
        "post": {
            "operationId": operation,
            "summary": summary,
            "requestBody": {"required": True, "content": json_content(request)},
            "responses": {
                "200": {"description": "The answer.", "content": json_content(answer)},
                **generation_errors("ErrorBody"),
            },
        }
    }


VECTORS_API: Final = ApiDescription(
    [EmbeddingRequest, EmbeddingList],
    {"/v1/embeddings": _post("createEmbedding", "Turn texts into vectors", "EmbeddingRequest", "EmbeddingList")},
)
