"""Calls written as a name and pairs of key and value, each between tags (GLM and kin).

    <tool_call>search
    <arg_key>query</arg_key>
    <arg_value>rain</arg_value>
    </tool_call>

The line breaks may be missing. A value is plain text, typed by the tool's schema; where that accepts anything it is JSON, if it
can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dynamo.text.formats.call_form import CallForm
from dynamo.text.formats.json_calls import HERMES_KEYS, call_objects
from dynamo.text.formats.scanner import MAX_NAME, NotACall, Scanner, Step
from dynamo.text.formats.tool_set import ToolSet
from dynamo.text.formats.typed_arguments import ArgumentsWriter
from dynamo.text.markers import MarkerSearch, search_for

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
