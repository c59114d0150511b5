"""The Responses API in the OpenAPI document, from the types that decode its requests."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from dynamo.protocol.openai.schema import (
    ApiDescription,
    describe_generation,
    describe_read,
    json_content,
    path_parameter,
    query_parameter,
)
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.protocol.responses.request import ResponsesBody

# Answers are written as bytes; these types exist for the document, and for the tests that hold the answers to it.


class ResponseInputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int


class ResponseOutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsageCounts(Struct):
    input_tokens: int
    input_tokens_details: ResponseInputTokensDetails
    output_tokens: int
    output_tokens_details: ResponseOutputTokensDetails
    total_tokens: int


class ResponseFailure(Struct):
    code: str
    message: str


class ResponseIncompleteDetails(Struct):
    reason: str


class GeneratedResponse(Struct):
    """The response object."""

    id: str
    object: str
    created_at: int
    status: str
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: ResponseIncompleteDetails | None
    output: list[JsonObject]
    model: str
    instructions: str | list[Any] | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    text: JsonObject
    reasoning: JsonObject | None
    max_output_tokens: int | None
    previous_response_id: str | None
    service_tier: str
    truncation: str
    top_logprobs: int
    background: bool
    store: bool
    usage: ResponseUsageCounts | None
    nvext: JsonObject | None = None


class ResponseStreamEvent(Struct):
    """An event of a stream; the members beside these are those of its type."""

    type: str
    sequence_number: int


class InputTokenCount(Struct):
    object: str
    input_tokens: int


class DeletedResponse(Struct):
    id: str
    object: str
    deleted: bool


class InputItemList(Struct):
    """One page of the items that a response answered."""

    object: str
    data: list[JsonObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


_NOT_STORED: Final = {
    404: "No response with this id is stored.",
    503: "The store cannot be read now; see `Retry-After`.",
}
_ID: Final = path_parameter("response_id", {"type": "string", "pattern": "^resp_[0-9a-f]{32}$"})


def _stored(operation: str, summary: str, answer: str, *query: Any, errors: dict[int, str] | None = None) -> Any:
    return describe_read(operation, summary, answer, parameters=[_ID, *query], errors={**(errors or {}), **_NOT_STORED})


def _counted() -> JsonObject:
    described = describe_generation(
        "countInputTokens", "Count the tokens of a response's prompt", "ResponsesBody", "InputTokenCount"
    )
    described["responses"]["200"] = {"description": "The count.", "content": json_content("InputTokenCount")}
    return described


RESPONSES_API: Final = ApiDescription(
    [ResponsesBody, GeneratedResponse, ResponseStreamEvent, InputTokenCount, DeletedResponse, InputItemList],
    {
        "/v1/responses/input_tokens": {"post": _counted()},
        "/v1/responses/{response_id}": {
            "get": _stored(
                "getResponse",
                "A stored response",
                "GeneratedResponse",
                query_parameter("stream", {"type": "boolean"}),
                errors={422: "The events of a response are not kept."},
            ),
            "delete": _stored("deleteResponse", "Forget a stored response", "DeletedResponse"),
        },
        "/v1/responses/{response_id}/input_items": {
            "get": _stored(
                "listInputItems",
                "What a stored response answered, in pages",
                "InputItemList",
                query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
                query_parameter("order", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
                query_parameter("after", {"type": "string"}),
                errors={400: "A parameter is out of its range."},
            )
        },
        "/v1/responses/{response_id}/cancel": {
            "post": _stored(
                "cancelResponse",
                "Cancel a response that runs in the background, of which there are none",
                "GeneratedResponse",
                errors={400: "The response has ended."},
            )
        },
        "/v1/responses": {
            "post": describe_generation(
                "createResponse",
                "Answer a list of items",
                "ResponsesBody",
                "GeneratedResponse",
                "ResponseStreamEvent",
            )
        },
    },
)
