"""Output of a forced tool choice: the answer as a whole is JSON, because the engine was guided to write nothing else.

An engine that was not guided may say anything. Text that is no such JSON goes through the model's own parser, or is
content.
"""

from __future__ import annotations

from enum import IntEnum, auto

from dynamo.text.markers import MAX_SEPARATOR, WHITE_SPACE
from dynamo.text.output import CallArguments, CallBegan, CallEnded, Content, Idle, OutputEvent
from dynamo.text.tools.base import ToolParser
from dynamo.text.tools.calls import MAX_CALL_CHARACTERS, call_events, cut_call_events, read_call
from dynamo.text.tools.json_object import JsonObjectReader

__all__ = ["NamedCallParser", "RequiredCallsParser"]


class _In(IntEnum):
    BEGINNING = auto()
    ELEMENT = auto()  # an object is due
    BETWEEN = auto()  # a comma or the end of the array is due
    END = auto()  # nothing is due
    TEXT = auto()  # it is no JSON (any more)
    NATIVE = auto()  # it is the model's own format


def _behind_end(raw: list[str], text: str, at: int) -> tuple[int, _In]:
    """Read white space behind the answer into `raw`: (where reading stopped, what comes next).

    The white space is part of the answer's form, unless more text follows or the white space is very long.
    """
    end = len(text) - len(text[at:].lstrip(WHITE_SPACE))
    room = MAX_SEPARATOR - sum(map(len, raw))
    raw.append(text[at:end])
    return end, _In.END if end == len(text) and end - at <= room else _In.TEXT


class RequiredCallsParser:
    """`tool_choice: "required"`: an array of calls `{"name", "parameters" or "arguments"}`, or a single one.

    A call is emitted when its object is complete, or at the end of the text, which may be cut off: a call had to come,
    so what there is of one is that call. From the first character on that does not fit, everything is content; where no
    call came before it the model's own parser reads all of the answer, because its marks may begin as JSON does
    (`[TOOL_CALLS]`).

    Held back: `calls.MAX_CALL_CHARACTERS` of a call, or what the model's own parser holds back.
    """

    __slots__ = ("_has_called", "_in", "_is_array", "_json", "_native", "_raw", "_reader", "_room")

    def __init__(self, native: ToolParser | None = None) -> None:
        """`native`: the model's own parser, for an answer that is not JSON."""
        self._native = native
        self._in = _In.BEGINNING
        self._is_array = self._has_called = False
        self._reader = JsonObjectReader()
        self._raw: list[str] = []
        self._json: list[str] = []
        self._room = MAX_CALL_CHARACTERS

    @property
    def idle(self) -> Idle | None:
        return None  # all of it is read

    def push(self, text: str) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        at = 0
        while at < len(text):
            match self._in:
                case _In.BEGINNING:
                    at = self._begin(text, events)
                case _In.ELEMENT:
                    at = self._read_element(text, at, events)
                case _In.BETWEEN:
                    at = self._read_between(text, at)
                case _In.END:
                    at = self._read_end(text, at, events)
                case _In.TEXT:
                    events.append(Content(text[at:]))
                    at = len(text)
                case _In.NATIVE:
                    events += self._native.push(text[at:]) if self._native is not None else ()
                    at = len(text)
        return events

    def finish(self, *, keeps_cut_call: bool = True, is_cut: bool = False) -> list[OutputEvent]:
        left, self._raw = "" if self._in is _In.END else "".join(self._raw), []
        if keeps_cut_call and self._in is _In.ELEMENT and (cut := cut_call_events("".join(self._json))) is not None:
            return cut
        events: list[OutputEvent] = [Content(left)] if left else []
        if self._in is _In.NATIVE and self._native is not None:
            events += self._native.finish(keeps_cut_call=keeps_cut_call, is_cut=is_cut)
        return events

    def _begin(self, text: str, events: list[OutputEvent]) -> int:
        at = len(text) - len(text.lstrip(WHITE_SPACE))
        too_much = at > self._room
        at = min(at, self._room)
        self._raw.append(text[:at])
        self._room -= at
        if at == len(text):
            return at
        if text[at] == "[" and not too_much:
            self._is_array = True
            self._raw.append("[")
            self._in = _In.ELEMENT
            return at + 1
        if text[at] == "{" and not too_much:
            self._in = _In.ELEMENT
            return at
        self._leave(events)
        return at

    def _read_element(self, text: str, at: int, events: list[OutputEvent]) -> int:
        reader = self._reader
        piece = text if len(text) - at <= self._room else text[: at + self._room]
        end, read = reader.read(piece, at)
        self._room -= end - at
        self._raw.append(text[at:end])
        self._json.append(read)
        if reader.is_complete:
            call = read_call("".join(self._json))
            if call is not None:
                events += call_events(call)
                self._has_called = True
                self._raw, self._json = [], []
                self._room = MAX_CALL_CHARACTERS
                self._reader = JsonObjectReader()
                self._in = _In.BETWEEN if self._is_array else _In.END
                return end
        elif not reader.is_broken and self._room:
            return end
        self._leave(events)
        return end

    def _read_between(self, text: str, at: int) -> int:
        at = len(text) - len(text[at:].lstrip(WHITE_SPACE))
        if at == len(text):
            return at
        if text[at] == ",":
            self._raw.append(",")
            self._in = _In.ELEMENT
            return at + 1
        if text[at] == "]":
            self._in = _In.END
            return at + 1
        self._in = _In.TEXT
        return at

    def _read_end(self, text: str, at: int, events: list[OutputEvent]) -> int:
        end, self._in = _behind_end(self._raw, text, at)
        if self._in is _In.TEXT:
            self._leave(events)
        return end

    def _leave(self, events: list[OutputEvent]) -> None:
        """Release the held text, which is not a call in JSON, to the model's own parser or as content."""
        held, self._raw = "".join(self._raw), []
        if self._native is not None and not self._has_called:
            events += self._native.push(held)
            self._in = _In.NATIVE
            return
        if held:
            events.append(Content(held))
        self._in = _In.TEXT


