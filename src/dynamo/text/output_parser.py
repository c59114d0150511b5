"""Reasoning and tool calls of one choice, one behind the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

from dynamo.text.output import CallBegan, CallDropped, Content, Idle, OutputEvent, Reasoning
from dynamo.text.reasoning.base import ReasoningParser
from dynamo.text.tools.base import ToolParser

__all__ = ["MAX_HELD_REASONING", "OutputParser"]

MAX_HELD_REASONING: Final = 1_048_576
"""Characters of reasoning that wait to become content (`fills_content`); longer reasoning is emitted as reasoning."""


_ANY: Final = Idle(frozenset(), Content)


@functools.cache
def _both(characters: frozenset[str], idle: Idle) -> Idle:
    return Idle(characters | idle.characters, idle.kind)


class OutputParser:
    """Text in, events out: the reasoning parser first, what it calls content through the tool parser.

    Keeps the promises of both: the events' meaning does not depend on the cuts, and nothing raises.
    """

    __slots__ = (
        "_calls",
        "_fills_content",
        "_held",
        "_held_characters",
        "_idle",
        "_inside",
        "_is_left_out",
        "_make_inside",
        "_only_first_call",
        "_only_function",
        "_reasoning",
        "_tools",
    )

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        only_first_call: bool = False,
        only_function: str | None = None,
        fills_content: bool = False,
        inside: Callable[[], ToolParser] | None = None,
    ) -> None:
        """`only_first_call` drops every further call, and `only_function` every call of another function.

        `fills_content`: reasoning with no answer behind it is content.

        `inside` makes a parser of a span of reasoning, which may hold calls.
        With `fills_content` reasoning is held back until there is other output.
        """
        self._reasoning, self._tools = reasoning, tools
        self._only_first_call, self._only_function = only_first_call, only_function
        self._calls = 0  # that were kept
        self._is_left_out = False  # the last call that began was dropped
        self._fills_content = fills_content
        self._held: list[str] = []
        self._held_characters = 0
        self._idle: Idle | None = None
        self._make_inside = inside
        self._inside: ToolParser | None = None  # while a span of reasoning is read

    def push(self, text: str) -> list[OutputEvent]:
        """Parse the next piece of text, which may be empty."""
        idle = self._idle
        if idle is not None and text and idle.characters.isdisjoint(text):
            return [idle.kind(text)]  # nearly every piece: no mark begins in it, and nothing is held back
        if self._reasoning is None:
            events = self._behind_reasoning([Content(text)] if text else [])
        else:
            events = self._behind_reasoning(self._reasoning.push(text))
        self._idle = self._plain_text()
        return events

    def _plain_text(self) -> Idle | None:
        """Return how text without marks passes now, until a piece with a mark comes."""
        if self._fills_content:
            return None
        first = _ANY if self._reasoning is None else self._reasoning.idle
        if first is not None and first.kind is Reasoning and self._make_inside is not None:
            within = None if self._inside is None else self._inside.idle
            return None if within is None else _both(first.characters, within)
        if first is None or first.kind is Reasoning or self._tools is None:
            return first
        second = self._tools.idle
        return None if second is None else _both(first.characters, second)

    def finish(self, *, is_cut: bool = False) -> list[OutputEvent]:
        """End the text; return the events held back. `is_cut`: the text ended because a limit was reached."""
        events = self._behind_reasoning(self._reasoning.finish(is_cut=is_cut)) if self._reasoning is not None else []
        events += self._end_inside()
        if self._tools is not None:
            events += self._keep(self._tools.finish(is_cut=is_cut))
        if self._held:
            events.append(Content("".join(self._held)))
            self._held = []
        return events

    def _behind_reasoning(self, parts: Sequence[OutputEvent]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for part in parts:
            if isinstance(part, Reasoning):
                events += self._reasoned(self._read_inside(part))
                continue
            events += self._end_inside()
            if isinstance(part, Content) and self._tools is not None:
                events += self._keep(self._tools.push(part.text))
            else:
                events += self._keep([part])
        return events

    def _read_inside(self, part: Reasoning) -> list[OutputEvent]:
        if self._make_inside is None:
            return [part]
        if self._inside is None:
            self._inside = self._make_inside()
        return self._inside.push(part.text)

    def _end_inside(self) -> list[OutputEvent]:
        inside, self._inside = self._inside, None
        return [] if inside is None else self._reasoned(inside.finish(is_cut=True))

    def _reasoned(self, found: list[OutputEvent]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for event in found:
            if not isinstance(event, Reasoning):
                events += self._keep([event])
            elif self._fills_content:
                events += self._hold(event.text)
            else:
                events.append(event)
        return events

    def _hold(self, reasoning: str) -> list[OutputEvent]:
        room = MAX_HELD_REASONING - self._held_characters
        self._held.append(reasoning)
        self._held_characters += len(reasoning)
        return self._release() if len(reasoning) > room else []

    def _release(self) -> list[OutputEvent]:
        """Switch to reasoning because there is an answer: the held text is reasoning, and so is all that follows."""
        self._fills_content = False
        held, self._held = "".join(self._held), []
        return [Reasoning(held)] if held else []

    def _keep(self, events: list[OutputEvent]) -> list[OutputEvent]:
        kept: list[OutputEvent] = []
        for event in events:
            if isinstance(event, CallBegan):
                is_other = self._only_function not in (None, event.name)
                self._is_left_out = is_other or (self._only_first_call and self._calls > 0)
                self._calls += not self._is_left_out
            elif isinstance(event, CallDropped):
                if self._is_left_out:
                    event = Content(event.text)
                else:
                    self._calls -= 1
            if isinstance(event, Content) or not self._is_left_out:
                if self._fills_content:
                    kept += self._release()
                kept.append(event)
        return kept
