"""Error messages of one kind as one text: what differs from request to request is replaced."""

from __future__ import annotations

import re
from typing import Final

from dynamo.runtime.observe.log_text import one_line

__all__ = ["MAX_TEMPLATE_CHARACTERS", "message_template"]

MAX_TEMPLATE_CHARACTERS: Final = 240
_MAX_READ: Final = 2000  # characters of a message that are looked at; an engine may quote a whole prompt

# Quoted texts, also one whose end was cut off, and the words between spaces. An apostrophe inside a word opens nothing.
_PARTS: Final = re.compile(
    r"""(?P<quoted>"[^"]*(?:"|$)|`[^`]*(?:`|$)|(?<![\w.])'[^']*(?:'|$))|(?P<word>[\w.:@%+-]+)|(?P<rest>.)""", re.S
)
_HEX: Final = re.compile(r"[0-9a-fA-F-]{8,}")
_ENDS: Final = ".:-"


def message_template(message: str) -> str:
    """Return a message with its ids, numbers and quoted texts replaced, as one safe line of bounded length.

    Messages that differ only in those have the same template.
    """
    found = "".join([_generic(part) for part in _PARTS.finditer(message[:_MAX_READ])])
    line = one_line(" ".join(found.split()), _MAX_READ * 4)
    return line if len(line) <= MAX_TEMPLATE_CHARACTERS else line[: MAX_TEMPLATE_CHARACTERS - 1] + "…"


def _generic(part: re.Match[str]) -> str:
    if part.lastgroup == "quoted":
        return f"{part[0][0]}*{part[0][0]}"
    if part.lastgroup == "rest":
        return part[0]
    word = part[0].rstrip(_ENDS)
    tail = part[0][len(word) :]
    if _HEX.fullmatch(word) or any(character.isdigit() for character in word):
        return f"#{tail}"
    return part[0]
