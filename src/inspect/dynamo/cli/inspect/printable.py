"""Text that came from elsewhere, made safe to show: nothing in it can steer a terminal, hide, or break a table."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Final

from rich.cells import cell_len

MOST_MARKS: Final = 2  # combining marks on one letter: real words have up to two, a tower of them paints other lines
ESCAPED: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Me"})
"""Categories that are shown as an escape: controls, invisible format characters (bidi overrides and zero-width ones are
among them), surrogates, private and unassigned ones, line and paragraph separators, enclosing marks."""

BLANK_OR_HUGE: Final = frozenset(
    "\u115f\u1160\u3164\uffa0\u2800"  # letters and symbols without ink
    "\u2e3a\u2e3b\ufdfa\ufdfb\ufdfc\ufdfd"  # far wider than the cell that they count for
)
_CUNEIFORM: Final = range(0x12000, 0x12550)  # some of them cover a dozen cells
_SELECTORS: Final = (range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0))  # they change the width of the character before


@lru_cache(maxsize=4096)
def printable(text: str) -> str:
    """Return the text on one line, with every character that could steer, hide or paint over others shown as its escape."""
    if text.isascii() and text.isprintable():
        return text
    found: list[str] = []
    marks = MOST_MARKS  # a mark at the beginning would sit on what stands before the text
    for character in unicodedata.normalize("NFC", text):
        category = unicodedata.category(character)
        if category in ("Mn", "Mc") and not _is_selector(character):
            marks += 1
            found.append(character if marks <= MOST_MARKS else _escape(character))
            continue
        if category == "Zs":
            character = " "
        elif category in ESCAPED or _is_selector(character) or _is_blank_or_huge(character):
            character = _escape(character)
        marks = 0 if category[0] in "LN" else MOST_MARKS
        found.append(character)
    return "".join(found)


def _is_selector(character: str) -> bool:
    return any(ord(character) in selectors for selectors in _SELECTORS)


def _is_blank_or_huge(character: str) -> bool:
    return character in BLANK_OR_HUGE or ord(character) in _CUNEIFORM


def _escape(character: str) -> str:
    code = ord(character)
    if character in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def width_of(text: str) -> int:
    """Return how many cells of a terminal a printable text covers."""
    return len(text) if text.isascii() else cell_len(text)


def fit(text: str, width: int, *, right: bool = False, tail: bool = False) -> str:
    """Return a printable text in exactly `width` cells: filled with blanks, or cut with a mark.

    `right`: flush right. `tail`: its end is kept, as ids that begin alike differ there.
    """
    if (given := width_of(text)) > width:
        text = _cut(text, width, tail=tail)
        given = width_of(text)
    gap = " " * (width - given)
    return gap + text if right else text + gap


def _cut(text: str, width: int, *, tail: bool) -> str:
    if width <= 1:
        return "…"[:width]
    if text.isascii():
        return "…" + text[1 - width :] if tail else text[: width - 1] + "…"
    kept: list[str] = []
    left = width - 1
    for character in reversed(text) if tail else text:
        left -= cell_len(character)
        if left < 0:
            break
        kept.append(character)
    return "…" + "".join(reversed(kept)) if tail else "".join(kept) + "…"
