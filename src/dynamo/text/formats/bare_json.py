"""Calls that are JSON and nothing else around it: Llama 3's, and those of no family in particular.

A JSON object in an answer may be the answer. So without a mark it is a call only if it is whole and names a tool of the
request; up to `scanner.MAX_CALL_CHARACTERS` of it are held back until that is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dynamo.text.formats.json_calls import HERMES_KEYS, CallKeys, call_objects
from dynamo.text.formats.scanner import Grammar, NotACall, Scanner, Step
from dynamo.text.formats.tool_set import ToolSet
from dynamo.text.markers import MarkerSearch

__all__ = ["BareJson"]

_KNOWN: Final = CallKeys(only_known=True)
_BARE: Final = ("{", "[")


@dataclass(frozen=True, slots=True)
class BareJson:
    """Objects behind a mark, or bare ones."""

    opening: tuple[str, ...]
    closing: tuple[str, ...] = ()
    is_whole_answer: bool = False  # bare calls are the whole answer, or none
    fences: tuple[tuple[str, str], ...] = ()  # pairs that may stand around bare calls

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser; the first begins a call."""
        return (*self.opening, *self.closing)

    def grammar(self, tools: ToolSet) -> Grammar:
        """Return the grammar of an answer that may call these tools."""
        marked, every = MarkerSearch(*self.opening), MarkerSearch(*self.opening, *_BARE)

        def answer(s: Scanner) -> Step[None]:
            search = every
            if self.is_whole_answer:
                search = marked
                for fence, end in (*self.fences, ("", "")):
                    if (yield from s.comes(0, *([fence] if fence else _BARE))):
                        yield from s.attempt(self._whole(s, tools, fence, end))
                        break
            while (mark := (yield from s.prose(search, s.out.content))) is not None:
                yield from s.attempt(self._marked(s, mark, tools) if mark in self.opening else self._one(s, tools))

        return answer

    def _marked(self, s: Scanner, mark: str, tools: ToolSet) -> Step[None]:
        s.take(s.at + len(mark))
        yield from call_objects(s, tools, HERMES_KEYS, separators=";,", closing=self.closing)

    def _one(self, s: Scanner, tools: ToolSet) -> Step[None]:
        s.out.hold()
        yield from call_objects(s, tools, _KNOWN, separators=";,")
        s.out.release()
        s.commit()

    def _whole(self, s: Scanner, tools: ToolSet, fence: str, end: str) -> Step[None]:
        s.out.hold()
        yield from s.space()
        if fence:
            yield from s.expect(fence)
        yield from call_objects(s, tools, _KNOWN, separators=";,")
        yield from s.space()
        if end:
            yield from s.accept(end)
            yield from s.space()
        if (yield from s.peek()):
            raise NotACall  # more than calls
        s.out.release()
        s.commit()
