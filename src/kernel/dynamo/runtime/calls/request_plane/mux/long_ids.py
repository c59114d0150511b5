"""Request bodies with a long list of token ids, encoded and decoded a slice at a time.

The encoder and decoder of msgpack hold the interpreter for as long as a message takes: 40 ms for a million ids. Here each
slice of ids is written with one width, so that a reader can cut it into columns of bytes without reading each id. The
result is plain msgpack: every reader takes it, and one that knows the layout takes it in slices.

    map of n members | n - 1 members | "token_ids" | array 32, count | slices of SLICE_IDS ids, the last one shorter

Both functions are generators that give way after each slice and return their result.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Generator
from typing import Any, Final, TypeGuard, TypeVar

import msgspec

from dynamo.runtime.calls.request_plane.expansion import exceeds_when_decoded
from dynamo.runtime.calls.request_plane.mux.frames import decode_body, pack

T = TypeVar("T")
InSlices = Generator[None, None, T]

SLICE_IDS: Final = 65_536  # 1 to 2 ms, either way
LONG_IDS: Final = 2 * SLICE_IDS  # fewer are encoded in 2 ms as a whole
LONG_BODY_BYTES: Final = LONG_IDS  # of a body with so many ids, at the least

BYTES_PER_ID: Final = 40  # in memory: a reference and an int
BYTES_PER_SMALL_ID: Final = 8  # below 256 a reference: the interpreter has one int for all of a value

_KEY: Final = "token_ids"
_MARK: Final = pack(_KEY) + b"\xdd"  # the key, and the tag of an array with a count of four bytes
_WIDTHS: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4}  # unsigned integers by their tag; without one it is one byte below 128
_TYPES: Final = {1: "B", 2: "H", 4: "I"}


class DecodedTooLarge(Exception):
    """A body that would take more memory than one request may."""


def has_long_ids(body: object) -> TypeGuard[dict[str, Any]]:
    """Return whether encoding a body in one piece would take long."""
    if not isinstance(body, dict):
        return False
    ids = body.get(_KEY)
    return isinstance(ids, list) and len(ids) >= LONG_IDS


def encode_long(body: dict[str, Any]) -> InSlices[bytes]:
    """Encode a body that `has_long_ids`. Raises what msgpack's encoder raises."""
    ids = body[_KEY]
    rest = {key: value for key, value in body.items() if key != _KEY}
    parts = [pack({**rest, _KEY: []})[:-1], b"\xdd", len(ids).to_bytes(4, "big")]
    for start in range(0, len(ids), SLICE_IDS):
        try:
            parts.append(_encode_slice(ids[start : start + SLICE_IDS]))
        except (TypeError, ValueError, OverflowError):  # an id that is negative, wider than 32 bits or no integer
            return pack(body)
        yield
    return b"".join(parts)


def decode_long(message: bytes, limit: int) -> InSlices[Any]:
    """Decode a body. Raises DecodedTooLarge where that takes more than `limit` bytes of memory, and what msgpack's decoder
    raises. One that was not written by `encode_long` is decoded in one piece.
    """
    at = message.find(_MARK) if len(message) >= LONG_BODY_BYTES else -1
    start = at + len(_MARK) + 4
    if at >= 0 and start <= len(message):
        count = int.from_bytes(message[start - 4 : start], "big")
        body = _without_ids(message[: start - 5], limit)
        if body is not None:
            ids: list[int] = []
            taken = 0
            while len(ids) < count:
                size = min(SLICE_IDS, count - len(ids))
                width = _width_at(message, start)
                taken += size * (BYTES_PER_ID if width > 1 else BYTES_PER_SMALL_ID)
                if taken > limit:
                    raise DecodedTooLarge
                end = start + size * (width + 1)
                part = _decode_slice(message[start:end], size, width)
                if part is None:
                    break
                ids += part
                start = end
                yield
            if len(ids) == count and start == len(message):
                return {**body, _KEY: ids}
    if exceeds_when_decoded(message, limit):
        raise DecodedTooLarge
    return decode_body(message)


def _without_ids(head: bytes, limit: int) -> dict[str, Any] | None:
    """Decode what stands before the ids; None where that is no map that ends with them, but text that resembles it."""
    whole = head + b"\x90"  # no ids
    if exceeds_when_decoded(whole, limit):
        return None
    try:
        body = decode_body(whole)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) and body.get(_KEY) == [] else None


def _encode_slice(ids: list[int]) -> bytes:
    """Write each id with the width of the largest."""
    largest = max(ids)
    if largest < 0x80:
        return bytes(ids)
    width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
    column = array(_TYPES[width], ids)
    if sys.byteorder == "little":
        column.byteswap()
    raw = column.tobytes()
    out = bytearray(len(ids) * (width + 1))
    out[0 :: width + 1] = _tag(width) * len(ids)
    for place in range(width):
        out[1 + place :: width + 1] = raw[place::width]
    return bytes(out)


def _width_at(message: bytes, at: int) -> int:
    """Return the width of the number that begins there, without its tag; 0 where it is its own tag, or no such number."""
    return _WIDTHS.get(message[at], 0) if at < len(message) else 0


def _decode_slice(part: bytes, count: int, width: int) -> list[int] | None:
    """Read `count` numbers of one width; None where they are not that."""
    if len(part) != count * (width + 1):
        return None
    if width == 0:
        return list(part) if part.isascii() else None
    if part[0 :: width + 1] != _tag(width) * count:
        return None
    raw = bytearray(count * width)
    for place in range(width):
        raw[place::width] = part[1 + place :: width + 1]
    column = array(_TYPES[width], bytes(raw))
    if sys.byteorder == "little":
        column.byteswap()
    return column.tolist()


def _tag(width: int) -> bytes:
    return bytes([0xCB + width.bit_length()])  # 0xcc, 0xcd, 0xce for 1, 2 and 4
