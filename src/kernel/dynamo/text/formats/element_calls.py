"""Calls of MiniMax M3: every parameter is an element of its own name, objects and arrays are nested elements.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="search">]<]minimax[>[<query>rain]<]minimax[>[</query>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

A token of its own stands before each tag; angle brackets without it are text. The arguments are emitted when the call is whole,
because a name that comes again makes a list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dynamo.text.formats.call_form import CallForm
from dynamo.text.formats.json_calls import HERMES_KEYS, call_objects
from dynamo.text.formats.scanner import MAX_NAME, NotACall, Scanner, Step
from dynamo.text.formats.tool_set import ToolSet, json_string, typed
from dynamo.text.formats.typed_arguments import ArgumentsWriter
from dynamo.text.markers import MarkerSearch, search_for

# Calls written as a name and pairs of key and value, each between tags (GLM and kin).
#
#     <tool_call>search
#     <arg_key>query</arg_key>
#     <arg_value>rain</arg_value>
#     </tool_call>
#
# The line breaks may be missing. A value is plain text, typed by the tool's schema; where that accepts anything it is JSON, if it
# can be.

_NAME_END: Final = MarkerSearch("<", "\n", "\r", " ", "{", "[", '"', "'")


@dataclass(frozen=True, slots=True)
class TaggedPairs(CallForm):
    """The tags of one family."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser; the first begins a call."""
        return (self.opening, self.closing, *self.key, *self.value)

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.opening,)

    def calls(self, s: Scanner, mark: str, tools: ToolSet) -> Step[None]:
        s.take(s.at + len(mark))
        while True:
            yield from s.space()
            if (yield from s.peek()) in ("{", "["):
                yield from call_objects(s, tools, HERMES_KEYS, closing=(self.closing,))
            else:
                yield from self._call(s, tools)
            s.commit()
            if (yield from s.accept_behind_space(self.opening)) is None:
                return

    def _call(self, s: Scanner, tools: ToolSet) -> Step[None]:
        name = yield from s.until(_NAME_END, limit=MAX_NAME)
        if not name:
            raise NotACall
        yield from s.space()
        tag = yield from s.expect(self.key[0], self.closing)
        name = s.out.name = tools.resolve(name)
        s.out.begin(name)
        arguments = ArgumentsWriter(s.out)
        key_end, value_end = search_for(self.key[1], "<"), search_for(self.value[1])

        def is_end(mark: str) -> Step[bool]:
            return (yield from s.comes(len(mark), self.key[0], self.closing, self.opening, ""))

        while tag == self.key[0]:
            key = (yield from s.until(key_end, limit=MAX_NAME)).strip()
            yield from s.expect(self.key[1])
            yield from s.space()
            yield from s.expect(self.value[0])
            yield from arguments.text_value(s, key, tools.kinds(name, key), value_end, is_end, reads_json=True)
            yield from s.expect(self.value[1])
            yield from s.space()
            if not (yield from s.peek()) and not s.out.is_cut:
                break  # only the closing mark is missing
            if (yield from s.comes(0, self.opening)):
                break  # the same, in front of another call
            tag = yield from s.expect(self.key[0], self.closing)
        arguments.end()


_MAX_DEPTH: Final = 64
_NAME: Final = re.compile(r"""\s+name\s*=\s*("[^"]+"|'[^']+'|[^\s"'>]+)\s*""")
_TAG_END: Final = MarkerSearch(">", "<", "\n")

