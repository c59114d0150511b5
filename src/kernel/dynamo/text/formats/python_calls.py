"""Calls written as Python: `[search(query="rain"), ping()]`.

A list without a mark is emitted when it is whole, because before that it may be prose; up to `scanner.MAX_CALL_CHARACTERS` of it
are held back. Behind a mark each call is emitted when it is whole, and objects of JSON may stand there instead. Values are what Python's literals are: strings (also in triple quotes), numbers, lists, tuples, sets, dicts, and
True, False, None in either language's spelling.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from dynamo.protocol.openai.shapes import JsonObject
from dynamo.text.formats.call_form import CallForm
from dynamo.text.formats.json_calls import HERMES_KEYS, call_objects
from dynamo.text.formats.scanner import MAX_NAME, NotACall, Scanner, Step
from dynamo.text.formats.tool_set import ToolSet
from dynamo.text.markers import MarkerSearch

_MAX_DEPTH: Final = 64
_NOISE: Final = re.compile(r"(?:\[(?=[^\s\w]|\d))+")  # no name follows
_WORD: Final = re.compile(r"[^\W\d][\w.\-]*")
_NUMBER: Final = re.compile(r"[0-9+\-.eE_]+")
_INTEGER: Final = re.compile(r"[+-]?[0-9](?:_?[0-9]){0,999}")
_FLOAT: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
_WORDS: Final = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\\": "\\", "'": "'", '"': '"'}
_HEX: Final = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class PythonCalls(CallForm):
    """A list of calls behind a mark; or, where `is_bare`, one without, with at least one call of a known tool."""

    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    is_bare: bool = True
    has_brackets: bool = True  # otherwise the calls stand on lines of their own

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser; the first begins a call."""
        return (*self.starts, *self.closing)

    @property
    def starts(self) -> tuple[str, ...]:
        return (*self.opening, "[") if self.is_bare else self.opening

    @property
    def stray(self) -> tuple[str, ...]:
        return self.closing if self.has_brackets else ()  # they are special tokens; a tag may be text

    @property
    def noise(self) -> re.Pattern[str] | None:
        return _NOISE if self.is_bare else None

    @property
    def may_stand_in_reasoning(self) -> bool:
        return not self.is_bare

    def calls(self, s: Scanner, mark: str, tools: ToolSet) -> Step[None]:
        s.take(s.at + len(mark))
        if mark not in self.opening:
            s.out.hold()
            if not tools.names.intersection((yield from self._list(s, tools))):
                raise NotACall
            s.out.release()
            s.commit()
            return
        yield from s.space()
        if (yield from s.comes(0, "{")) or ((yield from s.peek()) == "[" and (yield from s.comes(1, "{"))):
            yield from call_objects(s, tools, HERMES_KEYS, closing=self.closing)
            return
        if self.has_brackets:
            yield from s.expect("[")
        yield from self._list(s, tools)
        if self.has_brackets:
            yield from s.accept_behind_space(*self.closing)
            s.commit()

    def _list(self, s: Scanner, tools: ToolSet) -> Step[list[str]]:
        """Read calls up to and with what ends them, and return their names."""
        names: list[str] = []
        ends = ("]",) if self.has_brackets else self.closing
        while True:
            yield from s.space()
            names.append((yield from self._call(s, tools)))
            s.commit()
            yield from s.space()
            has_comma = (yield from s.accept(",")) is not None
            yield from s.space()
            if (yield from s.accept(*ends)) is not None:
                s.commit()
                return names
            if self.has_brackets and not has_comma:
                raise NotACall

    def _call(self, s: Scanner, tools: ToolSet) -> Step[str]:
        name = tools.resolve((yield from _word(s)))
        yield from s.expect("(")
        s.out.name = name if name in tools.names else None
        arguments: JsonObject = {}
        parameters = tools.parameters(name)
        while True:
            yield from s.space()
            if (yield from s.accept(")")) is not None:
                break
            if len(arguments) > MAX_NAME:
                raise NotACall
            key, value = yield from self._argument(s, parameters, len(arguments))
            arguments[key] = value
            yield from s.space()
            if (yield from s.expect(",", ")")) == ")":
                break
        s.out.begin(name)
        s.out.arguments(json.dumps(arguments, ensure_ascii=False))
        s.out.end()
        return name

    def _argument(self, s: Scanner, parameters: list[str], number: int) -> Step[tuple[str, object]]:
        if _WORD.match((yield from s.peek())):
            word = yield from _word(s)
            yield from s.space()
            if (yield from s.accept("=")) is not None:
                yield from s.space()
                return word, (yield from _value(s, _MAX_DEPTH))
            if word not in _WORDS:
                raise NotACall
            value: object = _WORDS[word]
        else:
            value = yield from _value(s, _MAX_DEPTH)
        if number >= len(parameters):
            raise NotACall  # no one knows what it is for
        return parameters[number], value


