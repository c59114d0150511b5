"""Arguments that a format carries as text, one parameter after the other: written as JSON while they come."""

from __future__ import annotations

import json
from collections.abc import Callable

from dynamo.text.formats.output import Output
from dynamo.text.formats.scanner import MAX_CALL_CHARACTERS, NotACall, Scanner, Step
from dynamo.text.formats.tool_set import Kinds, json_string, typed
from dynamo.text.markers import MarkerSearch


class ArgumentsWriter:
    """The arguments of one call, whose pieces are emitted as soon as they are certain."""

    __slots__ = ("_has_members", "_out")

    def __init__(self, out: Output) -> None:
        self._out = out
        self._has_members = False

    def value(self, key: str, value: str) -> None:
        """Add a member; `value` is JSON."""
        self._out.arguments(self._head(key) + value)

    def end(self) -> None:
        """End the arguments and the call."""
        self._out.arguments("}" if self._has_members else "{}")
        self._out.end()

    def text_value(
        self,
        s: Scanner,
        key: str,
        kinds: Kinds,
        ends: MarkerSearch,
        is_end: Callable[[str], Step[bool]],
        *,
        reads_json: bool,
        trims_line_break: bool = False,
    ) -> Step[None]:
        """Read a value up to one of `ends` (not read) for which `is_end` is true, and add it as JSON of its kinds.

        A string is emitted as it comes. `trims_line_break`: one at the beginning and one at the end are not the value's.
        """
        streams = kinds.is_text or (kinds.types is None and not kinds.values and not reads_json)
        if trims_line_break:
            yield from s.accept("\r\n", "\n")
        if streams:
            self._out.arguments(self._head(key) + '"')
        held: list[str] = []
        last, room = "", MAX_CALL_CHARACTERS  # a line break that may be the last one
        while True:
            start, _, mark = ends.search(s.text, s.at)
            size = start - s.at  # places in the text do not survive a step that yields
            if mark is not None and not size:
                if (yield from is_end(mark)):
                    break
                size = len(mark)
            piece = s.take(s.at + min(size, room))
            if streams:
                if trims_line_break:
                    piece, last = _without_last(last + piece)
                if piece:
                    self._out.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
            elif piece:
                room -= len(piece)
                held.append(piece)
            if (mark is None and s.is_ended) or not room:
                s.take_cut_mark()
                raise NotACall
            if mark is None:
                yield
        if streams:
            self._out.arguments('"')
            return
        text = "".join(held)
        if trims_line_break:
            text, _ = _without_last(text)
        self.value(key, typed(text, kinds, reads_json=reads_json))

    def _head(self, key: str) -> str:
        start = ", " if self._has_members else "{"
        self._has_members = True
        return start + json_string(key) + ": "


def _without_last(text: str) -> tuple[str, str]:
    """Divide text from the line break at its end; a lone carriage return there may become one."""
    for last in ("\r\n", "\n", "\r"):
        if text.endswith(last):
            return text[: -len(last)], last
    return text, ""