_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ElementCalls(CallForm):
    """The format with its token, or without (`prefix` is empty)."""

    prefix: str

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser; the first begins a call."""
        tags = ("<tool_call>", "<invoke", "</invoke>", "</tool_call>")
        return tuple(self.prefix + tag for tag in tags) + ((self.prefix,) if self.prefix else ())

    @property
    def starts(self) -> tuple[str, ...]:
        return self.marks[:2]

    def calls(self, s: Scanner, mark: str, tools: ToolSet) -> Step[None]:
        _, invoke, _, closing = self.marks[:4]
        s.take(s.at + len(mark))
        if mark != invoke:
            yield from s.space()
            yield from s.expect(invoke)
        while True:
            yield from self._call(s, tools)
            s.commit()
            if (yield from s.accept_behind_space(invoke, closing)) != invoke:
                s.commit()
                return

    def _call(self, s: Scanner, tools: ToolSet) -> Step[None]:
        header = yield from s.until(_TAG_END, limit=MAX_NAME)
        yield from s.expect(">")
        found = _NAME.fullmatch(header)
        if found is None:
            raise NotACall
        name = s.out.name = tools.resolve(found[1].strip("\"'"))
        members: dict[str, list[str]] = {}
        while True:
            if (yield from s.comes(0, f"{self.prefix}<", f"{self.prefix}</")):
                yield from s.space()
            if (yield from s.accept(f"{self.prefix}</invoke>")) is not None:
                break
            if not (yield from s.peek()) and not s.out.is_cut:
                break  # only closing tags are missing
            key, value = yield from self._parameter(s, tools, name)
            members.setdefault(key, []).append(value)
        s.out.begin(name)
        s.out.arguments(_object(members))
        s.out.end()

    def _parameter(self, s: Scanner, tools: ToolSet, name: str) -> Step[tuple[str, str]]:
        if (yield from s.accept(f"{self.prefix}<")) is None:
            if not self.prefix:
                raise NotACall
            text = yield from s.until(MarkerSearch(f"{self.prefix}</"))  # the first opening tag was forgotten
            yield from s.expect(f"{self.prefix}</")
            key = yield from self._tag(s)
            return key, typed(text, tools.kinds(name, key), reads_json=True)
        key = yield from self._tag(s)
        return key, (yield from self._element(s, tools, name, (key,)))

    def _tag(self, s: Scanner) -> Step[str]:
        name = yield from s.until(_TAG_END, limit=MAX_NAME)
        yield from s.expect(">")
        if not name or name != name.strip() or "/" in name:
            raise NotACall
        return name

    def _element(self, s: Scanner, tools: ToolSet, name: str, path: _Path) -> Step[str]:
        """Return the JSON of an element whose opening tag has been read."""
        if len(path) > _MAX_DEPTH:
            raise NotACall
        closing = f"{self.prefix}</{path[-1] if path[-1] != '[]' else 'item'}>"
        kinds = tools.kinds(name, *path)
        types = kinds.types or frozenset()
        is_nested = yield from self._comes_child(s, closing, may_nest=not types or bool(types & {"array", "object"}))
        if not is_nested:
            text = yield from s.until(MarkerSearch(closing))
            yield from s.expect(closing)
            if not text and types and "string" not in types:
                return "[]" if "array" in types else "{}" if "object" in types else '""'
            return typed(text, kinds, reads_json=True)
        members: dict[str, list[str]] = {}
        is_list = True
        while True:
            yield from s.space()
            if (yield from s.accept(closing)) is not None:
                break
            yield from s.expect(f"{self.prefix}<")
            key = yield from self._tag(s)
            is_item = key == "item" and (not types or "array" in types)
            is_list &= is_item
            value = yield from self._element(s, tools, name, (*path, "[]" if is_item else key))
            members.setdefault(key, []).append(value)
        return f"[{', '.join(members['item'])}]" if is_list else _object(members)

    def _comes_child(self, s: Scanner, closing: str, *, may_nest: bool) -> Step[bool]:
        if not may_nest and not self.prefix:
            return False
        if (yield from s.comes(0, closing)) or not (yield from s.comes(0, f"{self.prefix}<")):
            return False
        if self.prefix:
            return not (yield from s.comes(0, f"{self.prefix}</"))
        while (start := s.text.index("<", s.at) + 1) == len(s.text) and not s.is_ended:
            yield
        return s.text[start : start + 1].isidentifier()  # `a < b`, `</b` and `<|b` begin no element


def _object(members: dict[str, list[str]]) -> str:
    parts = (
        f"{json_string(key)}: {values[0] if len(values) == 1 else '[' + ', '.join(values) + ']'}"
        for key, values in members.items()
    )
    return "{" + ", ".join(parts) + "}"
