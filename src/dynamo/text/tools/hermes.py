"""The hermes format: every call is a JSON object between tags, among plain text.

    I will look it up.
    <tool_call>
    {"name": "search", "arguments": {"query": "rain"}}
    </tool_call>

- A call is told when its object is complete. The closing tag may be missing.
- `arguments` may be called `parameters`; absent ones are `{}`.
- White space that touches a call belongs to it; all other text is content.
- What follows an opening tag and cannot be a call is content, tag included, up to the character that shows it. From
  there on reading goes on as usual. The same goes for a call that is cut off by the end.

Held back: at most `calls.MAX_CALL_CHARACTERS` of a call, else `markers.MAX_SEPARATOR` characters of white space and the
beginning of a tag.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Any, Final

from dynamo.text.markers import WHITE_SPACE, MarkerSearch
from dynamo.text.output import Content, OutputEvent
from dynamo.text.tools.calls import MAX_CALL_CHARACTERS, call_events, read_call
from dynamo.text.tools.json_object import JsonObjectReader

__all__ = ["CLOSING", "OPENING", "HermesParser", "call_tag"]

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"

_OPEN: Final = MarkerSearch(OPENING)


def call_tag(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A call of this function as one tag of a structural tag."""
    return {
        "begin": f'{OPENING}\n{{"name": "{name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": parameters},
        "end": f"}}\n{CLOSING}",
    }


class _In(IntEnum):
    TEXT = auto()
    CALL = auto()  # behind an opening tag
    BEHIND_OBJECT = auto()  # the closing tag is due
    BEHIND_CALL = auto()  # white space is skipped


class HermesParser:
    """See the module; keeps the promises of `base.ToolParser`."""

    __slots__ = ("_held", "_in", "_json", "_raw", "_reader", "_room")

    def __init__(self) -> None:
        self._in = _In.TEXT
        self._held = ""  # the beginning of a tag, maybe
        self._reader = JsonObjectReader()
        self._raw: list[str] = []  # the call at hand with its tag: what it is content as
        self._json: list[str] = []  # its object
        self._room = 0  # characters that may still be held

    def push(self, text: str) -> list[OutputEvent]:
        if self._in is _In.TEXT and not self._held and text and _OPEN.is_plain(text):
            return [Content(text)]
        events: list[OutputEvent] = []
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            match self._in:
                case _In.TEXT:
                    at = self._read_text(text, at, events)
                case _In.CALL:
                    at = self._read_call(text, at, events)
                case _In.BEHIND_OBJECT:
                    at = self._read_closing(text, at)
                case _In.BEHIND_CALL:
                    at = len(text) - len(text[at:].lstrip(WHITE_SPACE))
                    if at < len(text):
                        self._in = _In.TEXT
        return events

    def finish(self) -> list[OutputEvent]:
        left = "".join(self._raw) + self._held
        self._held, self._raw = "", []
        return [Content(left)] if left else []

    def _read_text(self, text: str, at: int, events: list[OutputEvent]) -> int:
        start, end, mark = _OPEN.search(text, at)
        if start > at:
            events.append(Content(text[at:start]))
        if mark is None:
            self._held = text[start:]
            return len(text)
        self._in = _In.CALL
        self._reader = JsonObjectReader()
        self._raw, self._json, self._room = [text[start:end]], [], MAX_CALL_CHARACTERS
        return end

    def _read_call(self, text: str, at: int, events: list[OutputEvent]) -> int:
        reader = self._reader
        # Up to the limit and not a character more, so that the cuts do not decide what is too long.
        piece = text if len(text) - at <= self._room else text[: at + self._room]
        end, read = reader.read(piece, at)
        self._room -= end - at
        self._raw.append(text[at:end])
        self._json.append(read)
        if reader.is_complete:
            call = read_call("".join(self._json))
            if call is not None:
                events += call_events(call)
                self._raw = []
                self._in = _In.BEHIND_OBJECT
                return end
        elif not reader.is_broken and self._room:
            return end
        events.append(Content("".join(self._raw)))
        self._raw = []
        self._in = _In.TEXT
        return end

    def _read_closing(self, text: str, at: int) -> int:
        rest = text[at:].lstrip(WHITE_SPACE)
        if CLOSING.startswith(rest) and rest != CLOSING:
            self._held = rest
            return len(text)
        at = len(text) - len(rest)
        if rest.startswith(CLOSING):
            self._in = _In.BEHIND_CALL
            return at + len(CLOSING)
        self._in = _In.TEXT
        return at
