"""The hermes format: every call is a JSON object between tags, among plain text.

    I will look it up.
    <tool_call>
    {"name": "search", "arguments": {"query": "rain"}}
    </tool_call>

- A call is emitted when its object is complete. The closing tag may be missing.
- `arguments` may be called `parameters`; absent ones are `{}`.
- All other text is content, white space included. Only line breaks that stand alone between the beginning and the first
  call, between two calls, or behind the last call are separators, and left out.
- What follows an opening tag and cannot be a call is content, tag included, up to the character that shows it. From
  there on reading goes on as usual. The same goes for a call that is cut off by the end.

Held back: at most `calls.MAX_CALL_CHARACTERS` of a call, else `markers.MAX_SEPARATOR` characters of white space and the
beginning of a tag. A longer run of white space is content.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Any, Final

from dynamo.text.markers import LINE_BREAKS, MAX_SEPARATOR, WHITE_SPACE, MarkerSearch
from dynamo.text.output import Content, OutputEvent
from dynamo.text.tools.calls import MAX_CALL_CHARACTERS, call_events, cut_call_events, read_call
from dynamo.text.tools.json_object import JsonObjectReader

__all__ = ["CLOSING", "OPENING", "HermesParser", "call_tag"]

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"

_OPEN: Final = MarkerSearch(OPENING)


def call_tag(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a call of this function as one tag of a structural tag."""
    return {
        "begin": f'{OPENING}\n{{"name": "{name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": parameters},
        "end": f"}}\n{CLOSING}",
    }


class _In(IntEnum):
    TEXT = auto()
    SEPARATOR = auto()  # at the beginning or behind a call: line breaks may be no content
    CALL = auto()  # behind an opening tag
    BEHIND_OBJECT = auto()  # the closing tag is due


class HermesParser:
    """See the module; keeps the promises of `base.ToolParser`."""

    __slots__ = ("_has_called", "_held", "_in", "_json", "_raw", "_reader", "_room")

    def __init__(self) -> None:
        self._in = _In.SEPARATOR
        self._has_called = False
        self._held = ""  # what may be a separator, and the beginning of a tag
        self._reader = JsonObjectReader()
        self._raw: list[str] = []  # the call at hand with its tag and the separator before it: what it is content as
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
                case _In.SEPARATOR:
                    at = self._read_separator(text, at)
                case _In.CALL:
                    at = self._read_call(text, at, events)
                case _In.BEHIND_OBJECT:
                    at = self._read_closing(text, at)
        return events

    def finish(self, *, keeps_cut_call: bool = False) -> list[OutputEvent]:
        if keeps_cut_call and self._in is _In.CALL and (cut := cut_call_events("".join(self._json))) is not None:
            self._raw = []
            return cut
        held, self._held = self._held, ""
        begun = held.strip(WHITE_SPACE)
        if keeps_cut_call and self._in is not _In.TEXT and (OPENING.startswith(begun) or CLOSING.startswith(begun)):
            held = ""  # the beginning of a tag that was cut off
        if self._has_called and self._in in (_In.SEPARATOR, _In.BEHIND_OBJECT) and not held.strip(LINE_BREAKS):
            held = ""
        left, self._raw = "".join(self._raw) + held, []
        return [Content(left)] if left else []

    def _read_text(self, text: str, at: int, events: list[OutputEvent]) -> int:
        start, end, mark = _OPEN.search(text, at)
        if start > at:
            events.append(Content(text[at:start]))
        if mark is None:
            self._held = text[start:]
            return len(text)
        self._begin_call(text[start:end])
        return end

    def _read_separator(self, text: str, at: int) -> int:
        rest = text[at:].lstrip(LINE_BREAKS)
        length = len(text) - at - len(rest)
        if length <= MAX_SEPARATOR:
            if rest.startswith(OPENING):
                end = at + length + len(OPENING)
                self._begin_call(text[at:end])
                return end
            if OPENING.startswith(rest):
                self._held = text[at:]
                return len(text)
        self._in = _In.TEXT
        return at

    def _begin_call(self, opening: str) -> None:
        self._in = _In.CALL
        self._reader = JsonObjectReader()
        self._raw, self._json, self._room = [opening], [], MAX_CALL_CHARACTERS

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
                self._in, self._has_called = _In.BEHIND_OBJECT, True
                return end
        elif not reader.is_broken and self._room:
            return end
        events.append(Content("".join(self._raw)))
        self._raw = []
        self._in = _In.TEXT
        return end

    def _read_closing(self, text: str, at: int) -> int:
        rest = text[at:].lstrip(WHITE_SPACE)
        space = len(text) - at - len(rest)
        if space <= MAX_SEPARATOR:
            if rest.startswith(CLOSING):
                self._in = _In.SEPARATOR
                return at + space + len(CLOSING)
            if CLOSING.startswith(rest):
                self._held = text[at:]
                return len(text)
        self._in = _In.SEPARATOR  # the tag is missing, and the white space is not its own
        return at
