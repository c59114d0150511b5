"""OpenAI's bodies where no tokenizer is: the prompt of a model that takes text, and the chunks of its stream.

Such a model receives the client's own body and yields OpenAI's chunk objects. Without a tokenizer a token is one byte of
UTF-8, as for every model known only by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

_CHAT: Final = "chat.completion.chunk"
_COMPLETION: Final = "text_completion"


class TextPiece(NamedTuple):
    """One piece of plain text, as a callable yields it."""

    text: str
    finish_reason: str | None = None  # on the last piece
    usage: Mapping[str, Any] | None = None


def conversation_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as one text: a lone message is its own text, several are lines `role: text`. Media are left out."""
    if len(messages) == 1:
        return _content_text(messages[0].get("content"))
    return "\n".join(f"{message.get('role')}: {_content_text(message.get('content'))}" for message in messages)


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """Return the size of a request's prompt: the bytes of its messages' texts, or of its prompt."""
    messages = body.get("messages")
    if isinstance(messages, list):
        return sum(count(_content_text(message.get("content"))) for message in messages)
    prompt = body.get("prompt")
    return count(prompt) if isinstance(prompt, str) else 0


def count(text: str) -> int:
    """Count the tokens of a text."""
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def cut(text: str, tokens: int) -> str:
    """Return the longest beginning of `text` that is not longer than `tokens`; a code point is never divided."""
    return text.encode(errors="replace")[: max(0, tokens)].decode(errors="ignore")


class TextDelta(NamedTuple):
    """What one chunk of a text model's stream adds to one choice."""

    choice: int
    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()  # as OpenAI's chunks carry them
    logprobs: Mapping[str, Any] | None = None  # of the API's own shape
    finish_reason: str | None = None  # on the choice's last delta


class TextChunk(NamedTuple):
    """One chunk object of a text model's stream."""

    id: str | None
    deltas: Sequence[TextDelta]
    usage: Mapping[str, Any] | None = None


def stream_piece(
    head: Mapping[str, Any], piece: TextPiece, *, is_chat: bool, is_first: bool, index: int = 0
) -> dict[str, Any]:
    """Return the chunk object of one piece; `head` holds id, created and model."""
    choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish_reason, "logprobs": None}
    if is_chat:
        choice["delta"] = {"content": piece.text, "role": "assistant"} if is_first else {"content": piece.text}
    else:
        choice["text"] = piece.text
    chunk: dict[str, Any] = {**head, "object": _CHAT if is_chat else _COMPLETION, "choices": [choice]}
    if piece.usage is not None:
        chunk["usage"] = dict(piece.usage)
    return chunk


def read_chunk(chunk: Any) -> TextChunk:
    """Return what a chunk object holds. Raises ValueError that names what is not of OpenAI's shape."""
    if not isinstance(chunk, Mapping) or not isinstance(chunk.get("choices"), list):
        raise ValueError(f"expected an OpenAI chunk with choices, got {_shown(chunk)}")
    id, usage = chunk.get("id"), chunk.get("usage")
    if usage is not None and not isinstance(usage, Mapping):
        raise ValueError(f"usage must be an object, got {_shown(usage)}")
    return TextChunk(id if isinstance(id, str) and id else None, [_delta(one) for one in chunk["choices"]], usage)


def _delta(choice: Any) -> TextDelta:
    if not isinstance(choice, Mapping):
        raise ValueError(f"a choice must be an object, got {_shown(choice)}")
    index, reason, logprobs = choice.get("index") or 0, choice.get("finish_reason"), choice.get("logprobs")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ValueError(f"a choice's index must be an integer from 0, got {index!r}")
    if logprobs is not None and not isinstance(logprobs, Mapping):
        raise ValueError(f"logprobs must be an object, got {_shown(logprobs)}")
    delta = choice.get("delta")
    members: Mapping[str, Any] = delta if isinstance(delta, Mapping) else {"content": choice.get("text")}
    text = members.get("content")
    reasoning = members.get("reasoning_content") or members.get("reasoning")
    if not all(isinstance(value, str | None) for value in (text, reasoning, reason)):
        raise ValueError("content, reasoning_content and finish_reason must be strings")
    calls = members.get("tool_calls") or []
    if members.get("function_call"):  # the older name of a single call
        calls = [{"index": 0, "function": members["function_call"]}]
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise ValueError("tool_calls must be a list of objects with an index and a function of strings")
    return TextDelta(index, text or "", reasoning or "", calls, logprobs, reason)


def _is_call(call: Any) -> bool:
    if not isinstance(call, Mapping) or not isinstance(call.get("index"), int | None):
        return False
    function = call.get("function")
    if not isinstance(function, Mapping):
        return False
    return all(
        isinstance(value, str | None) for value in (call.get("id"), function.get("name"), function.get("arguments"))
    )


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping) and "text" in part)


def _shown(value: Any) -> str:
    return f"an object with {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
