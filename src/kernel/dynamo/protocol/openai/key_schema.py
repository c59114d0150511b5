"""What API keys add to the OpenAPI document: how they are sent, and the answers that refuse them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from dynamo.protocol.openai.errors import phrase_of

_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "As OpenAI's clients send an API key."},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "As Anthropic's clients send it."},
}
_SECURITY: Final[list[dict[str, list[str]]]] = [{name: []} for name in _SCHEMES]
_REFUSALS: Final = {
    401: "There is no API key, or it is unknown, disabled or expired.",
    403: "The API key may not use this route, or not from this address.",
    429: "A limit or the budget of the API key is used up; see `Retry-After` and `error.code`.",
}


def describe_keys(document: dict[str, Any], open_paths: Collection[str]) -> None:
    """Add keys to a document, for every path but those that are open."""
    document["components"]["securitySchemes"] = _SCHEMES
    for path, operations in document["paths"].items():
        if path not in open_paths:
            for operation in operations.values():
                _describe(operation)


def _describe(operation: dict[str, Any]) -> None:
    responses: Mapping[str, Any] = operation["responses"]
    # Errors of an operation have one shape; one that has none documented has OpenAI's.
    shapes = [one["content"] for status, one in sorted(responses.items()) if status >= "400" and "content" in one]
    shape = shapes[0] if shapes else {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    refusals = {
        str(status): {"description": f"{phrase_of(status)}. {text}", "content": shape}
        for status, text in _REFUSALS.items()
        if status != 429 or "requestBody" in operation
    }
    operation["responses"] = {**refusals, **responses}
    operation["security"] = _SECURITY
