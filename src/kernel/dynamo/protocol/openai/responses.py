"""The bodies of unary answers, and log probabilities in OpenAI's two shapes.

Built from plain values once per request, so clarity beats speed here; the per-token path is `sse`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Raw, Struct
from msgspec.json import Encoder

from dynamo.protocol.openai.escaping import json_line, json_text
from dynamo.protocol.openai.sse import usage_json

__all__ = [
    "ChatLogprobPieces",
    "FinishedChoice",
    "TokenLogprob",
    "TopTokenLogprob",
    "chat_body",
    "chat_logprobs",
    "completion_body",
    "completion_logprobs",
    "token_logprobs",
    "tool_call",
    "usage_json",
]

LOWEST_LOGPROB: Final = -9999.0  # stands for minus infinity, which JSON cannot carry


# -- log probabilities --------------------------------------------------------------------------------------------------


class TopTokenLogprob(Struct, frozen=True):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(Struct, frozen=True):
    """One generated token with its alternatives: the generated one is among them, unless none were requested."""

    token: str
    logprob: float
    token_id: int
    bytes: list[int] | None
    top_logprobs: list[TopTokenLogprob]


def token_logprobs(
    token_ids: Sequence[int],
    log_probs: Sequence[float | None] | None,
    top_logprobs: Sequence[Sequence[Mapping[str, Any]]] | None,
    token_text: Callable[[int], str],
    *,
    token_bytes: Callable[[int], bytes] | None = None,
    tokens: Sequence[str | None] | None = None,
    as_token_ids: bool = False,
    has_alternatives: bool = True,
) -> list[TokenLogprob]:
    """Return the log probabilities of a backend's chunk; texts the backend left out are filled in.

    `log_probs`, `top_logprobs` and `tokens` are aligned with `token_ids`; positions that a backend leaves out are left
    out. Without `has_alternatives`, which were not requested, none are shown. `as_token_ids` (the request's `return_tokens_as_token_ids`) replaces every text by `token_id:<id>`.
    """
    if log_probs is None and not top_logprobs:
        return []

    def text_of(token_id: int, given: str | None) -> str:
        if as_token_ids:
            return f"token_id:{token_id}"
        return token_text(token_id) if given is None else given

    def bytes_of(token_id: int, text: str, said: Iterable[int] | None) -> list[int] | None:
        if said is not None:
            return list(said)
        if token_bytes is not None:
            return list(token_bytes(token_id))
        return None if as_token_ids else list(text.encode("utf-8", "replace"))

    items: list[TokenLogprob] = []
    for position, token_id in enumerate(token_ids):
        entries = top_logprobs[position] if top_logprobs is not None and position < len(top_logprobs) else ()
        entries = sorted(entries, key=lambda entry: entry.get("rank") or 0)
        own = next((entry for entry in entries if entry.get("token_id") == token_id), None)
        given = log_probs[position] if log_probs is not None and position < len(log_probs) else None
        if given is not None:
            logprob = finite(given)
        elif own is not None:
            logprob = finite(own["logprob"])
        else:
            continue
        said = tokens[position] if tokens is not None and position < len(tokens) else None
        text = text_of(token_id, said if said is not None else own.get("token") if own is not None else None)
        raw = bytes_of(token_id, text, own.get("bytes") if own is not None else None)
        alternatives: list[TopTokenLogprob] = []
        for entry in entries if has_alternatives else ():
            other_id = int(entry["token_id"])
            other = text_of(other_id, entry.get("token"))
            alternatives.append(
                TopTokenLogprob(other, finite(entry["logprob"]), bytes_of(other_id, other, entry.get("bytes")))
            )
        if own is None and has_alternatives:
            alternatives.append(TopTokenLogprob(text, logprob, raw))
        items.append(TokenLogprob(text, logprob, token_id, raw, alternatives))
    return items


def finite(logprob: float) -> float:
    """Return a log probability JSON can carry: minus infinity (and what is no number) becomes -9999."""
    return float(logprob) if math.isfinite(logprob) else LOWEST_LOGPROB


def chat_logprobs(items: Sequence[TokenLogprob]) -> bytes:
    """Return `{"content":[...],"refusal":null}`, for `ChatStream.delta` and `FinishedChoice`."""
    return json_line({"content": items, "refusal": None})


def written_chat_logprobs(pieces: Sequence[Sequence[bytes]]) -> bytes:
    """Return what `chat_logprobs` returns of all items, of which each piece is some, written without their brackets."""
    return b'{"content":[' + b",".join([content for (content,) in pieces]) + b'],"refusal":null}'


class ChatLogprobPieces(dict[int, tuple[bytes, bytes]]):
    """`chat_logprobs` of one token without alternatives, the shape of nearly every streamed chunk: token id -> what stands
    before and behind its log probability.

    Filled on demand; only ids below `size` are kept.
    """

    __slots__ = ("_size", "_token_bytes", "_token_text")

    def __init__(self, token_text: Callable[[int], str], token_bytes: Callable[[int], bytes], *, size: int) -> None:
        super().__init__()
        self._token_text, self._token_bytes, self._size = token_text, token_bytes, size

    def __missing__(self, token_id: int) -> tuple[bytes, bytes]:
        text, raw = self._token_text(token_id), list(self._token_bytes(token_id))
        own = TokenLogprob(text, _MARK, token_id, raw, [])
        # Inside a text the quotes of the member's name would be escaped, so only the member is found.
        before, behind = chat_logprobs([own]).split(_MEMBER + _encode(_MARK))
        before += _MEMBER
        if 0 <= token_id < self._size:
            self[token_id] = before, behind
        return before, behind

    def line(self, token_id: int, logprob: float) -> bytes:
        """Return `chat_logprobs([...])` of this token."""
        before, behind = self[token_id]
        return before + _encode(finite(logprob)) + behind


_encode: Final = Encoder().encode
_MARK: Final = -0.5
_MEMBER: Final = b'"logprob":'


_COMPLETION_LISTS: Final = (b"tokens", b"token_logprobs", b"top_logprobs", b"text_offset")


def completion_logprob_pieces(items: Sequence[TokenLogprob], *, text_offset: int = 0) -> Sequence[bytes]:
    """Return the four lists of completions, written without their brackets; `text_offset` counts the characters before the first."""
    offsets: list[int] = []
    for item in items:
        offsets.append(text_offset)
        text_offset += len(item.token)
    lists: tuple[list[Any], ...] = (
        [item.token for item in items],
        [item.logprob for item in items],
        [{top.token: top.logprob for top in item.top_logprobs} for item in items],
        offsets,
    )
    return [json_line(each)[1:-1] for each in lists]


def written_completion_logprobs(pieces: Sequence[Sequence[bytes]]) -> bytes:
    """Return `{"tokens","token_logprobs","top_logprobs","text_offset"}` of pieces that follow one another."""
    lists = [b",".join(each) for each in zip(*pieces, strict=True)]
    members = [b'"' + name + b'":[' + each + b"]" for name, each in zip(_COMPLETION_LISTS, lists, strict=True)]
    return b"{" + b",".join(members) + b"}"


def completion_logprobs(items: Sequence[TokenLogprob], *, text_offset: int = 0) -> bytes:
    """Return the log probabilities of some tokens as completions have them."""
    return written_completion_logprobs([completion_logprob_pieces(items, text_offset=text_offset)])


# -- answers ------------------------------------------------------------------------------------------------------------


class FinishedChoice(Struct):
    """One finished choice. `logprobs` is ready JSON of the shape of its surface."""

    index: int
    text: str | None
    finish_reason: str | None
    logprobs: bytes | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    beside: Mapping[str, Any] | None = None  # further members


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as a message shows it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_body(
    id: str,
    created: int,
    model: str,
    choices: Iterable[FinishedChoice],
    usage: bytes | None,
    *,
    nvext: bytes | None = None,
    reasoning_field: str = "reasoning_content",
    beside: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the body of a unary chat answer; `usage` from `usage_json`, `nvext` from `sse.nvext_json`.

    `beside` are further members.
    """
    body: dict[str, Any] = {
        "id": id,
        "choices": [
            {
                "index": choice.index,
                "message": _message(choice, reasoning_field),
                "finish_reason": choice.finish_reason,
                "logprobs": _raw(choice.logprobs),
                **(choice.beside or {}),
            }
            for choice in choices
        ],
        "created": created,
        "model": model,
        "object": "chat.completion",
        **(beside or {}),
    }
    return json_line(_with(body, usage=usage, nvext=nvext))


def plain_chat_body(id: str, created: int, model: str, text: str, finish_reason: str, usage: bytes | None) -> bytes:
    """Return what `chat_body` returns of one choice that has a text and nothing else, without objects in between."""
    return (
        b'{"id":%b,"choices":[{"index":0,"message":{"content":%b,"refusal":null,"role":"assistant"},"finish_reason":%b,'
        b'"logprobs":null}],"created":%d,"model":%b,"object":"chat.completion"%b}'
    ) % (
        json_text(id),
        json_text(text),
        json_text(finish_reason),
        created,
        json_text(model),
        b"" if usage is None else b',"usage":' + usage,
    )


def _message(choice: FinishedChoice, reasoning_field: str) -> dict[str, Any]:
    message: dict[str, Any] = {"content": choice.text, "refusal": None, "role": "assistant"}
    if choice.tool_calls:
        message["tool_calls"] = choice.tool_calls
    if choice.reasoning_content is not None:
        message[reasoning_field] = choice.reasoning_content
    return message


def completion_body(
    id: str,
    created: int,
    model: str,
    choices: Iterable[FinishedChoice],
    usage: bytes | None,
    *,
    nvext: bytes | None = None,
) -> bytes:
    """Return the body of a unary text completion."""
    body: dict[str, Any] = {
        "id": id,
        "choices": [
            {
                "text": choice.text or "",
                "index": choice.index,
                "logprobs": _raw(choice.logprobs),
                "finish_reason": choice.finish_reason,
                **(choice.beside or {}),
            }
            for choice in choices
        ],
        "created": created,
        "model": model,
        "system_fingerprint": None,
        "object": "text_completion",
    }
    return json_line(_with(body, usage=usage, nvext=nvext))


def _raw(encoded: bytes | None) -> Raw | None:
    return None if encoded is None else Raw(encoded)


def _with(body: dict[str, Any], **members: bytes | None) -> dict[str, Any]:
    body.update({name: Raw(value) for name, value in members.items() if value is not None})
    return body
