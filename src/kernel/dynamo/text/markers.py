"""Finding fixed marks such as `<think>` in text that arrives in pieces."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

MAX_SEPARATOR: Final = 64
"""The most line breaks next to a mark that may be the mark's own and no text, which is also how much white space is held
back until it is known what follows."""

LINE_BREAKS: Final = "\r\n"
WHITE_SPACE: Final = " \t\r\n"

# Each mark is searched in windows that double, so a search costs as much as the distance to the mark that it finds, also
# where one of the marks never comes.
_FIRST_WINDOW: Final = 256


class Found(NamedTuple):
    """`text[start:end]` is the mark with the line breaks before it or, when `mark` is None, what may yet become one."""

    start: int
    end: int
    mark: str | None


class MarkerSearch:
    """Searches for any of a few marks, none of which contains another one's beginning behind its own first character.

    The first mark by position wins, so what is found does not depend on how the text was cut as long as the caller
    puts the held tail in front of the next piece. That tail is never longer than `MAX_SEPARATOR` and the longest mark.
    """

    __slots__ = ("_held_at_end", "_longer", "_marks", "_takes_line_breaks", "first_chars", "longest", "stops")

    def __init__(self, *marks: str, takes_line_breaks: bool = False) -> None:
        """`takes_line_breaks`: those right before a mark, up to `MAX_SEPARATOR`, are found together with the mark."""
        self._marks = tuple(sorted(marks, key=len, reverse=True))  # of two at one place the longer one wins
        self.longest = len(self._marks[0]) if marks else 0
        # A mark that begins a longer one is certain only when the text behind it is not the longer one's.
        longer = {mark: tuple(one for one in marks if one != mark and one.startswith(mark)) for mark in marks}
        self._longer = {mark: ones for mark, ones in longer.items() if ones}
        self._takes_line_breaks = takes_line_breaks
        self._held_at_end = LINE_BREAKS if takes_line_breaks else ""
        self.first_chars = frozenset(mark[0] for mark in marks)
        self.stops = self.first_chars.union(self._held_at_end)  # text without any of these is plain, whatever follows

    def is_plain(self, text: str) -> bool:
        """Return whether `text`, which is not empty, neither holds a mark nor ends in a possible beginning of a mark."""
        return text[-1] not in self._held_at_end and self.first_chars.isdisjoint(text)

    def search(self, text: str, start: int = 0) -> Found:
        """Return the first mark at or behind `start`, else the tail that must be held back (often empty)."""
        length = len(text)
        if start < length and length - start < _FIRST_WINDOW and self.is_plain(text):
            return Found(length, length, None)
        at, mark = self._first(text, start)
        end = length if mark is None else at + len(mark)
        if self._takes_line_breaks:
            least = max(start, at - MAX_SEPARATOR)
            while at > least and text[at - 1] in LINE_BREAKS:
                at -= 1
        return Found(at, end, mark)

    def _first(self, text: str, start: int) -> tuple[int, str | None]:
        """Return the first whole mark, or else where a tail begins that may become one."""
        length, at, window = len(text), start, _FIRST_WINDOW
        while at < length:
            best, found = min(length, at + window), None
            for mark in self._marks:
                place = text.find(mark, at, best + len(mark) - 1 if found is None else best + len(mark))
                if place >= 0 and (found is None or place < best):
                    best, found = place, mark
            if found is not None:
                longer = self._longer.get(found, ())
                is_certain = not any(mark.startswith(text[best:]) for mark in longer if len(mark) > length - best)
                return best, found if is_certain else None
            at, window = best, window * 2
        for place in range(max(start, length - self.longest + 1), length):
            if text[place] in self.first_chars:
                tail = text[place:]
                if any(mark.startswith(tail) for mark in self._marks):
                    return place, None
        return length, None


@functools.cache
def search_for(*marks: str) -> MarkerSearch:
    """Return the search for marks of a format: of these there are as many as the formats have, so each is kept."""
    return MarkerSearch(*marks)
