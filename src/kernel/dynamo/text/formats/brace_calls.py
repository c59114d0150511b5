"""Calls in Gemma's way: `call:NAME{key:<quote>text<quote>,other:3,list:[<quote>a<quote>]}` between marks.

Each member of the arguments is emitted when it is complete. Words without quotes are strings, JSON's own quotes too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from dynamo.text.formats.call_form import CallForm
from dynamo.text.formats.json_calls import HERMES_KEYS, call_objects, stream_arguments
from dynamo.text.formats.scanner import MAX_NAME, NotACall, Scanner, Step
from dynamo.text.formats.tool_set import ToolSet, json_string, typed
from dynamo.text.formats.typed_arguments import ArgumentsWriter
from dynamo.text.markers import MarkerSearch

# Mistral's three dialects, one mark for all.
#
# [TOOL_CALLS] [{"name": "search", "arguments": {"query": "rain"}}]
# [TOOL_CALLS]search{"query": "rain"}
# [TOOL_CALLS]search[ARGS]{"query": "rain"}          (also [CALL_ID]id before [ARGS])

OPENING: Final = "[TOOL_CALLS]"
CLOSING: Final = "[/TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"

_END_OF_NAME: Final = MarkerSearch("{", "[", "\n", " ", "<")
_ID: Final = re.compile("[A-Za-z0-9]{9}")  # what the templates take when the id comes back to them
_ID_END: Final = MarkerSearch("[", "\n", " ", "{")


@dataclass(frozen=True, slots=True)
class MistralCalls(CallForm):
    """See the module."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser; the first begins a call."""
        return (OPENING, CLOSING, ARGUMENTS, CALL_ID)

    @property
    def starts(self) -> tuple[str, ...]:
        return (OPENING,)

    def calls(self, s: Scanner, mark: str, tools: ToolSet) -> Step[None]:
        s.take(s.at + len(mark))
        yield from s.space()
        if (yield from s.peek()) in ("[", "{"):
            yield from call_objects(s, tools, HERMES_KEYS, closing=(CLOSING,))
            return
        name = yield from s.until(_END_OF_NAME, limit=MAX_NAME)
        if not name:
            raise NotACall
        name = s.out.name = tools.resolve(name)
        call_id: str | None = None
        yield from s.space()
        if (yield from s.accept(CALL_ID)) is not None:
            given = yield from s.until(_ID_END, limit=MAX_NAME)
            call_id = given if _ID.fullmatch(given) is not None else None
            yield from s.space()
        yield from s.accept(ARGUMENTS)
        yield from s.space()
        yield from stream_arguments(s, name, call_id)
        s.out.end()
        s.commit()
        yield from s.accept_behind_space(CLOSING)
        s.commit()


_MAX_DEPTH: Final = 64
_NAME: Final = re.compile(r"[\w.\-]+")
_NAME_END: Final = MarkerSearch("{", "<", "\n", " ", "}")
_KEY_END: Final = MarkerSearch(":", "<", "{", "}", ",", '"', "\n")
_BARE_END: Final = MarkerSearch(",", "}", "]", "\n", "<", "{", "[")


@dataclass(frozen=True, slots=True)
class BraceCalls(CallForm):
    """The marks of one family."""

    opening: str
    closing: tuple[str, ...]
    quote: str
    stray: tuple[str, ...] = ()  # removed where it closes nothing
    behind_reasoning: tuple[str, ...] = ()  # see `CallForm`
    types_text: bool = False  # every value is quoted; the schema has its type

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser; the first begins a call."""
        return (self.opening, *self.closing, self.quote)

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.opening,)

    def calls(self, s: Scanner, mark: str, tools: ToolSet) -> Step[None]:
        s.take(s.at + len(mark))
        yield from s.space()
        yield from s.accept(":")
        yield from s.expect("call:")
        name = (yield from s.until(_NAME_END, limit=MAX_NAME)).strip()
        if _NAME.fullmatch(name) is None:
            raise NotACall
        yield from s.expect("{")
        name = s.out.name = tools.resolve(name)
        s.out.begin(name)
        arguments = ArgumentsWriter(s.out)
        while True:
            yield from s.space()
            if (yield from s.accept("}")) is not None:
                break
            key = yield from self._key(s)
            arguments.value(key, (yield from self._value(s, tools, name, (key,), _MAX_DEPTH)))
            yield from s.space()
            yield from s.accept(",")
        arguments.end()
        s.commit()
        yield from s.accept_behind_space(*self.closing)
        s.commit()

    def _key(self, s: Scanner) -> Step[str]:
        first = yield from s.peek()
        if first == '"':
            key = yield from _quoted(s)
        elif (yield from s.accept(self.quote)) is not None:
            key = yield from s.until(MarkerSearch(self.quote), limit=MAX_NAME)
            yield from s.expect(self.quote)
        else:
            key = (yield from s.until(_KEY_END, limit=MAX_NAME)).strip()
        yield from s.space()
        yield from s.expect(":")
        yield from s.space()
        if not key:
            raise NotACall
        return key

    def _value(self, s: Scanner, tools: ToolSet, name: str, path: tuple[str, ...], depth: int) -> Step[str]:
        """Return the JSON of a value."""
        if not depth:
            raise NotACall
        if (yield from s.accept(self.quote)) is not None:
            text = yield from s.until(MarkerSearch(self.quote))
            yield from s.expect(self.quote)
            return typed(text, tools.kinds(name, *path), reads_json=True) if self.types_text else json_string(text)
        first = yield from s.peek()
        if first == '"':
            return json_string((yield from _quoted(s)))
        if first not in ("{", "["):
            text = (yield from s.until(_BARE_END)).strip()
            if not text:
                raise NotACall
            return typed(text, tools.kinds(name, *path), reads_json=True)
        s.take(s.at + 1)
        closing, members = ("}" if first == "{" else "]"), []
        while True:
            yield from s.space()
            if (yield from s.accept(closing)) is not None:
                break
            if first == "{":
                key = yield from self._key(s)
                value = yield from self._value(s, tools, name, (*path, key), depth - 1)
                members.append(f"{json_string(key)}: {value}")
            else:
                members.append((yield from self._value(s, tools, name, (*path, "[]"), depth - 1)))
            yield from s.space()
            yield from s.accept(",")
        return first + ", ".join(members) + closing


def _quoted(s: Scanner) -> Step[str]:
    """Return the text of a string in JSON's quotes."""
    text = yield from s.json_text()
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        raise NotACall from None
