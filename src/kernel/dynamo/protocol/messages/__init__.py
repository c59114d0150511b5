"""Anthropic's Messages API as values: requests in, chat requests out, JSON bodies and event-stream bytes. Pure."""

from dynamo.protocol.messages.errors import MESSAGES, MessagesDialect, prompt_too_long
from dynamo.protocol.messages.lowering import LoweredMessages, lower
from dynamo.protocol.messages.shapes import MessagesRequest, decode_messages
from dynamo.protocol.messages.sse import (
    BlockKind,
    BodyBlocks,
    StreamBlocks,
    TokenUsage,
    message_body,
    message_end,
    message_start,
)

__all__ = [
    "MESSAGES",
    "BlockKind",
    "BodyBlocks",
    "LoweredMessages",
    "MessagesDialect",
    "MessagesRequest",
    "StreamBlocks",
    "TokenUsage",
    "decode_messages",
    "lower",
    "message_body",
    "message_end",
    "message_start",
    "prompt_too_long",
]
