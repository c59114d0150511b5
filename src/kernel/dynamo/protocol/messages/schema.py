"""The part of the OpenAPI document that describes the Messages API, from the types that decode its requests."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, get_args

from msgspec import Struct

from dynamo.protocol.messages.conversation import (
    DocumentBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from dynamo.protocol.messages.shapes import MessagesRequest
from dynamo.protocol.messages.tools import ClientTool, DefinedTool
from dynamo.protocol.openai.schema import ApiDescription, describe_operation, generation_errors, json_content

InputBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | DocumentBlock | SearchResultBlock


class AnswerThinking(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class AnswerText(Struct, tag_field="type", tag="text"):
    text: str


class AnswerToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Struct):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnswerMessage(Struct, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[AnswerThinking | AnswerText | AnswerToolUse]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    nvext: dict[str, Any] | None = None


class MessageStreamEvent(Struct):
    """`message_start`, `content_block_start`, `_delta` and `_stop`, `message_delta`, `message_stop`, `ping` or `error`."""

    type: str


class TokenCount(Struct):
    input_tokens: int


class MessagesErrorDetail(Struct):
    type: str
    message: str


class MessagesError(Struct, tag_field="type", tag="error"):
    error: MessagesErrorDetail
    request_id: str


_BLOCKS: Final = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in get_args(InputBlock)]
_TEXTS: Final = {"type": "array", "items": {"$ref": "#/components/schemas/TextBlock"}}
_TOOLS: Final = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in (ClientTool, DefinedTool)]


def _operation(name: str, summary: str, meaning: str, answer: dict[str, Any]) -> dict[str, Any]:
    body, errors = json_content("MessagesRequest"), generation_errors("MessagesError")
    return describe_operation(name, summary, answer, meaning=meaning, body=body, errors=errors)


_EVENT: Final = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "event": {"type": "string"},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {
                "anyOf": [
                    {"$ref": "#/components/schemas/MessageStreamEvent"},
                    {"$ref": "#/components/schemas/MessagesError"},
                ]
            },
        },
    },
}

MESSAGES_API: Final = ApiDescription(
    [
        MessagesRequest, AnswerMessage, MessageStreamEvent, TokenCount, MessagesError, ClientTool, DefinedTool,
        *get_args(InputBlock),
    ],
    {
        "/v1/messages": {
            "post": _operation(
                "createMessage",
                "Answer a conversation, in Anthropic's form",
                "The answer. With `stream`, server-sent events, ended by `message_stop`.",
                {**json_content("AnswerMessage"), "text/event-stream": {"schema": _EVENT}},
            )
        },
        "/v1/messages/count_tokens": {
            "post": _operation(
                "countMessageTokens",
                "Count the tokens of a conversation as its model gets it; `max_tokens` may be missing",
                "The count.",
                json_content("TokenCount"),
            )
        },
    },
    {
        "InputMessage": {"content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": _BLOCKS}}]}},
        "MessagesRequest": {
            "messages": {
                "type": "array",
                "items": {"$ref": "#/components/schemas/InputMessage"},
                "minItems": 1,
            },
            "system": {"anyOf": [{"type": "string"}, _TEXTS, {"type": "null"}]},
            "tools": {"anyOf": [{"type": "array", "items": {"anyOf": _TOOLS}}, {"type": "null"}]},
        },
    },
)  # fmt: skip
