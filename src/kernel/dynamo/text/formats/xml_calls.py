"""Calls written as tags: one for the function, one for each parameter, whose values are plain text.

    <tool_call>
    <function=search>
    <parameter=query>
    rain
    </parameter>
    </function>
    </tool_call>

Each family has names of its own for the tags; a name stands behind `=` or in an attribute `name="..."`. The outer tags may
be missing at either end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dynamo.text.formats.call_form import CallForm
from dynamo.text.formats.json_calls import HERMES_KEYS, call_objects
from dynamo.text.formats.scanner import MAX_NAME, NotACall, Scanner, Step
from dynamo.text.formats.tool_set import ANYTHING, Kinds, ToolSet
from dynamo.text.formats.typed_arguments import ArgumentsWriter
from dynamo.text.markers import MarkerSearch, search_for

_HEADER_END: Final = MarkerSearch(">", "<", "\n")
_TEXT: Final = Kinds(frozenset(["string"]))
_ATTRIBUTE: Final = re.compile(r"""([\w-]+)\s*=\s*("[^"]*"|'[^']*'|[^\s"'>]+)""")


@dataclass(frozen=True, slots=True)
class TaggedXml(CallForm):
    """The tags of one family. Where there are several of a kind, any of them will do."""

    outer: tuple[str, ...]
    closing: tuple[str, ...]  # of `outer`
    invoke: tuple[str, ...]  # up to the name, or to the attributes
    invoke_end: tuple[str, ...]
    parameter: tuple[str, ...]
    parameter_end: tuple[str, ...]
    has_attributes: bool = False  # <invoke name="f"> instead of <function=f>
    trims_line_break: bool = False  # one behind the opening and one before the closing tag of a value
    reads_json: bool = False  # a value without a schema is JSON, if it is
    reads_objects: bool = False  # a JSON object with name and arguments may stand between the outer tags
    implies_ends: bool = False  # a value may end without a closing tag in front of the next parameter or the end
    prefixes: tuple[str, ...] = ()  # what begins a tag, where it has too many spellings to search for each
    between: tuple[str, ...] = ()  # what may stand between the outer tag and the call
    stray: tuple[str, ...] = ()  # removed where it closes nothing

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser; the first begins a call."""
        if self.prefixes:  # its tokens, where they are special: with and without the bracket
            return (*self.prefixes, *(prefix.removeprefix("<") for prefix in self.prefixes))
        tags = (*self.invoke_end, *self.parameter, *self.parameter_end)
        return (*self.outer, *self.invoke, *self.closing, *tags, *self.between)

    @property
    def starts(self) -> tuple[str, ...]:
        return self.prefixes or (*self.outer, *self.invoke)

    def calls(self, s: Scanner, mark: str, tools: ToolSet) -> Step[None]:
        if self.prefixes:
            tag = yield from s.accept(*self.outer, *self.invoke)
            if tag is None:  # what only begins like a tag has to be read, too
                s.take(min(s.at + len(mark), len(s.text)))
                raise NotACall
            mark = tag
        else:
            s.take(s.at + len(mark))
        if mark not in self.invoke:
            yield from s.space()
            if self.reads_objects and (yield from s.peek()) in ("{", "["):
                yield from call_objects(s, tools, HERMES_KEYS, closing=self.closing)
                return
            while self.between and (yield from s.accept(*self.between)) is not None:
                yield from s.space()
            yield from s.expect(*self.invoke)
        while True:
            yield from self._call(s, tools)
            s.commit()
            follows = yield from s.accept_behind_space(*self.invoke, *self.closing)
            while follows in self.stray:
                s.commit()
                follows = yield from s.accept_behind_space(*self.closing)
            if follows is None or follows in self.closing:
                s.commit()
                return

    def _call(self, s: Scanner, tools: ToolSet) -> Step[None]:
        name, _, is_whole = yield from self._header(s)
        name = s.out.name = tools.resolve(name)
        s.out.begin(name)
        arguments = ArgumentsWriter(s.out)
        due = (*self.parameter, *self.invoke_end, *self.closing)
        while not is_whole:
            yield from s.space()
            if not (yield from s.peek()) and not s.out.is_cut:
                break  # only closing marks are missing
            if self.has_attributes and (yield from s.peek()) == "{":  # the arguments as one object
                yield from s.json(s.out.arguments)
                yield from s.space()
                yield from s.expect(*self.invoke_end)
                s.out.end()
                return
            if (yield from s.expect(*due)) not in self.parameter:
                break
            yield from self._parameter(s, tools, name, arguments)
        arguments.end()

    def _parameter(self, s: Scanner, tools: ToolSet, name: str, arguments: ArgumentsWriter) -> Step[None]:
        key, declared, is_whole = yield from self._header(s)
        if is_whole:
            arguments.value(key, '""')
            return
        kinds = tools.kinds(name, key)
        reads_json = self.reads_json
        if declared is not None:  # the call itself declares whether it is text
            kinds = _TEXT if declared == "true" else ANYTHING if kinds.is_text else kinds
            reads_json = True
        implied = (*(f"\n{tag}" for tag in self.parameter), *(f"\n{tag}" for tag in self.invoke_end))
        ends = search_for(*self.parameter_end, *(implied if self.implies_ends else ()))

        def is_end(mark: str) -> Step[bool]:
            if mark in self.parameter_end:
                follows = (*self.parameter, *self.invoke_end, *self.closing, "")
                return (yield from s.comes(len(mark), *follows))
            if mark[1:] in self.parameter:
                return True
            return (yield from s.comes(len(mark), *self.closing, ""))

        yield from arguments.text_value(
            s, key, kinds, ends, is_end, reads_json=reads_json, trims_line_break=self.trims_line_break
        )
        yield from s.accept(*self.parameter_end)

    def _header(self, s: Scanner) -> Step[tuple[str, str | None, bool]]:
        """Return the name in a tag whose beginning has been read, the type of its value, if it declares one, and whether it closes itself."""
        header = yield from s.until(_HEADER_END, limit=MAX_NAME)
        yield from s.expect(">")
        is_whole = self.has_attributes and header.endswith("/")
        declared: str | None = None
        if self.has_attributes:
            attributes = {key: value.strip("\"'") for key, value in _ATTRIBUTE.findall(header.removesuffix("/"))}
            name, declared = attributes.get("name", ""), attributes.get("string")
            if not header[:1].isspace():
                raise NotACall
        else:
            name = header.strip().strip("\"'")
        if not name:
            raise NotACall
        return name, declared, is_whole
