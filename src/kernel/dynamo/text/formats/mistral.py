"""Mistral's three dialects, one mark for all.

[TOOL_CALLS] [{"name": "search", "arguments": {"query": "rain"}}]
[TOOL_CALLS]search{"query": "rain"}
[TOOL_CALLS]search[ARGS]{"query": "rain"}          (also [CALL_ID]id before [ARGS])
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dynamo.text.formats.call_form import CallForm
from dynamo.text.formats.json_calls import HERMES_KEYS, call_objects, stream_arguments
from dynamo.text.formats.scanner import MAX_NAME, NotACall, Scanner, Step
from dynamo.text.formats.tool_set import ToolSet
from dynamo.text.markers import MarkerSearch

OPENING: Final = "[TOOL_CALLS]"
CLOSING: Final = "[/TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"

_NAME_END: Final = MarkerSearch("{", "[", "\n", " ", "<")
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
        name = yield from s.until(_NAME_END, limit=MAX_NAME)
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
