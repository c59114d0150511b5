"""Finding fixed marks such as `<think>` in text that arrives in pieces."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = ["LINE_BREAKS", "MAX_SEPARATOR", "WHITE_SPACE", "Found", "MarkerSearch"]

MAX_SEPARATOR: Final = 64
"""The most line breaks next to a mark that may be the mark's own and no text, which is also how much white space is held
back until it is known what follows."""

LINE_BREAKS: Final = "\r\n"
WHITE_SPACE: Final = " \t\r\n"


class Found(NamedTuple):
    """`text[start:end]` is the mark with the line breaks before it or, when `mark` is None, what may yet become one."""

    start: int
    end: int
    mark: str | None


class MarkerSearch:
    """Looks for any of a few marks, none of which contains another one's beginning behind its own first character.

    The first mark by position wins, so what is found does not depend on how the text was cut as long as the caller
    puts the held tail in front of the next piece. That tail is never longer than `MAX_SEPARATOR` and the longest mark.
    """

    __slots__ = ("_first_chars", "_held_at_end", "_pattern")

    def __init__(self, *marks: str, takes_line_breaks: bool = False) -> None:
        """`takes_line_breaks`: those right before a mark, up to `MAX_SEPARATOR`, are found together with the mark."""
        starts = sorted({mark[:cut] for mark in marks for cut in range(len(mark))}, key=len, reverse=True)
        whole = "|".join(map(re.escape, marks))
        begun = "|".join(map(re.escape, starts))
        before = rf"[{LINE_BREAKS}]{{0,{MAX_SEPARATOR}}}" if takes_line_breaks else ""
        self._pattern = re.compile(rf"{before}(?:({whole})|(?:{begun})\Z)")
        self._held_at_end = LINE_BREAKS if takes_line_breaks else ""
        self._first_chars = frozenset(mark[0] for mark in marks)

    def is_plain(self, text: str) -> bool:
        """Return whether `text`, which is not empty, neither holds a mark nor ends in a possible beginning of a mark."""
        return text[-1] not in self._held_at_end and self._first_chars.isdisjoint(text)

    def search(self, text: str, start: int = 0) -> Found:
        """Return the first mark at or behind `start`, else the tail that must be held back (often empty)."""
        length = len(text)
        if start < length and self.is_plain(text):
            return Found(length, length, None)
        match = self._pattern.search(text, start)
        if match is None:  # cannot be: the pattern matches the empty tail
            return Found(length, length, None)
        return Found(match.start(), match.end(), match.group(1))
