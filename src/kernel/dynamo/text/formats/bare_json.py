"""Calls that are JSON and nothing else around it: Llama 3's, and those of no family in particular.

A JSON object in an answer may be the answer. So without a mark it is a call only if it is whole and names a tool of the
request; up to `scanner.MAX_CALL_CHARACTERS` of it are held back until that is known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dynamo.text.formats.call_form import CallForm
from dynamo.text.formats.json_calls import HERMES_KEYS, CallKeys, call_objects
from dynamo.text.formats.scanner import NotACall, Scanner, Step
from dynamo.text.formats.tool_set import ToolSet

_KNOWN: Final = CallKeys(only_known=True)
_BARE: Final = ("{", "[")
_NOISE: Final = re.compile(r"""(?:\[(?=[^\s{])|\{(?=[^\s"']))+""")


@dataclass(frozen=True, slots=True)
class BareJson(CallForm):
    """Objects behind a mark, or bare ones."""

    opening: tuple[str, ...]
    closing: tuple[str, ...] = ()
    is_whole: bool = False  # bare calls are the whole answer, or none

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser; the first begins a call."""
        return (*self.opening, *self.closing)

    @property
    def starts(self) -> tuple[str, ...]:
        return self.opening if self.is_whole else (*self.opening, *_BARE)

    @property
    def noise(self) -> re.Pattern[str] | None:
        return None if self.is_whole else _NOISE

    @property
    def is_whole_answer(self) -> bool:
        return self.is_whole

    @property
    def may_stand_in_reasoning(self) -> bool:
        return False

    def calls(self, s: Scanner, mark: str, tools: ToolSet) -> Step[None]:
        if mark not in self.opening:
            yield from self._one(s, tools)
            return
        s.take(s.at + len(mark))
        yield from call_objects(s, tools, HERMES_KEYS, separators=";,", closing=self.closing)

    def whole_answer(self, s: Scanner, tools: ToolSet) -> Step[None]:
        if (yield from s.comes(0, *_BARE)):
            yield from s.attempt(self._whole(s, tools))

    def _one(self, s: Scanner, tools: ToolSet) -> Step[None]:
        s.out.hold()
        yield from call_objects(s, tools, _KNOWN, separators=";,")
        s.out.release()
        s.commit()

    def _whole(self, s: Scanner, tools: ToolSet) -> Step[None]:
        s.out.hold()
        yield from s.space()
        yield from call_objects(s, tools, _KNOWN, separators=";,")
        yield from s.space()
        if (yield from s.peek()):
            raise NotACall  # more than calls
        s.out.release()
        s.commit()
