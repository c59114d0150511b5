"""Text from outside as one safe line of bounded length.

Names, error texts and headers come from clients, engines and other processes. A line break in one of them would forge a
record, an escape sequence would steer the reader's terminal, and a megabyte of it would fill the disk.
"""

from __future__ import annotations

import re
from typing import Final

MAX_FIELD_CHARACTERS: Final = 512  # an id has 36 and a long path 200
MAX_MESSAGE_CHARACTERS: Final = 4096  # an error text with a quoted request fits
MAX_LINES_CHARACTERS: Final = 16 * 1024  # a traceback of a hundred frames fits
MAX_LINES: Final = 400  # so is that
CUT: Final = "...(cut)..."

# C0 and C1 controls (line breaks, ESC, and the one-byte CSI), Unicode's own line breaks, what turns the direction of
# text around, what has no width, and halves of characters, which no stream can write.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028\u2029\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_NAMES: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_COLOUR: Final = re.compile("\x1b\\[[0-9;]*m")


def one_line(text: str, limit: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Escape what is not printable and cut the text at `limit` characters; the end then names how many are missing."""
    if len(text) <= limit and _UNSAFE.search(text) is None:
        return text
    escaped = _UNSAFE.sub(_escape, text[:limit])  # cut first: the whole of it may be large
    kept = escaped[:limit]
    missing = max(0, len(text) - limit) + len(escaped) - len(kept)
    return f"{kept}...(cut, {missing} more characters)" if missing else kept


def safe_lines(text: str, limit: int = MAX_LINES_CHARACTERS) -> list[str]:
    """Split a text of several lines (a traceback) into safe ones; of a long text the beginning and the end are kept."""
    if len(text) > limit:
        text = f"{text[: limit // 4]}\n{CUT}\n{text[-(limit - limit // 4) :]}"  # the end names the error
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES // 4], CUT, *lines[-(MAX_LINES - MAX_LINES // 4) :]]
    return [one_line(line) for line in lines]


def without_colours(text: str) -> str:
    """Remove ANSI colours, which cannot forge anything and would be noise when escaped."""
    return _COLOUR.sub("", text) if "\x1b" in text else text


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    code = ord(character)
    return _NAMES.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
