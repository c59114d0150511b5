"""The Responses API in the OpenAPI document, from the types that decode its requests."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from dynamo.protocol.openai.schema import ApiDescription, describe_generation
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.protocol.responses.request import ResponsesBody

__all__ = ["RESPONSES_API"]


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


RESPONSES_API: Final = ApiDescription(
    [ResponsesBody, GeneratedResponse, ResponseStreamEvent],
    {
        "/v1/responses": {
            "post": describe_generation(
                "createResponse",
                "Answer a list of items",
                "ResponsesBody",
                "GeneratedResponse",
                "ResponseStreamEvent",
            )
        }
    },
)
