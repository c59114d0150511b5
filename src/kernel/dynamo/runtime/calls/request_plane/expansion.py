"""How much memory a message takes once it is decoded, counted before it is decoded.

A msgpack array of empty arrays has one byte for each of them and takes 64 in memory: 32 MiB on the wire are 2 GiB. The count
is an upper bound, made by counting bytes; only a message that may exceed the limit is examined more closely.
"""

from __future__ import annotations

import re
from typing import Final

MAP_BYTES: Final = 240  # of a small dict with its table; an empty one takes less
LIST_BYTES: Final = 72  # of an empty list and the reference to it
OTHER_BYTES: Final = 20  # for each byte on the wire: a string of two characters has 3 there and takes 59
WORST_BYTES: Final = MAP_BYTES  # for one byte on the wire

MAPS: Final = bytes([*range(0x80, 0x90), 0xDE, 0xDF])
LISTS: Final = bytes([*range(0x90, 0xA0), 0xDC, 0xDD])

MAX_BLOBS: Final = 4096  # in one message; what follows them is judged by its bytes
WINDOW_BYTES: Final = 1024 * 1024
TEXT_BYTES: Final = 4  # for each byte of a long text: one character outside the basic plane widens all others
_SMALL: Final = re.compile(  # values whose first byte gives their length
    b"(?:[\x00-\xa0\xc0-\xc3\xe0-\xff]++|[\xcd\xd1\xdc\xde]..|"
    + b"|".join(b"%b.{%d}" % (re.escape(bytes([0xA0 + n])), n) for n in range(1, 32))
    + b"|[\xcc\xd0].|[\xca\xce\xd2\xdd\xdf].{4}|[\xcb\xcf\xd3].{8}"
    + b"|\xd4.{2}|\xd5.{3}|\xd6.{5}|\xd7.{9}|\xd8.{17})*+",  # possessive: nothing is kept to go back to
    re.DOTALL,
)
_LENGTH_BYTES: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4}
_TEXTS: Final = (0xD9, 0xDA, 0xDB)


def exceeds_when_decoded(message: bytes, limit: int, codec: str = "msgpack") -> bool:
    """Return whether a message may take more than `limit` bytes of memory once decoded. Never raises: invalid data
    is left to the decoder.
    """
    if len(message) * WORST_BYTES <= limit:
        return False
    if codec != "msgpack":
        return _json_bytes(message) > limit
    if _by_bytes(message) <= limit:
        return False
    return _with_blobs_apart(message, limit) > limit


def _by_bytes(part: bytes) -> int:
    """Judge each byte as if it began a value: what lies inside numbers and texts is counted, too."""
    maps = len(part) - len(part.translate(None, MAPS))
    lists = len(part) - len(part.translate(None, LISTS))
    return maps * MAP_BYTES + lists * LIST_BYTES + (len(part) - maps - lists) * OTHER_BYTES


def _with_blobs_apart(message: bytes, limit: int) -> int:
    """Count long texts and binaries by their length, and only the rest byte by byte. Stops once over the limit."""
    at, total, blobs, size = 0, 0, 0, len(message)
    while at < size and total <= limit:
        match = _SMALL.match(message, at, min(at + WINDOW_BYTES, size))
        end = at if match is None else match.end()
        if end > at:
            total += _by_bytes(message[at:end])
            at = end
            continue
        width = _LENGTH_BYTES.get(message[at])
        blobs += 1
        if width is None or blobs > MAX_BLOBS:  # a value that the window or the message cut, or too many pieces
            window = min(at + WINDOW_BYTES, size) if width is None else size
            total += _by_bytes(message[at:window])
            at = window
            continue
        length = int.from_bytes(message[at + 1 : at + 1 + width], "big")
        total += length * (TEXT_BYTES if message[at] in _TEXTS else 1) + OTHER_BYTES
        at += 1 + width + length
    return total


def _json_bytes(message: bytes) -> int:
    values = message.count(b",") + 1
    return (
        message.count(b"{") * MAP_BYTES + message.count(b"[") * LIST_BYTES + values * 3 * OTHER_BYTES + len(message) * 2
    )
