"""Stop strings over a stream of text.

The match that counts is the one that is complete first; of several complete at the same character, the longest. So the
answer is the one an engine would have given that generates character by character, however the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_NOTHING: Final = ("", None)


class StopStrings:
    """The state of one choice: text that may still become a stop string is held back."""

    __slots__ = ("_first_chars", "_held", "_include", "_matched", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """`include` keeps the matched stop string in the text. Empty strings are ignored."""
        # Longest first: of matches that end together the first one found wins.
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return (text that is safe to show, the stop string that is now complete or None). Nothing is shown after a match."""
        if not self._held:
            if self._matched is None and self._first_chars.isdisjoint(text):
                return text, None
        elif text:
            text = self._held + text
            self._held = ""
        else:
            return _NOTHING
        if self._matched is not None:
            return _NOTHING
        end, found = len(text) + 1, None
        for stop in self._stops:
            at = text.find(stop, 0, end - 1)  # only a match that ends earlier than the best one is of interest
            if at >= 0:
                end, found = at + len(stop), stop
        if found is not None:
            self._matched = found
            return text[: end if self._include else end - len(found)], found
        keep = self._start_of_a_possible_stop(text)
        self._held = text[keep:]
        return text[:keep], None

    def finish(self) -> str:
        """Return the text held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    def _start_of_a_possible_stop(self, text: str) -> int:
        """Return where the earliest suffix starts that is the beginning of a stop string; `len(text)` without such a suffix."""
        keep = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), keep)
            while at >= 0:
                if stop.startswith(text[at:]):
                    keep = at
                    break
                at = text.find(stop[0], at + 1, keep)
        return keep
