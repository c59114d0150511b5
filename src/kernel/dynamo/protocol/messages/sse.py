"""The bytes of a streamed answer and of a whole one. What never changes of an event is made once for its block."""

from __future__ import annotations

import enum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from dynamo.protocol.openai.escaping import json_text

SIGNATURE: Final = "ZHluYW1v"
"""Of every thinking block: clients drop blocks without one, and nothing here checks it."""


class BlockKind(enum.Enum):
    TEXT = enum.auto()
    THINKING = enum.auto()
    TOOL_USE = enum.auto()


_MEMBERS: Final = {
    BlockKind.TEXT: (b'"text_delta","text":', b'{"type":"text","text":""}'),
    BlockKind.THINKING: (b'"thinking_delta","thinking":', b'{"type":"thinking","thinking":"","signature":""}'),
    BlockKind.TOOL_USE: (b'"input_json_delta","partial_json":', b""),
}
_SIGNED: Final = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"signature_delta","signature":%b}}\n\n'
_STOP: Final = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_TAIL: Final = b"}}\n\n"


class TokenUsage(Struct, frozen=True):
    """What an answer took, in tokens; `cached` are those of the prompt that the engine had."""

    prompt: int = 0
    output: int = 0
    cached: int = 0

    def json(self) -> bytes:
        """Return the `usage` member: its `input_tokens` are those that were not cached."""
        return (
            b'{"input_tokens":%d,"cache_creation_input_tokens":0,"cache_read_input_tokens":%d,"output_tokens":%d}'
            % (max(0, self.prompt - self.cached), self.cached, self.output)
        )


class StreamBlocks:
    """A `BlockWriter` whose blocks are events."""

    __slots__ = ("_events", "_head", "_index", "_shows_thinking")

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self._events: list[bytes] = []
        self._head = b""  # of the next delta of the open block
        self._index = -1
        self._shows_thinking = shows_thinking

    def begin(self, kind: BlockKind, call_id: str, name: str) -> None:
        self._index += 1
        delta, block = _MEMBERS[kind]
        if kind is BlockKind.TOOL_USE:
            block = b'{"type":"tool_use","id":%b,"name":%b,"input":{}}' % (json_text(call_id), json_text(name))
        self._head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b'
            % (self._index, delta)
        )
        self._events.append(
            b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
            % (self._index, block)
        )

    def piece(self, kind: BlockKind, text: str) -> None:
        if self._shows_thinking or kind is not BlockKind.THINKING:
            self._events.append(self._head + json_text(text) + _TAIL)

    def end(self, kind: BlockKind) -> None:
        if kind is BlockKind.THINKING:
            self._events.append(_SIGNED % (self._index, json_text(SIGNATURE)))
        self._events.append(_STOP % self._index)

    def delta(self, text: str) -> bytes:
        """Return the event of more text in the open block, past the events that wait."""
        return self._head + json_text(text) + _TAIL

    def ends(self) -> tuple[bytes, bytes]:
        """Return what stands before and behind the JSON string of a text in a delta of the open block."""
        return self._head, _TAIL

    def taken(self) -> bytes:
        """Return the events since the last call."""
        events, self._events = b"".join(self._events), []
        return events


class BodyBlocks:
    """A `BlockWriter` whose blocks are the members of a body."""

    __slots__ = ("_head", "_shows_thinking", "_texts", "blocks")

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self.blocks: list[bytes] = []
        self._texts: list[str] = []
        self._head = b""
        self._shows_thinking = shows_thinking

    def begin(self, kind: BlockKind, call_id: str, name: str) -> None:
        self._texts = []
        self._head = b'{"type":"tool_use","id":%b,"name":%b,"input":' % (json_text(call_id), json_text(name))

    def piece(self, kind: BlockKind, text: str) -> None:
        self._texts.append(text)

    def end(self, kind: BlockKind) -> None:
        text = "".join(self._texts)
        if kind is BlockKind.TEXT:
            self.blocks.append(b'{"type":"text","text":%b}' % json_text(text))
        elif kind is BlockKind.THINKING:
            shown = json_text(text if self._shows_thinking else "")
            self.blocks.append(b'{"type":"thinking","thinking":%b,"signature":%b}' % (shown, json_text(SIGNATURE)))
        else:
            self.blocks.append(self._head + text.encode("utf-8", "replace") + b"}")


def message_start(id: str, model: str, usage: TokenUsage) -> bytes:
    """Return the first event of a stream: nothing was output before it, whatever comes together with it."""
    return (
        b'event: message_start\ndata: {"type":"message_start","message":{"id":%b,"type":"message","role":"assistant",'
        b'"model":%b,"content":[],"stop_reason":null,"stop_sequence":null,"usage":%b}}\n\n'
        % (json_text(id), json_text(model), replace(usage, output=0).json())
    )


def message_end(stop_reason: str | None, stop_sequence: str | None, usage: TokenUsage, nvext: bytes | None) -> bytes:
    """Return the last events of a stream."""
    return (
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":%b,"stop_sequence":%b},'
        b'"usage":%b%b}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'
        % (_or_null(stop_reason), _or_null(stop_sequence), usage.json(), _extension(nvext))
    )


def message_body(
    id: str,
    model: str,
    blocks: list[bytes],
    stop_reason: str | None,
    stop_sequence: str | None,
    usage: TokenUsage,
    *,
    nvext: bytes | None = None,
) -> bytes:
    """Return a whole answer; `blocks` are ready JSON objects."""
    return (
        b'{"id":%b,"type":"message","role":"assistant","model":%b,"content":[%b],"stop_reason":%b,"stop_sequence":%b,'
        b'"usage":%b%b}'
        % (
            json_text(id),
            json_text(model),
            b",".join(blocks),
            _or_null(stop_reason),
            _or_null(stop_sequence),
            usage.json(),
            _extension(nvext),
        )
    )


def _or_null(text: str | None) -> bytes:
    return b"null" if text is None else json_text(text)


def _extension(nvext: bytes | None) -> bytes:
    return b"" if nvext is None else b',"nvext":' + nvext
