"""The bytes of a streamed answer, spliced: what never changes is made once per stream, only the text is escaped.

One `delta` call per visible piece of text, about 0.3 us; no dict, no model object. The keys stand in the order of
1.6.1. Every method returns one complete event (or `b""` when there is nothing a client could see), so events may be
joined into one write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from dynamo.protocol.openai.escaping import json_line, json_text

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"

_encode: Final = msgspec.json.Encoder().encode

_FINISH: Final[dict[str | None, bytes]] = {
    None: b"null",
    **{reason: b'"%b"' % reason.encode() for reason in ("stop", "length", "content_filter", "tool_calls")},
}


_UNFINISHED: Final = b'},"finish_reason":null,"logprobs":'


class ChatStream:
    """One streamed chat answer.

    `continuous_usage` promises usage on every chunk: pass `usage` to each call. The role is sent once per choice, in its
    first delta.
    """

    __slots__ = ("_bare_head", "_first", "_head", "_plain", "_scored_end", "_tail", "_usage_head")

    def __init__(self, id: str, created: int, model: str, *, n: int = 1) -> None:
        opening = b'data: {"id":%b,"choices":[' % json_text(id)
        closing = b'],"created":%d,"model":%b,"object":"chat.completion.chunk"' % (created, json_text(model))
        self._bare_head = [opening + b'{"index":%d,"delta":{' % index for index in range(n)]
        self._head = [head + b'"content":' for head in self._bare_head]
        self._tail = closing
        self._plain = _UNFINISHED + b"null}" + closing + b"}\n\n"
        self._scored_end = b"}" + closing + b"}\n\n"
        # Per choice: what follows the text. The first time it also names the role, then it is `_plain`.
        self._first = [b',"role":"assistant"' + self._plain] * n
        self._usage_head = opening + closing

    def delta(
        self,
        index: int,
        text: str,
        *,
        finish_reason: str | None = None,
        logprobs: bytes | None = None,
        usage: bytes | None = None,
        token_ids: Sequence[int] | None = None,
        nvext: bytes | None = None,
    ) -> bytes:
        """Return the next piece of choice `index`; `b""` when it shows nothing (no text, no reason to finish, no log probabilities).

        `logprobs`, `usage` and `nvext` are ready JSON objects (`responses.chat_logprobs`, `usage_json`, `nvext_json`);
        `token_ids` is short for an `nvext` with only `completion_token_ids`.
        """
        if (
            finish_reason is None
            and logprobs is None
            and usage is None
            and nvext is None
            and token_ids is None
            and text
        ):
            first = self._first
            tail = first[index]
            first[index] = self._plain
            return self._head[index] + (_encode(text) if text.isascii() else json_text(text)) + tail
        if not text and finish_reason is None and logprobs is None:
            return b""
        members = b'"content":' + json_text(text) if text or not self.has_role(index) else b""
        return self.members(
            index,
            members,
            finish_reason=finish_reason,
            logprobs=logprobs,
            usage=usage,
            token_ids=token_ids,
            nvext=nvext,
        )

    def scored(self, index: int, text: str, logprobs: bytes) -> bytes:
        """Do what `delta` does for a text, which is not empty, and its log probabilities."""
        if self._first[index] is not self._plain:
            return self.delta(index, text, logprobs=logprobs)
        return b"".join((self._head[index], json_text(text), _UNFINISHED, logprobs, self._scored_end))

    def plain_member(self, index: int, name: bytes, text: str) -> bytes:
        """Return a delta of one other member, a text; `name` is `"reasoning_content":` or the like."""
        member = name + json_text(text)
        if self._first[index] is not self._plain:
            return self.members(index, member)
        return b"".join((self._bare_head[index], member, self._plain))

    def members(
        self,
        index: int,
        members: bytes,
        *,
        finish_reason: str | None = None,
        logprobs: bytes | None = None,
        usage: bytes | None = None,
        token_ids: Sequence[int] | None = None,
        nvext: bytes | None = None,
        beside: bytes = b"",
        behind: bytes = b"",
    ) -> bytes:
        """Return a delta of other members (`"reasoning_content":"..."`, `"tool_calls":[...]`), as JSON without braces.

        `beside` are further members of the choice, and `behind` those of the chunk, each with its comma.
        """
        if not self.has_role(index):
            members = members + b',"role":"assistant"' if members else b'"role":"assistant"'
            self._first[index] = self._plain
        return b"".join(
            (
                self._bare_head[index],
                members,
                b'},"finish_reason":',
                _reason(finish_reason),
                b',"logprobs":',
                logprobs or b"null",
                beside,
                b"}",
                self._tail,
                _extras(usage, token_ids, nvext),
                behind,
                b"}\n\n",
            )
        )

    def usage_chunk(self, usage: bytes, *, nvext: bytes | None = None) -> bytes:
        """Return the chunk without choices that carries the final usage, after every choice has finished."""
        return b"".join((self._usage_head, _extras(usage, None, nvext), b"}\n\n"))

    def plain_ends(self) -> tuple[bytes, bytes] | None:
        """Return what stands before and behind the text's JSON string in a choice-0 event with no other content; None while
        the role is still to be sent."""
        return (self._head[0], self._plain) if self.has_role(0) else None

    def has_role(self, index: int) -> bool:
        """Return whether an event of choice `index` has named the role."""
        return self._first[index] is self._plain


class CompletionStream:
    """One streamed text completion; `choices` counts every index (prompts x n)."""

    __slots__ = ("_head", "_plain", "_tail", "_usage_head")

    def __init__(self, id: str, created: int, model: str, *, choices: int = 1) -> None:
        opening = b'data: {"id":%b,"choices":[' % json_text(id)
        self._tail = b'],"created":%d,"model":%b,"system_fingerprint":null,"object":"text_completion","usage":' % (
            created,
            json_text(model),
        )
        self._head = opening + b'{"text":'
        self._plain = [
            b',"index":%d,"logprobs":null,"finish_reason":null}' % index + self._tail + b"null}\n\n"
            for index in range(choices)
        ]
        self._usage_head = opening + self._tail

    def delta(
        self,
        index: int,
        text: str,
        *,
        finish_reason: str | None = None,
        logprobs: bytes | None = None,
        usage: bytes | None = None,
        token_ids: Sequence[int] | None = None,
        nvext: bytes | None = None,
        beside: bytes = b"",
    ) -> bytes:
        """Return the next piece of choice `index`; as `ChatStream.delta`, with `responses.completion_logprobs`.

        `beside` are further members of the choice, each with its comma.
        """
        if (
            finish_reason is None
            and logprobs is None
            and usage is None
            and nvext is None
            and token_ids is None
            and not beside
            and text
        ):
            return self._head + (_encode(text) if text.isascii() else json_text(text)) + self._plain[index]
        if not text and finish_reason is None and logprobs is None and not beside:
            return b""
        return b"".join(
            (
                self._head,
                json_text(text),
                b',"index":%d,"logprobs":' % index,
                logprobs or b"null",
                b',"finish_reason":',
                _reason(finish_reason),
                beside,
                b"}",
                self._tail,
                usage or b"null",
                _extras(None, token_ids, nvext),
                b"}\n\n",
            )
        )

    def usage_chunk(self, usage: bytes, *, nvext: bytes | None = None) -> bytes:
        """Return the chunk without choices that carries the final usage, after every choice has finished."""
        return b"".join((self._usage_head, usage, _extras(None, None, nvext), b"}\n\n"))

    def plain_ends(self) -> tuple[bytes, bytes]:
        """Return what stands before and behind the text's JSON string in an event of choice 0 with no other content."""
        return self._head, self._plain[0]


