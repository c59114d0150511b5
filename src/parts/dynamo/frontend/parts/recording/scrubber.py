"""Takes what a client wrote out of texts that may quote it: messages of engines, lines of the log. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_WINDOW: Final = 12  # characters that are compared at once
_STEP: Final = 4  # so every common run of _WINDOW + _STEP - 1 characters is found
_SHORTEST: Final = 4  # characters of a whole text that is searched for as a word; a shorter one hides too much
_MAX_SHORT: Final = 64  # such texts of one request
_MAX_CONTENT: Final = 256 * 1024  # characters of one request that are compared
_MAX_TEXT: Final = 8192  # characters of one text that are examined; the rest is cut off


class ContentScrubber:
    """Replaces what texts have in common with the content of one request.

    Found is any run of 15 characters, and any whole text of the request from 4 characters on where it stands as a word.
    """

    __slots__ = ("_content", "_short")

    def __init__(self, texts: Iterable[str]) -> None:
        """`texts`: the content."""
        kept, short, left = list[str](), list[str](), _MAX_CONTENT
        for text in texts:
            if left <= 0:
                break
            kept.append(text[:left])
            left -= len(text)
            if _SHORTEST <= len(text) < _WINDOW + _STEP and len(short) < _MAX_SHORT:
                short.append(re.escape(text.strip()))
        self._content = "\0".join(kept)
        short.sort(key=len, reverse=True)
        self._short = re.compile(rf"(?<!\w)(?:{'|'.join(short)})(?!\w)") if short else None

    def clean(self, text: str) -> str:
        """Return the text without what is content."""
        text = text[:_MAX_TEXT]
        if not self._content:
            return text
        content, parts, done, at = self._content, list[str](), 0, 0
        while at + _WINDOW <= len(text):
            found = content.find(text[at : at + _WINDOW])
            if found < 0:
                at += _STEP
                continue
            start, end = self._extend(text, at, found, done)
            parts += [text[done:start], f"[{end - start} characters of the request]"]
            done = at = end
        cleaned = "".join([*parts, text[done:]])
        return cleaned if self._short is None else self._short.sub("[text of the request]", cleaned)

    def _extend(self, text: str, at: int, found: int, done: int) -> tuple[int, int]:
        """Return the ends of the common run that holds the window at `at`, which the content has at `found`."""
        content = self._content
        start, before = at, found
        while start > done and before and text[start - 1] == content[before - 1]:
            start, before = start - 1, before - 1
        end, behind = at + _WINDOW, found + _WINDOW
        while end < len(text) and behind < len(content) and text[end] == content[behind]:
            end, behind = end + 1, behind + 1
        return start, end