def _word(s: Scanner) -> Step[str]:
    """Return a name, which may have dots and dashes in it."""
    while True:
        match = _WORD.match(s.text, s.at)
        end = s.at if match is None else match.end()
        if end - s.at > MAX_NAME or (match is None and s.at < len(s.text)):
            raise NotACall
        if match is not None and (end < len(s.text) or s.is_ended):
            return s.take(end)
        if s.is_ended:
            raise NotACall
        yield


def _value(s: Scanner, depth: int) -> Step[Any]:
    char = yield from s.peek()
    if not depth or not char:
        raise NotACall
    if char in "\"'":
        text = yield from _string(s)
        while True:  # strings that follow each other are one
            yield from s.space()
            if (yield from s.peek()) not in ("'", '"'):
                return text
            text += yield from _string(s)
    if char in "0123456789+-.":
        return (yield from _number(s))
    if char in "[({":
        return (yield from _collection(s, char, depth))
    word = yield from _word(s)
    if word not in _WORDS:
        raise NotACall
    return _WORDS[word]


def _collection(s: Scanner, opening: str, depth: int) -> Step[object]:
    closing = {"[": "]", "(": ")", "{": "}"}[opening]
    s.take(s.at + 1)
    items: list[object] = []
    members: dict[str, object] = {}
    while True:
        yield from s.space()
        if (yield from s.accept(closing)) is not None:
            break
        item = yield from _value(s, depth - 1)
        yield from s.space()
        if opening == "{" and not items and (yield from s.accept(":")) is not None:
            yield from s.space()
            key = item if isinstance(item, str) else json.dumps(item)
            members[key] = yield from _value(s, depth - 1)
            yield from s.space()
        elif members:
            raise NotACall
        else:
            items.append(item)
        if (yield from s.expect(",", closing)) == closing:
            break
    if opening == "{" and not items:
        return members
    return items


def _number(s: Scanner) -> Step[Any]:
    while True:
        match = _NUMBER.match(s.text, s.at)
        end = s.at if match is None else match.end()
        if end < len(s.text) or s.is_ended or end - s.at > 1024:
            break
        yield
    text = s.take(min(end, s.at + 1024))
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) is None or abs(float(text)) == float("inf"):
        raise NotACall
    return float(text)


def _string(s: Scanner) -> Step[str]:
    quote = yield from s.expect('"', "'")
    if (yield from s.accept(quote)) is not None:
        if (yield from s.accept(quote)) is None:
            return ""
        quote *= 3
    ends = MarkerSearch(quote, "\\")
    pieces: list[str] = []
    while True:
        pieces.append((yield from s.until(ends)))
        if (yield from s.expect(quote, "\\")) == quote:
            text = "".join(pieces)
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise NotACall
            return text
        pieces.append((yield from _escape(s)))


def _escape(s: Scanner) -> Step[str]:
    char = yield from s.peek()
    if not char:
        raise NotACall
    s.take(s.at + 1)
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char not in _HEX:
        return "" if char == "\n" else "\\" + char
    digits = ""
    while len(digits) < _HEX[char]:
        digit = yield from s.peek()
        if digit not in "0123456789abcdefABCDEF" or not digit:
            raise NotACall
        digits += s.take(s.at + 1)
    code = int(digits, 16)
    if code > 0x10FFFF:
        raise NotACall
    return chr(code)
