"""OpenAI's bodies where no tokenizer is: what a model that takes text is asked, and what its stream says.

Such a model receives the client's own body and yields OpenAI's chunk objects. Without a tokenizer a token is one byte of
UTF-8, as for every model known only by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

__all__ = ["TextPiece", "conversation_text", "count", "cut", "prompt_tokens", "read_piece", "stream_piece"]

_CHAT: Final = "chat.completion.chunk"
_COMPLETION: Final = "text_completion"


class TextPiece(NamedTuple):
    """One chunk of a text model's stream."""

    text: str
    finish_reason: str | None = None  # on the last piece
    usage: Mapping[str, Any] | None = None


def conversation_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as one text: a lone message is its own text, several are lines `role: text`. Media are left out."""
    if len(messages) == 1:
        return _content_text(messages[0].get("content"))
    return "\n".join(f"{message.get('role')}: {_content_text(message.get('content'))}" for message in messages)


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """What the prompt of a request counts: the bytes of its messages' texts, or of its prompt."""
    messages = body.get("messages")
    if isinstance(messages, list):
        return sum(count(_content_text(message.get("content"))) for message in messages)
    prompt = body.get("prompt")
    return count(prompt) if isinstance(prompt, str) else 0


def count(text: str) -> int:
    """How many tokens a text is."""
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def cut(text: str, tokens: int) -> str:
    """The longest beginning of `text` that is not longer than `tokens`; a code point is never divided."""
    return text.encode(errors="replace")[: max(0, tokens)].decode(errors="ignore")


def stream_piece(head: Mapping[str, Any], piece: TextPiece, *, is_chat: bool, is_first: bool) -> dict[str, Any]:
    """The chunk object of one piece; `head` holds id, created and model."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": piece.finish_reason, "logprobs": None}
    if is_chat:
        choice["delta"] = {"content": piece.text, "role": "assistant"} if is_first else {"content": piece.text}
    else:
        choice["text"] = piece.text
    chunk: dict[str, Any] = {**head, "object": _CHAT if is_chat else _COMPLETION, "choices": [choice]}
    if piece.usage is not None:
        chunk["usage"] = dict(piece.usage)
    return chunk


def read_piece(chunk: Any) -> TextPiece:
    """What a chunk object of one choice says. Raises ValueError that names what it holds and nobody could show."""
    if not isinstance(chunk, Mapping) or not isinstance(chunk.get("choices"), list):
        raise ValueError(f"expected an OpenAI chunk with choices, got {_shown(chunk)}")
    usage = chunk.get("usage")
    if usage is not None and not isinstance(usage, Mapping):
        raise ValueError(f"usage must be an object, got {_shown(usage)}")
    if not chunk["choices"]:
        return TextPiece("", usage=usage)
    choice = chunk["choices"][0]
    if len(chunk["choices"]) > 1 or not isinstance(choice, Mapping) or choice.get("index") not in (0, None):
        raise ValueError("a chunk must hold one choice with index 0: choices are asked for one by one")
    delta = choice.get("delta")
    said: Mapping[str, Any] = delta if isinstance(delta, Mapping) else {"content": choice.get("text")}
    for name in ("tool_calls", "function_call", "reasoning_content"):
        if said.get(name):
            raise ValueError(f"{name} from a model that takes text is not in this version")
    text = said.get("content")
    reason = choice.get("finish_reason")
    if not isinstance(text, str | None) or not isinstance(reason, str | None):
        raise ValueError("content and finish_reason must be strings")
    return TextPiece(text or "", reason, usage)


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping) and "text" in part)


def _shown(value: Any) -> str:
    return f"an object with {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
