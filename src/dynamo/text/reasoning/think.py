"""`<think>...</think>`: reasoning between two tags, in front of the answer or between its parts.

    I look first. <think>2 and 2 is 4</think> It is 4.

- Text before the opening tag is content; so is all text when no tag comes. Every further pair of tags is reasoning too.
- A closing tag without an opening one is removed. An opening tag inside reasoning is reasoning text.
- Reasoning that is never closed is reasoning to the end.
- Line breaks that touch a tag are no reasoning, and none of the content's beginning. All other white space is kept.

A model whose prompt ends in the opening tag (or that was trained as if it did) starts inside: the tag may still come
first, and is removed.

Held back: at most `markers.MAX_SEPARATOR` characters of white space and the beginning of a tag. A longer run of line breaks
in front of a tag is text.
"""

from __future__ import annotations

import functools
from typing import Final, Literal, NamedTuple

from dynamo.text.markers import LINE_BREAKS, MAX_SEPARATOR, WHITE_SPACE, MarkerSearch
from dynamo.text.output import Content, Idle, Reasoning

__all__ = ["CLOSING", "OPENING", "ThinkParser"]

OPENING: Final = "<think>"
CLOSING: Final = "</think>"


class _Searches(NamedTuple):
    """What is looked for, by where reading is."""

    either_at_beginning: MarkerSearch
    either: MarkerSearch
    close: MarkerSearch
    idle_inside: Idle
    idle_outside: Idle


@functools.cache
def _searches(openings: tuple[str, ...], closings: tuple[str, ...]) -> _Searches:
    either, close = MarkerSearch(*openings, *closings), MarkerSearch(*closings, takes_line_breaks=True)
    return _Searches(
        MarkerSearch(*openings, *closings, takes_line_breaks=True),
        either,
        close,
        Idle(close.first_chars.union(LINE_BREAKS), Reasoning),
        Idle(either.first_chars, Content),
    )


class ThinkParser:
    """See the module; keeps the promises of `base.ReasoningParser`."""

    __slots__ = (
        "_closings",
        "_has_content",
        "_held",
        "_json_is_content",
        "_openings",
        "_searches",
        "_skips_line_breaks",
        "_state",
    )

    def __init__(
        self,
        *,
        starts_inside: bool = False,
        json_is_content: bool = False,
        openings: tuple[str, ...] = (OPENING,),
        closings: tuple[str, ...] = (CLOSING,),
    ) -> None:
        """`json_is_content`: the answer is guided JSON, so text that begins with `{` or `[` is no reasoning.

        That is for engines that guide the output from its first token on although the model would reason first.
        `openings` and `closings`: the tags of a family, any of which will do.
        """
        self._openings, self._closings = openings, closings
        self._searches = _searches(openings, closings)
        self._state: Literal["beginning", "inside", "outside"] = "beginning" if starts_inside else "outside"
        self._json_is_content = json_is_content
        self._has_content = False
        self._held = ""
        self._skips_line_breaks = False  # right behind a tag

    @property
    def is_inside(self) -> bool:
        return self._state != "outside"

    @property
    def idle(self) -> Idle | None:
        if self._held or self._skips_line_breaks or self._state == "beginning":
            return None
        if self._state == "inside":
            return self._searches.idle_inside
        return self._searches.idle_outside if self._has_content else None

    def push(self, text: str) -> list[Content | Reasoning]:
        is_free = not self._held and not self._skips_line_breaks and self._state != "beginning"
        if is_free and text and self._search.is_plain(text):
            return [self._event(text)]
        events: list[Content | Reasoning] = []
        text = self._held + text
        at = 0
        if self._state == "beginning":
            begun = self._begin(text)
            if begun < 0:
                return events
            at = begun
        while True:
            if self._skips_line_breaks:
                at = len(text) - len(text[at:].lstrip(LINE_BREAKS))
                if at == len(text):
                    self._held = ""
                    return events
                self._skips_line_breaks = False
            is_inside = self._state == "inside"
            start, end, mark = self._search.search(text, at)
            if mark in self._closings and not is_inside:  # a lone one: only the tag itself goes
                start = end - len(mark)
            if start > at:
                was_beginning = not is_inside and not self._has_content
                events.append(self._event(text[at:start]))
                if was_beginning:  # line breaks before the tag are no longer at the content's beginning
                    at = start
                    continue
            if mark is None:
                self._held = text[start:]
                return events
            if is_inside or mark in self._openings:
                self._state = "outside" if is_inside else "inside"
                self._skips_line_breaks = not (is_inside and self._has_content)
            at = end

    @property
    def _search(self) -> MarkerSearch:
        if self._state == "inside":
            return self._searches.close
        return self._searches.either if self._has_content else self._searches.either_at_beginning

    def _event(self, text: str) -> Content | Reasoning:
        if self.is_inside:
            return Reasoning(text)
        self._has_content = True
        return Content(text)

    def finish(self, *, is_cut: bool = False) -> list[Content | Reasoning]:
        held, self._held = self._held, ""
        if self._state == "beginning":
            held = held.lstrip(LINE_BREAKS)
        return [self._event(held)] if held else []

    def _begin(self, text: str) -> int:
        """Decide what the beginning is; where the text goes on, or -1 when more is needed."""
        stripped = text.lstrip(WHITE_SPACE)
        space = len(text) - len(stripped)
        if space <= MAX_SEPARATOR:
            if any(opening.startswith(stripped) and stripped != opening for opening in self._openings):
                self._held = text
                return -1
            if self._json_is_content and stripped[0] in "{[":
                self._state = "outside"
                return space
            for opening in self._openings:
                if stripped.startswith(opening):
                    self._state, self._skips_line_breaks = "inside", True
                    return space + len(opening)
        self._state, self._skips_line_breaks = "inside", True  # the opening tag stood in the prompt
        return 0
