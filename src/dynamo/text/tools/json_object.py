"""Reading one JSON object character by character, to know at once where it ends or stops being one."""

from __future__ import annotations

import re
from enum import IntEnum, auto
from typing import Final

__all__ = ["MAX_DEPTH", "JsonObjectReader"]

MAX_DEPTH: Final = 128  # arrays and objects inside each other; decoders behind us have limits of their own

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_WHOLE_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?=[ \t\r\n,\]}])")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')  # what a string may hold as it is


class _At(IntEnum):
    """What may come next."""

    OBJECT = auto()  # the opening brace of the whole
    FIRST_KEY = auto()  # a key, or the end of an empty object
    KEY = auto()
    COLON = auto()
    FIRST_VALUE = auto()  # a value, or the end of an empty array
    VALUE = auto()
    SEPARATOR = auto()  # a comma, or the end
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()  # the rest of true, false or null
    NUMBER = auto()
    COMPLETE = auto()
    BROKEN = auto()


_BEFORE_VALUE: Final = frozenset({_At.VALUE, _At.FIRST_VALUE})
_WORDS: Final = {"t": "rue", "f": "alse", "n": "ull"}

# Numbers as a table: state -> character class -> state. Only the marked ones may end.
_NUMBER: Final[dict[str, dict[str, str]]] = {
    "minus": {"0": "zero", "1": "integer"},
    "zero": {".": "point", "e": "exponent"},
    "integer": {"0": "integer", "1": "integer", ".": "point", "e": "exponent"},
    "point": {"0": "fraction", "1": "fraction"},
    "fraction": {"0": "fraction", "1": "fraction", "e": "exponent"},
    "exponent": {"0": "power", "1": "power", "+": "sign"},
    "sign": {"0": "power", "1": "power"},
    "power": {"0": "power", "1": "power"},
}
_NUMBER_MAY_END: Final = frozenset({"zero", "integer", "fraction", "power"})
_NUMBER_CLASS: Final = {
    "0": "0",
    **dict.fromkeys("123456789", "1"),
    ".": ".",
    "e": "e",
    "E": "e",
    "+": "+",
    "-": "+",
}


class JsonObjectReader:
    """One JSON object, after optional white space.

    One thing is more lenient than JSON: a string may hold raw control characters (models write line breaks into
    strings); `read` returns them escaped.
    """

    __slots__ = ("_at", "_hex", "_is_key", "_number", "_stack", "_word", "has_key")

    def __init__(self) -> None:
        self._at = _At.OBJECT
        self._stack: list[str] = []  # the closing characters that are due, the innermost last
        self._is_key = False  # what the string at hand is
        self._hex = 0  # digits of a \u escape still to come
        self._word = ""
        self._number = ""
        self.has_key = False  # the first key and its colon have been read

    @property
    def is_complete(self) -> bool:
        """The closing brace has been read."""
        return self._at is _At.COMPLETE

    @property
    def is_broken(self) -> bool:
        """No continuation makes this an object."""
        return self._at is _At.BROKEN

    def read(self, text: str, start: int = 0) -> tuple[int, str]:
        """Read on from `text[start]`: (where reading stopped, the JSON that was read).

        It stops at the end of `text`, behind the closing brace, or at the character that cannot be.
        """
        at, length, copied = start, len(text), start
        escaped: list[str] = []
        while at < length and self._at < _At.COMPLETE:
            char = text[at]
            match self._at:
                case _At.STRING:
                    match = _PLAIN.match(text, at)
                    at = at if match is None else match.end()
                    if at == length:
                        break
                    char = text[at]
                    if char == '"':
                        self._at = _At.COLON if self._is_key else _At.SEPARATOR
                    elif char == "\\":
                        self._at = _At.ESCAPE
                    else:
                        escaped += (text[copied:at], f"\\u{ord(char):04x}")
                        copied = at + 1
                case _At.NUMBER:
                    following = _NUMBER[self._number].get(_NUMBER_CLASS.get(char, ""))
                    if following is not None:
                        self._number = following
                    elif self._number in _NUMBER_MAY_END:
                        self._at = _At.SEPARATOR
                        continue  # the character is not the number's
                    else:
                        self._at = _At.BROKEN
                case _At.ESCAPE | _At.HEX | _At.WORD:
                    self._inside_token(char)
                case _:
                    if char in " \t\r\n":
                        match = _SPACE.match(text, at)
                        at = at + 1 if match is None else match.end()
                        continue
                    if self._at in _BEFORE_VALUE and (match := _WHOLE_NUMBER.match(text, at)) is not None:
                        self._at = _At.SEPARATOR  # at once what the table would find out digit by digit
                        at = match.end()
                        continue
                    self._between_tokens(char)
            if self._at is _At.BROKEN:
                break
            at += 1
        escaped.append(text[copied:at])
        return at, "".join(escaped)

    def _inside_token(self, char: str) -> None:
        if self._at is _At.WORD:
            if char != self._word[0]:
                self._at = _At.BROKEN
            else:
                self._word = self._word[1:]
                if not self._word:
                    self._at = _At.SEPARATOR
        elif self._at is _At.HEX:
            if char not in "0123456789abcdefABCDEF":
                self._at = _At.BROKEN
            else:
                self._hex -= 1
                if not self._hex:
                    self._at = _At.STRING
        elif char == "u":
            self._at, self._hex = _At.HEX, 4
        else:
            self._at = _At.STRING if char in '"\\/bfnrt' else _At.BROKEN

    def _between_tokens(self, char: str) -> None:
        match self._at, char:
            case ((_At.FIRST_KEY | _At.KEY), '"'):
                self._at, self._is_key = _At.STRING, True
            case _At.COLON, ":":
                self._at, self.has_key = _At.VALUE, True
            case _At.SEPARATOR, ",":
                self._at = _At.KEY if self._stack[-1] == "}" else _At.VALUE
            case ((_At.SEPARATOR | _At.FIRST_KEY | _At.FIRST_VALUE), ("}" | "]")) if char == self._stack[-1]:
                self._stack.pop()
                self._at = _At.SEPARATOR if self._stack else _At.COMPLETE
            case ((_At.OBJECT | _At.VALUE | _At.FIRST_VALUE), "{") if len(self._stack) < MAX_DEPTH:
                self._stack.append("}")
                self._at = _At.FIRST_KEY
            case ((_At.VALUE | _At.FIRST_VALUE), "[") if len(self._stack) < MAX_DEPTH:
                self._stack.append("]")
                self._at = _At.FIRST_VALUE
            case ((_At.VALUE | _At.FIRST_VALUE), '"'):
                self._at, self._is_key = _At.STRING, False
            case ((_At.VALUE | _At.FIRST_VALUE), ("t" | "f" | "n")):
                self._at, self._word = _At.WORD, _WORDS[char]
            case ((_At.VALUE | _At.FIRST_VALUE), "-"):
                self._at, self._number = _At.NUMBER, "minus"
            case ((_At.VALUE | _At.FIRST_VALUE), _) if char in _NUMBER_CLASS and char in "0123456789":
                self._at, self._number = _At.NUMBER, "zero" if char == "0" else "integer"
            case _:
                self._at = _At.BROKEN
