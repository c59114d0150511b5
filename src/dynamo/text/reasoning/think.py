"""`<think>...</think>`: reasoning between two tags, in front of the answer or between its parts.

    I look first. <think>2 and 2 is 4</think> It is 4.

- Text before the opening tag is content; so is all text when no tag comes. Every further pair of tags is reasoning too.
- A closing tag without an opening one is removed. An opening tag inside reasoning is reasoning text.
- Reasoning that is never closed is reasoning to the end.
- White space that touches a tag which turns reasoning on or off belongs to the tag.

A model whose prompt ends in the opening tag (or that was trained as if it did) starts inside: the tag may still come
first, and is removed.

Held back: at most `markers.MAX_SEPARATOR` characters of white space and the beginning of a tag.
"""

from __future__ import annotations

from typing import Final, Literal

from dynamo.text.markers import WHITE_SPACE, MarkerSearch
from dynamo.text.output import Content, Reasoning

__all__ = ["CLOSING", "OPENING", "ThinkParser"]

OPENING: Final = "<think>"
CLOSING: Final = "</think>"

_EITHER: Final = MarkerSearch(OPENING, CLOSING)
_CLOSE: Final = MarkerSearch(CLOSING)


class ThinkParser:
    """See the module; keeps the promises of `base.ReasoningParser`."""

    __slots__ = ("_held", "_json_is_content", "_skips_space", "_state")

    def __init__(self, *, starts_inside: bool = False, json_is_content: bool = False) -> None:
        """`json_is_content`: the answer is guided JSON, so text that begins with `{` or `[` is no reasoning.

        That is for engines that guide the output from its first token on although the model would reason first.
        """
        self._state: Literal["beginning", "inside", "outside"] = "beginning" if starts_inside else "outside"
        self._json_is_content = json_is_content
        self._held = ""
        self._skips_space = False  # right behind a tag

    @property
    def is_inside(self) -> bool:
        return self._state != "outside"

    def push(self, text: str) -> list[Content | Reasoning]:
        if not self._held and not self._skips_space and text and _EITHER.is_plain(text) and self._state != "beginning":
            return [Reasoning(text) if self._state == "inside" else Content(text)]
        events: list[Content | Reasoning] = []
        text = self._held + text
        at = 0
        if self._state == "beginning":
            begun = self._begin(text)
            if begun < 0:
                return events
            at = begun
        while True:
            if self._skips_space:
                at = len(text) - len(text[at:].lstrip(WHITE_SPACE))
                if at == len(text):
                    self._held = ""
                    return events
                self._skips_space = False
            is_inside = self._state == "inside"
            start, end, mark = (_CLOSE if is_inside else _EITHER).search(text, at)
            if mark == CLOSING and not is_inside:  # a lone one: only the tag itself goes
                start = end - len(CLOSING)
            if start > at:
                events.append(Reasoning(text[at:start]) if is_inside else Content(text[at:start]))
            if mark is None:
                self._held = text[start:]
                return events
            if is_inside or mark == OPENING:
                self._state = "outside" if is_inside else "inside"
                self._skips_space = True
            at = end

    def finish(self) -> list[Content | Reasoning]:
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held) if self.is_inside else Content(held)]

    def _begin(self, text: str) -> int:
        """Decide what the beginning is; where the text goes on, or -1 when more is needed."""
        stripped = text.lstrip(WHITE_SPACE)
        if OPENING.startswith(stripped) and stripped != OPENING:
            self._held = stripped
            return -1
        at = len(text) - len(stripped)
        if self._json_is_content and stripped[0] in "{[":
            self._state = "outside"
            return at
        self._state = "inside"
        if stripped.startswith(OPENING):
            self._skips_space = True
            return at + len(OPENING)
        return at
