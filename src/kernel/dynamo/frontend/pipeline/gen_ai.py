"""The attributes of OpenTelemetry's GenAI conventions: their names in one table, and what of a request and its answer they carry.

The conventions are in development, and names move. The next renaming is a line of `GenAi`, and a new `CONVENTIONS`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from dynamo.protocol.openai.headers import HeaderEffects
from dynamo.protocol.openai.shapes import JsonObject

CONVENTIONS: Final = "semantic-conventions-genai, development, 2026-10"
"""The state of the conventions that the names below are of: after semantic-conventions 1.42, where they had moved out."""

MAX_CONTENT_BYTES: Final = 64 * 1024  # of one attribute; collectors cut or refuse longer ones
PROVIDER: Final = "dynamo"


class GenAi(enum.StrEnum):
    """The name of each attribute."""

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    CONVERSATION = "gen_ai.conversation.id"
    OUTPUT_TYPE = "gen_ai.output.type"
    REQUEST_MODEL = "gen_ai.request.model"
    STREAM = "gen_ai.request.stream"
    MAX_TOKENS = "gen_ai.request.max_tokens"
    TEMPERATURE = "gen_ai.request.temperature"
    TOP_P = "gen_ai.request.top_p"
    TOP_K = "gen_ai.request.top_k"
    SEED = "gen_ai.request.seed"
    FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
    PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
    STOP_SEQUENCES = "gen_ai.request.stop_sequences"
    CHOICES = "gen_ai.request.choice.count"
    REASONING_LEVEL = "gen_ai.request.reasoning.level"
    RESPONSE_ID = "gen_ai.response.id"
    RESPONSE_MODEL = "gen_ai.response.model"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
    IMAGE_TOKENS = "gen_ai.usage.image.input_tokens"
    INPUT_MESSAGES = "gen_ai.input.messages"
    OUTPUT_MESSAGES = "gen_ai.output.messages"
    TOOL_DEFINITIONS = "gen_ai.tool.definitions"


OPERATIONS: Final[Mapping[str, str]] = {
    "chat_completions": "chat",
    "completions": "text_completion",
    "messages": "chat",
    "responses": "chat",
}
"""The operation of each endpoint, by its metric label; any other is its own name."""

_PARAMETERS: Final = (
    (GenAi.TEMPERATURE, "temperature"),
    (GenAi.TOP_P, "top_p"),
    (GenAi.TOP_K, "top_k"),
    (GenAi.SEED, "seed"),
    (GenAi.FREQUENCY_PENALTY, "frequency_penalty"),
    (GenAi.PRESENCE_PENALTY, "presence_penalty"),
    (GenAi.REASONING_LEVEL, "reasoning_effort"),
)


def request_attributes(
    endpoint: str, model: str, request: object, effects: HeaderEffects, *, is_stream: bool
) -> dict[str, object]:
    """Return what a request sets, without its content; what it leaves open is left out."""
    found: dict[str, object] = {
        GenAi.OPERATION: OPERATIONS.get(endpoint, endpoint),
        GenAi.PROVIDER: PROVIDER,
        GenAi.REQUEST_MODEL: model,
        GenAi.STREAM: is_stream,
    }
    for name, member in _PARAMETERS:
        if (value := getattr(request, member, None)) is not None:
            found[name] = value
    limit = getattr(request, "max_completion_tokens", None) or getattr(request, "max_tokens", None)
    if limit is not None:
        found[GenAi.MAX_TOKENS] = limit
    stops = getattr(request, "stop", None)
    if stops:
        found[GenAi.STOP_SEQUENCES] = (stops,) if isinstance(stops, str) else tuple(map(str, stops))
    if (choices := getattr(request, "n", None)) not in (None, 1):
        found[GenAi.CHOICES] = choices
    shape = getattr(getattr(request, "response_format", None), "type", None)
    if shape is not None:
        found[GenAi.OUTPUT_TYPE] = "text" if shape == "text" else "json"
    if effects.session_id is not None:
        found[GenAi.CONVERSATION] = effects.session_id
    return found


def content_attributes(request: object) -> dict[str, str]:
    """Return the content of a request, for spans whose operator enabled content; the oldest messages go where it is too long."""
    found: dict[str, str] = {}
    messages = getattr(request, "messages", None)
    if messages is None and isinstance(prompt := getattr(request, "prompt", None), str):
        messages = [{"role": "user", "content": prompt}]
    if messages and (text := _bounded([_message(each) for each in messages])):
        found[GenAi.INPUT_MESSAGES] = text
    if (tools := getattr(request, "tools", None)) and (text := _bounded(tools)):
        found[GenAi.TOOL_DEFINITIONS] = text
    return found


def output_messages(folded: JsonObject) -> str:
    """Return an answer, folded into a chat completion, as the conventions write it; empty where it is too long."""
    return _bounded([
        {**_message(choice["message"]), "finish_reason": choice["finish_reason"]} for choice in folded["choices"]
    ])  # fmt: skip


def _message(message: JsonObject) -> JsonObject:
    parts: list[JsonObject] = []
    if reasoning := message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": reasoning})
    content = message.get("content")
    if message.get("role") == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content})
    elif isinstance(content, str):
        parts.append({"type": "text", "content": content})
    else:
        for part in content or ():
            is_text = isinstance(part, Mapping) and part.get("type") == "text"
            # Of media the kind alone: an image would not fit into a span.
            parts.append({"type": "text", "content": part["text"]} if is_text else {"type": str(part.get("type"))})
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        called = {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
        parts.append({"type": "tool_call", **called})
    return {"role": message.get("role", "user"), "parts": parts}


def _bounded(values: Sequence[object]) -> str:
    """Return a list as JSON within the limit, without its first members if need be."""
    encoded = [msgspec.json.encode(value).decode() for value in values]
    size = sum(len(each) + 1 for each in encoded) + 1
    while encoded and size > MAX_CONTENT_BYTES:
        size -= len(encoded.pop(0)) + 1
    return f"[{','.join(encoded)}]" if encoded else ""
