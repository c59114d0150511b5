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

from typing import Final, Literal

from dynamo.text.markers import LINE_BREAKS, MAX_SEPARATOR, WHITE_SPACE, MarkerSearch
from dynamo.text.output import Content, Reasoning

__all__ = ["CLOSING", "OPENING", "ThinkParser"]

OPENING: Final = "<think>"
CLOSING: Final = "</think>"

_EITHER_AT_BEGINNING: Final = MarkerSearch(OPENING, CLOSING, takes_line_breaks=True)
_EITHER: Final = MarkerSearch(OPENING, CLOSING)
_CLOSE: Final = MarkerSearch(CLOSING, takes_line_breaks=True)


class ThinkParser:
    """See the module; keeps the promises of `base.ReasoningParser`."""

    __slots__ = ("_has_content", "_held", "_json_is_content", "_skips_line_breaks", "_state")

    def __init__(self, *, starts_inside: bool = False, json_is_content: bool = False) -> None:
        """`json_is_content`: the answer is guided JSON, so text that begins with `{` or `[` is no reasoning.

        That is for engines that guide the output from its first token on although the model would reason first.
        """
        self._state: Literal["beginning", "inside", "outside"] = "beginning" if starts_inside else "outside"
        self._json_is_content = json_is_content
        self._has_content = False
        self._held = ""
        self._skips_line_breaks = False  # right behind a tag

    @property
    def is_inside(self) -> bool:
        return self._state != "outside"

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
            if mark == CLOSING and not is_inside:  # a lone one: only the tag itself goes
                start = end - len(CLOSING)
            if start > at:
                was_beginning = not is_inside and not self._has_content
                events.append(self._event(text[at:start]))
                if was_beginning:  # line breaks before the tag are no longer at the content's beginning
                    at = start
                    continue
            if mark is None:
                self._held = text[start:]
                return events
            if is_inside or mark == OPENING:
                self._state = "outside" if is_inside else "inside"
                self._skips_line_breaks = not (is_inside and self._has_content)
            at = end

    @property
    def _search(self) -> MarkerSearch:
        if self._state == "inside":
            return _CLOSE
        return _EITHER if self._has_content else _EITHER_AT_BEGINNING

    def _event(self, text: str) -> Content | Reasoning:
        if self.is_inside:
            return Reasoning(text)
        self._has_content = True
        return Content(text)

    def finish(self) -> list[Content | Reasoning]:
        held, self._held = self._held, ""
        if self._state == "beginning":
            held = held.lstrip(LINE_BREAKS)
        return [self._event(held)] if held else []

    def _begin(self, text: str) -> int:
        """Decide what the beginning is; where the text goes on, or -1 when more is needed."""
        stripped = text.lstrip(WHITE_SPACE)
        space = len(text) - len(stripped)
        if space <= MAX_SEPARATOR:
            if OPENING.startswith(stripped) and stripped != OPENING:
                self._held = text
                return -1
            if self._json_is_content and stripped[0] in "{[":
                self._state = "outside"
                return space
            if stripped.startswith(OPENING):
                self._state, self._skips_line_breaks = "inside", True
                return space + len(OPENING)
        self._state, self._skips_line_breaks = "inside", True  # the opening tag stood in the prompt
        return 0
