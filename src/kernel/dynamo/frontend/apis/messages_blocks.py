"""From the events of an answer to content blocks: which block opens when, and what never becomes one.

The rules are the same for a stream and for a body, because both go through `BlockOrder`:

- One block is open at a time. What is of another kind closes it and takes the next index.
- White space that nothing of its kind follows is no block of its own: it is held until something does.
- A call is sent once it is whole, and its input is an object. One that was cut off, or is no call after all, is not
  sent. The input of a tool that requests it (`eager_input_streaming`) goes out as it is written.
- An answer without any block has one empty text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, Protocol

import msgspec

from dynamo.protocol.messages.sse import BlockKind
from dynamo.text.output import (
    CallArguments,
    CallBegan,
    CallDropped,
    CallEnded,
    Content,
    OutputEvent,
    Reasoning,
)


class BlockWriter(Protocol):
    """Writes blocks, one after the other."""

    def begin(self, kind: BlockKind, call_id: str, name: str) -> None:
        """Open a block; `call_id` and `name` are those of a call, and else empty."""

    def piece(self, kind: BlockKind, text: str) -> None:
        """Add to the open block: text, reasoning, or the JSON of an input."""

    def end(self, kind: BlockKind) -> None:
        """Close the open block."""


class _Call:
    __slots__ = ("has_input", "id", "is_eager", "is_over", "name", "pieces")

    def __init__(self, call_id: str, name: str, *, is_eager: bool) -> None:
        self.id, self.name, self.is_eager = call_id, name, is_eager
        self.pieces: list[str] = []
        self.has_input = self.is_over = False


class BlockOrder:
    """Takes the events of one answer in any pieces, and passes a writer its blocks."""

    __slots__ = ("_calls", "_calls_last", "_eager", "_held", "_held_kind", "_writer", "blocks", "has_called", "open")

    def __init__(self, writer: BlockWriter, eager: Collection[str] = (), *, calls_last: bool = False) -> None:
        """`eager`: the tools whose input is written before it is known to be whole.

        `calls_last`: calls are sent at the end, as an engine that reads its own text may add to any of them until then.
        """
        self._writer, self._eager, self._calls_last = writer, () if calls_last else eager, calls_last
        self._calls: list[_Call] = []
        self._held = ""  # white space that may begin a block of its kind
        self._held_kind = BlockKind.TEXT
        self.open: BlockKind | None = None
        self.blocks = 0
        self.has_called = False  # a whole call was sent

    def take(self, events: Iterable[OutputEvent]) -> None:
        """Take the next events, and write what they make known."""
        for event in events:
            match event:
                case Content(text):
                    self._text(BlockKind.TEXT, text)
                case Reasoning(text):
                    self._text(BlockKind.THINKING, text)
                case CallBegan(name, call_id):
                    call = _Call(call_id or "", name, is_eager=name in self._eager)
                    self._calls.append(call)
                    if call.is_eager:
                        self._begin(BlockKind.TOOL_USE, call.id, name)
                case CallArguments(text, number):
                    self._arguments(self._calls[-1 if number is None else number], text)
                case CallEnded():
                    if not self._calls_last:
                        self._end_call(self._calls[-1])
                case CallDropped(text):
                    self._drop(self._calls[-1])
                    self._text(BlockKind.TEXT, text)

    def finish(self, *, is_cut: bool) -> None:
        """Close what is open; of an answer without blocks make an empty one. `is_cut`: the engine had to stop."""
        if self._calls_last:
            for call in self._calls:
                if not (is_cut and _is_broken("".join(call.pieces))):
                    self._end_call(call)
        if self.blocks == 0:
            held = self._held if self._held_kind is BlockKind.TEXT else ""
            self._begin(BlockKind.TEXT)
            if held:
                self._writer.piece(BlockKind.TEXT, held)
        self._close()

    def _text(self, kind: BlockKind, text: str) -> None:
        if self.open is kind:
            self._held = ""
            if text:
                self._writer.piece(kind, text)
            return
        if kind is not self._held_kind:
            self._held, self._held_kind = "", kind
        self._held += text
        if self._held and not self._held.isspace():
            held = self._held
            self._begin(kind)
            self._writer.piece(kind, held)

    def _arguments(self, call: _Call, text: str) -> None:
        if not call.is_eager:
            call.pieces.append(text)
        elif text:
            call.has_input = True
            self._writer.piece(BlockKind.TOOL_USE, text)

    def _end_call(self, call: _Call) -> None:
        if call.is_over:
            return
        call.is_over = True
        if call.is_eager:
            if not call.has_input:
                self._writer.piece(BlockKind.TOOL_USE, _NO_INPUT)
            self._close()
            self.has_called = True
            return
        text, call.pieces = "".join(call.pieces), []
        if _is_broken(text):
            self._text(BlockKind.TEXT, text)  # an engine's own reading of it: what it wrote is all there is
            return
        self._begin(BlockKind.TOOL_USE, call.id, call.name)
        self._writer.piece(BlockKind.TOOL_USE, text if text.strip() else _NO_INPUT)
        self._close()
        self.has_called = True

    def _drop(self, call: _Call) -> None:
        call.is_over = True
        call.pieces = []
        if call.is_eager:
            self._close()

    def _begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> None:
        self._close()
        self._held = ""
        self.open = kind
        self.blocks += 1
        self._writer.begin(kind, call_id, name)

    def _close(self) -> None:
        if self.open is not None:
            self._writer.end(self.open)
            self.open = None


_NO_INPUT: Final = "{}"


def _is_broken(text: str) -> bool:
    """Return whether this is no input of a call: neither nothing nor a JSON object."""
    try:
        return bool(text.strip()) and not isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return True
