"""Decodes a body of megabytes in steps of about a millisecond each.

A JSON decoder reads a body in one piece and with the interpreter lock: 12 MB of escapes take 90 ms, in which no other thread
runs and no stream gets its token, whichever thread decodes. So the long strings are cut out first and decoded in slices; what
is left has short names in their places, and these are exchanged for the texts afterwards.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import msgspec

LARGE_BYTES: Final = 1024 * 1024  # a shorter body is decoded as it is: at most 8 ms
LONG_BYTES: Final = 64  # a string from this length on is cut out
SLICE_BYTES: Final = 256 * 1024  # of a string that are decoded in one go: at most 2 ms
MAX_REST_BYTES: Final = 2 * LARGE_BYTES
"""What may be left without the long strings, to be decoded in one piece: more than a body within the limits on members and items
has, unless its strings are many and just below `LONG_BYTES`."""

T = TypeVar("T")

_decode_text: Final = msgspec.json.Decoder(str).decode
_AFTER_STRING: Final = re.compile(rb"[ \t\r\n]{0,64}:")
_HIGH_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LONGEST_ESCAPE: Final = 6  # \uXXXX


class TooMuchStructure(Exception):
    """A body has more beside its long strings than may be decoded in one piece."""


def decode_in_steps(body: bytes, decode: Callable[[bytes], T]) -> T:
    """Decode `body` like `decode`, which makes msgspec structs, lists and dicts of it.

    Raises what `decode` raises, and TooMuchStructure. Positions in the messages of decode errors are those of the rest.
    """
    spans = list(_long_strings(body))
    if not spans:
        if len(body) > MAX_REST_BYTES:
            raise TooMuchStructure
        return decode(body)
    mark = secrets.token_hex(8)  # a client that could guess it could name texts of its own
    parts: list[bytes] = []
    at = 0
    for number, (start, end) in enumerate(spans):
        parts += (body[at:start], b"%b:%d" % (mark.encode(), number))
        at = end
    parts.append(body[at:])
    rest = b"".join(parts)
    if len(rest) > MAX_REST_BYTES:
        raise TooMuchStructure
    texts = [_text(body, start, end) for start, end in spans]
    value = decode(rest)
    _exchange(value, mark + ":", texts)
    return value


def _long_strings(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of what stands between the quotes of each long string that is no key."""
    find = body.find
    opening = find(b'"')
    while opening >= 0:
        closing = seen = opening
        while True:
            closing = find(b'"', closing + 1)
            if closing < 0:
                return  # not JSON, as `decode` will find
            if body[closing - 1] != 0x5C:
                break
            before = body[seen + 1 : closing]
            if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
                break
            seen = closing
        if closing - opening > LONG_BYTES and _AFTER_STRING.match(body, closing + 1) is None:
            yield opening + 1, closing
        opening = find(b'"', closing + 1)


def _text(body: bytes, start: int, end: int) -> str:
    """Decode what stands between two quotes. Raises msgspec.DecodeError."""
    texts = []
    while end - start > SLICE_BYTES:
        cut = _cut(body[start : start + SLICE_BYTES])
        texts.append(_decode_text(b'"%b"' % body[start : start + cut]))
        start += cut
    texts.append(_decode_text(b'"%b"' % body[start:end]))
    return texts[0] if len(texts) == 1 else "".join(texts)


def _cut(piece: bytes) -> int:
    """Return how much of `piece`, which begins with a whole character, ends with a whole character too.

    It divides neither the bytes of a code point, nor an escape, nor the two escapes of one code point.
    """
    cut = len(piece)
    while cut > len(piece) - 4 and piece[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    if piece[cut - 1] >= 0xC0:
        cut -= 1  # the first byte of a code point whose others may follow
    elif cut < len(piece):
        cut = len(piece)  # continuation bytes without a first one: not text, as the decoder will find
    last = piece.rfind(b"\\", max(0, cut - _LONGEST_ESCAPE), cut)
    if last >= 0 and _is_escape(piece, last):
        is_unicode = piece[last + 1 : last + 2] in (b"u", b"")
        if last + (_LONGEST_ESCAPE if is_unicode else 2) > cut or _HIGH_SURROGATE.match(piece, last) is not None:
            cut = last
    before = cut - _LONGEST_ESCAPE
    if before >= 0 and _HIGH_SURROGATE.match(piece, before) is not None and _is_escape(piece, before):
        cut = before
    return cut or len(piece)


def _is_escape(piece: bytes, at: int) -> bool:
    """Return whether the backslash at `at` begins an escape, and is not the second of two."""
    before = piece[:at]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 0


def _exchange(value: Any, mark: str, texts: list[str]) -> None:
    """Put the texts where their names are, in place."""
    waiting: list[Any] = [value]
    while waiting:
        holder = waiting.pop()
        for place, member in _members(holder):
            if isinstance(member, str):
                if member.startswith(mark):
                    _put(holder, place, texts[int(member[len(mark) :])])
            elif isinstance(member, dict | list | msgspec.Struct):
                waiting.append(member)


def _members(holder: Any) -> list[tuple[Any, Any]]:
    if isinstance(holder, dict):
        return list(holder.items())
    if isinstance(holder, list):
        return list(enumerate(holder))
    return [(name, getattr(holder, name)) for name in holder.__struct_fields__]


def _put(holder: Any, place: Any, text: str) -> None:
    if isinstance(holder, dict | list):
        holder[place] = text
    else:
        msgspec.structs.force_setattr(holder, place, text)
