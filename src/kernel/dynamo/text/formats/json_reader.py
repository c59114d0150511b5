"""Reading one JSON value that arrives in pieces, more leniently than the standard, and returning strict JSON."""

from __future__ import annotations

import re
from enum import IntEnum, auto
from typing import Final

MAX_DEPTH: Final = 128  # arrays and objects inside each other; decoders behind us have limits of their own
_LONGEST_NUMBER: Final = 1000  # characters; decoders refuse longer ones
_LONGEST_GAP: Final = 64  # white space behind a comma that is kept as it was written

_SPACE: Final = re.compile(r"[ \t\r\n]+")
_PLAIN: Final = re.compile(r"[^\"'\\\x00-\x1f]+")  # what a string of either kind may hold as it is
_NUMBER_PIECE: Final = re.compile(r"[0-9+\-.eE]+")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HEX_DIGITS: Final = frozenset("0123456789abcdefABCDEF")
_WORDS: Final = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
    "NaN": '"NaN"',  # no JSON: kept as text
    "Infinity": '"Infinity"',
}


class _At(IntEnum):
    """What may come next."""

    KEY = auto()
    COLON = auto()
    VALUE = auto()
    BEHIND = auto()  # a comma, or the end of what is open
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()
    NUMBER = auto()
    COMPLETE = auto()
    BROKEN = auto()


class JsonReader:
    """One JSON value, from its first character on.

    Beyond JSON it reads what models write that have seen more Python: raw control characters in strings, strings in
    single quotes, `True`, `False` and `None`, a comma behind the last member. `read` returns the JSON of it, which is the
    text itself where the text is JSON. Numbers are returned when they are complete; one that no double holds is a string.
    """

    __slots__ = ("_at", "_gap", "_held", "_is_key", "_may_close", "_quote", "_stack", "has_key")

    def __init__(self) -> None:
        self._at = _At.VALUE
        self._stack: list[str] = []  # the closing characters that are due, the innermost last
        self._may_close = False  # right behind an opening bracket or a comma
        self._gap = ""  # a comma and the white space behind it, until it is known whether a member follows
        self._held = ""  # a word, number or \u escape that is not complete
        self._is_key = False  # what the string at hand is
        self._quote = '"'
        self.has_key = False  # the first key of an object and its colon have been read

    @property
    def is_complete(self) -> bool:
        """The value has ended. A number on its own ends with the character behind it, or with `finish`."""
        return self._at is _At.COMPLETE

    @property
    def is_broken(self) -> bool:
        """No continuation makes this a value."""
        return self._at is _At.BROKEN

    def finish(self) -> str:
        """End the text: return the number that was held back."""
        out: list[str] = []
        if self._at is _At.NUMBER and not self._stack:
            self._end_number(out)
        return "".join(out)

    def read(self, text: str, at: int = 0) -> tuple[int, str]:
        """Read on from `text[at]`: (where reading stopped, the JSON that was read).

        It stops at the end of `text`, behind the value, or at the character that cannot be.
        """
        out: list[str] = []
        length = len(text)
        while at < length and self._at < _At.COMPLETE:
            match self._at:
                case _At.STRING:
                    at = self._read_string(text, at, out)
                case _At.ESCAPE:
                    at = self._read_escape(text, at, out)
                case _At.HEX:
                    self._held += text[at]
                    if text[at] not in _HEX_DIGITS:
                        self._at = _At.BROKEN
                        break
                    if len(self._held) == 4:
                        out.append("\\u" + self._held)
                        self._at = _At.STRING
                    at += 1
                case _At.WORD:
                    at = self._read_word(text, at, out)
                case _At.NUMBER:
                    at = self._read_number(text, at, out)
                case _:
                    if (space := _SPACE.match(text, at)) is not None:
                        if self._gap:
                            self._gap += space[0][: _LONGEST_GAP - len(self._gap)]
                        else:
                            out.append(space[0])
                        at = space.end()
                    else:
                        at = self._read_token(text, at, out)
        return at, "".join(out)

    def _behind_value(self) -> None:
        self._at = _At.BEHIND if self._stack else _At.COMPLETE

    def _read_string(self, text: str, at: int, out: list[str]) -> int:
        if (plain := _PLAIN.match(text, at)) is not None:
            out.append(plain[0])
            return plain.end()
        char = text[at]
        if char == self._quote:
            out.append('"')
            if self._is_key:
                self._at = _At.COLON
            else:
                self._behind_value()
        elif char == "\\":
            self._at = _At.ESCAPE
        else:
            out.append("'" if char == "'" else '\\"' if char == '"' else f"\\u{ord(char):04x}")
        return at + 1

    def _read_escape(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if char == "u":
            self._at, self._held = _At.HEX, ""
            return at + 1
        if char not in "\"'\\/bfnrt":
            self._at = _At.BROKEN
            return at
        out.append("'" if char == "'" else "\\" + char)
        self._at = _At.STRING
        return at + 1

    def _read_word(self, text: str, at: int, out: list[str]) -> int:
        self._held += text[at]
        if self._held in _WORDS:
            out.append(_WORDS[self._held])
            self._behind_value()
        elif not any(word.startswith(self._held) for word in _WORDS):
            self._at = _At.BROKEN
            return at
        return at + 1

    def _read_number(self, text: str, at: int, out: list[str]) -> int:
        piece = _NUMBER_PIECE.match(text, at)
        if piece is None:
            self._end_number(out)
            return at
        self._held += piece[0]
        if len(self._held) > _LONGEST_NUMBER:
            self._at = _At.BROKEN
        return piece.end()

    def _end_number(self, out: list[str]) -> None:
        if _NUMBER.fullmatch(self._held) is None:
            self._at = _At.BROKEN
            return
        is_whole = self._held.lstrip("-").isdigit()
        is_finite = is_whole or abs(float(self._held)) != float("inf")
        out.append(self._held if is_finite else f'"{self._held}"')
        self._behind_value()

    def _read_token(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        closing = self._stack[-1] if self._stack else ""
        if char == closing and (self._at is _At.BEHIND or self._may_close):
            out += (self._gap[1:], char)
            self._gap, self._may_close = "", False
            self._stack.pop()
            self._behind_value()
            return at + 1
        self._may_close = False
        match self._at, char:
            case _At.BEHIND, ",":
                self._gap, self._may_close = ",", True
                self._at = _At.KEY if closing == "}" else _At.VALUE
                return at + 1
            case _At.COLON, ":":
                self._at, self.has_key = _At.VALUE, True
                out.append(":")
                return at + 1
            case ((_At.KEY | _At.VALUE), ('"' | "'")):
                self._is_key, self._quote = self._at is _At.KEY, char
                self._at = _At.STRING
                out += (self._gap, '"')
                self._gap = ""
                return at + 1
            case _At.VALUE, ("{" | "[") if len(self._stack) < MAX_DEPTH:
                self._stack.append("}" if char == "{" else "]")
                self._at, self._may_close = (_At.KEY if char == "{" else _At.VALUE), True
                out += (self._gap, char)
                self._gap = ""
                return at + 1
            case _At.VALUE, _ if char in "-0123456789" or any(word[0] == char for word in _WORDS):
                self._at, self._held = (_At.NUMBER if char in "-0123456789" else _At.WORD), ""
                out.append(self._gap)
                self._gap = ""
                return at  # its own state reads it
        self._at = _At.BROKEN
        return at
