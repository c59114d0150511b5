"""The input of a custom tool, out of the arguments of the function that stands for it."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from dynamo.protocol.responses.tools import CUSTOM_INPUT

_BEGINNING: Final = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_PLAIN: Final = re.compile(r'[^"\\]+')
_HEXADECIMAL: Final = re.compile(r"[0-9a-fA-F]*")
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
_REPLACEMENT: Final = "\ufffd"  # of half a code point


class CustomInputReader:
    """Reads the input while the arguments are written. Its output does not depend on how they are cut.

    More is taken for an escape or a character of the text than JSON allows: models write line ends as they are.
    """

    __slots__ = ("_arguments", "_is_inside", "_is_over", "_raw", "_told")

    def __init__(self) -> None:
        self._arguments = ""  # until the input begins
        self._raw = ""  # of the input, not yet returned
        self._is_inside = self._is_over = False
        self._told: list[str] = []

    @property
    def text(self) -> str:
        """What was returned so far."""
        return "".join(self._told)

    def push(self, arguments: str) -> str:
        """Read the next piece of the arguments; return the next piece of the input."""
        if self._is_over:
            return ""
        if self._is_inside:
            self._raw += arguments
        else:
            self._arguments += arguments
            began = _BEGINNING.match(self._arguments)
            if began is None:
                return ""
            self._is_inside = True
            self._raw, self._arguments = self._arguments[began.end() :], ""
        return self._tell(self._read())

    def finish(self) -> str:
        """End the arguments; return the rest of the input."""
        return "" if self._is_inside else self._tell(_otherwise(self._arguments))

    def _tell(self, text: str) -> str:
        if text:
            self._told.append(text)
        return text

    def _read(self) -> str:
        """Return what is whole of the raw text, and keep the rest."""
        raw, at, found = self._raw, 0, []
        while at < len(raw):
            if (plain := _PLAIN.match(raw, at)) is not None:
                found.append(plain.group())
                at = plain.end()
            elif raw[at] == '"':
                self._is_over = True
                break
            else:
                text, length = _unescaped(raw[at : at + 12])
                if not length:
                    break
                found.append(text)
                at += length
        self._raw = raw[at:]
        return "".join(found)


def custom_input(arguments: str) -> str:
    """Return the input that arguments hold; of arguments that were cut off, as much as there is.

    A model that wrote something else than the one argument is taken at its word: the text of its only string, or all of it.
    """
    reader = CustomInputReader()
    return reader.push(arguments) + reader.finish()


def _unescaped(raw: str) -> tuple[str, int]:
    """Return the text of the escape at the beginning of `raw`, and its length; 0: more of it must come."""
    kind = raw[1:2]
    if kind != "u":
        return (_ESCAPED.get(kind, "\\" + kind), 2) if kind else ("", 0)
    digits = _hexadecimal(raw[2:6])
    if len(digits) < 4:
        return ("", 0) if 2 + len(digits) == len(raw) else ("\\u", 2)
    code = int(digits, 16)
    if not 0xD800 <= code < 0xE000:
        return chr(code), 6
    if code >= 0xDC00:
        return _REPLACEMENT, 6
    second = _hexadecimal(raw[8:12])
    if len(second) == 4 and raw[6:8] == "\\u" and 0xDC00 <= (low := int(second, 16)) < 0xE000:
        return chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00), 12
    may_follow = "\\u".startswith(raw[6:8]) and 8 + len(second) >= len(raw) and len(second) < 4
    return ("", 0) if may_follow else (_REPLACEMENT, 6)


def _hexadecimal(text: str) -> str:
    found = _HEXADECIMAL.match(text)
    return "" if found is None else found.group()


def _otherwise(arguments: str) -> str:
    """Return the input where it is not the first member."""
    if f'{{"{CUSTOM_INPUT}":"'.startswith("".join(arguments.split())):
        return ""  # cut off before it began
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    if isinstance(value, dict):
        if isinstance(found := value.get(CUSTOM_INPUT), str):
            return found
        if len(value) == 1 and isinstance(only := next(iter(value.values())), str):
            return only
    return value if isinstance(value, str) else arguments