class NamedCallParser:
    """A named tool choice: the whole answer is the arguments of that function.

    The arguments are emitted as they arrive, once the object has its first key (or is complete without). If it breaks
    later, what follows is content and the call stays without its end. The model's own format may hold calls of other
    functions: `OutputParser` drops them.

    Held back: `calls.MAX_CALL_CHARACTERS` at the beginning, or what the model's own parser holds back.
    """

    __slots__ = ("_in", "_json", "_name", "_native", "_raw", "_reader", "_room")

    def __init__(self, name: str, native: ToolParser | None = None) -> None:
        """`native`: the model's own parser, for an answer that does not begin as JSON."""
        self._name, self._native = name, native
        self._in = _In.BEGINNING
        self._reader = JsonObjectReader()
        self._raw: list[str] = []
        self._json: list[str] = []
        self._room = MAX_CALL_CHARACTERS

    @property
    def idle(self) -> Idle | None:
        return None  # all of it is read

    def push(self, text: str) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        at = 0
        while at < len(text):
            match self._in:
                case _In.BEGINNING:
                    at = self._begin(text, at, events)
                case _In.ELEMENT:
                    end, read = self._reader.read(text, at)
                    if read:
                        events.append(CallArguments(read))
                    if self._reader.is_complete:
                        events.append(CallEnded())
                        self._in = _In.END
                    elif self._reader.is_broken:
                        self._in = _In.TEXT
                    at = end
                case _In.END:
                    at = self._read_end(text, at, events)
                case _In.NATIVE:
                    if self._native is not None:
                        events += self._native.push(text[at:])
                    at = len(text)
                case _:
                    events.append(Content(text[at:]))
                    at = len(text)
        return events

    def finish(self, *, keeps_cut_call: bool = True, is_cut: bool = False) -> list[OutputEvent]:
        left, self._raw = "" if self._in is _In.END else "".join(self._raw), []
        begun = "".join(self._json).lstrip(WHITE_SPACE)
        if keeps_cut_call and self._in is _In.BEGINNING and begun:
            return [CallBegan(self._name), CallArguments(begun)]
        events: list[OutputEvent] = [Content(left)] if left else []
        if self._in is _In.NATIVE and self._native is not None:
            events += self._native.finish(keeps_cut_call=keeps_cut_call, is_cut=is_cut)
        return events

    def _begin(self, text: str, at: int, events: list[OutputEvent]) -> int:
        reader = self._reader
        while at < len(text):
            # Character by character, so that the output does not depend on the cuts; it is only up to the first colon.
            if not self._room:
                break
            end, read = reader.read(text[at : at + 1])
            self._raw.append(text[at : at + end])
            self._json.append(read)
            self._room -= end
            at += end
            if reader.has_key or reader.is_complete:
                start = "".join(self._json).lstrip(WHITE_SPACE)
                self._raw, self._json = [], []
                events += (CallBegan(self._name), CallArguments(start))
                if reader.is_complete:
                    events.append(CallEnded())
                self._in = _In.END if reader.is_complete else _In.ELEMENT
                return at
            if reader.is_broken:
                break
        else:
            return at
        held, self._raw = "".join(self._raw), []
        if self._native is not None and not held.strip(WHITE_SPACE):
            self._in = _In.NATIVE
            events += self._native.push(held)
        else:
            self._in = _In.TEXT
            if held:
                events.append(Content(held))
        return at

    def _read_end(self, text: str, at: int, events: list[OutputEvent]) -> int:
        end, self._in = _behind_end(self._raw, text, at)
        if self._in is _In.TEXT and self._raw:
            events.append(Content("".join(self._raw)))
            self._raw = []
        return end