def usage_json(
    prompt_tokens: int,
    completion_tokens: int,
    *,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
    image_tokens: int = 0,
) -> bytes:
    """Return the `usage` object; the details stand in it only when known."""
    prompt = b"" if cached_tokens is None else b',"prompt_tokens_details":{"cached_tokens":%d}' % cached_tokens
    if image_tokens:
        found = b',"prompt_tokens_details":{"cached_tokens":%d,"image_tokens":%d}'
        prompt = found % (cached_tokens or 0, image_tokens)
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d%b%b}' % (
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        prompt,
        b"" if reasoning_tokens is None else b',"completion_tokens_details":{"reasoning_tokens":%d}' % reasoning_tokens,
    )


def nvext_json(**members: Any) -> bytes | None:
    """Return the `nvext` object of a response from its members that are not None; None when there are none."""
    present = {name: value for name, value in members.items() if value is not None}
    return json_line(present) if present else None


def annotation_event(name: str, value: str) -> bytes:
    """Return an annotation, which precedes the data: a named event whose value is a JSON string in a comment line.

    `token_ids` go in as their JSON text: `annotation_event("token_ids", "[1,2]")`.

    Raises:
        ValueError: the name could not stand in an `event:` line.
    """
    if not name or not name.isprintable():
        raise ValueError(f"annotation names are single printable lines, got {name[:64]!r}")
    return b"event: %b\n: %b\n\n" % (name.encode("utf-8", "replace"), json_text(value))


def named_event(name: str, data: bytes) -> bytes:
    """Return an event beside the chunks; `data` is ready JSON on one line."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _reason(finish_reason: str | None) -> bytes:
    known = _FINISH.get(finish_reason)
    return known if known is not None else json_text(finish_reason or "")


def _extras(usage: bytes | None, token_ids: Sequence[int] | None, nvext: bytes | None) -> bytes:
    """Return the optional members after `object`, each with its comma."""
    if token_ids is not None:
        ids = b'"completion_token_ids":' + _encode(token_ids)
        nvext = b"{" + ids + b"}" if nvext is None else b"{" + ids + b"," + nvext[1:]
    return (b"" if usage is None else b',"usage":' + usage) + (b"" if nvext is None else b',"nvext":' + nvext)
