"""The wire of protocol buffers, as far as the picker reads and writes it: a dozen small messages, so no compiler and no library.

A message is read as its fields by number, each with all its values: bytes, or an integer. Unknown fields are kept and cost nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5
_MAX_VARINT_BITS: Final = 70

Fields = Mapping[int, list["int | bytes"]]


class MalformedMessage(ValueError):
    """What a peer sent is not a message."""


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift >= _MAX_VARINT_BITS:
            raise MalformedMessage(f"a number is cut off at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def read(data: bytes) -> Fields:
    """Return the fields of a message. Raises MalformedMessage."""
    found: dict[int, list[int | bytes]] = {}
    at, end = 0, len(data)
    while at < end:
        tag = data[at]  # nearly every number here has one byte
        at += 1
        if tag >= 0x80:
            tag, at = _read_varint(data, at - 1)
        number, kind = tag >> 3, tag & 7
        value: int | bytes
        if kind == _VARINT:
            value, at = _read_varint(data, at)
        else:
            if kind == _BYTES:
                if at < end and (size := data[at]) < 0x80:
                    at += 1
                elif at + 1 < end and data[at + 1] < 0x80:  # up to 16 KiB
                    size, at = size & 0x7F | data[at + 1] << 7, at + 2
                else:
                    size, at = _read_varint(data, at)
            elif kind in (_FIXED64, _FIXED32):
                size = 8 if kind == _FIXED64 else 4
            else:
                raise MalformedMessage(f"field {number} has the unknown wire type {kind}")
            if at + size > end:
                raise MalformedMessage(f"field {number} is cut off")
            value = data[at : at + size]
            at += size
        if number in found:
            found[number].append(value)
        else:
            found[number] = [value]
    return found


def last_bytes(fields: Fields, number: int) -> bytes | None:
    """Return the last value of a field of bytes, text or a message; None: it is absent. Raises MalformedMessage."""
    values = fields.get(number)
    if not values:
        return None
    value = values[-1]
    if not isinstance(value, bytes):
        raise MalformedMessage(f"field {number} is a number, not bytes")
    return value


def every_bytes(fields: Fields, number: int) -> list[bytes]:
    """Return all values of a repeated field. Raises MalformedMessage."""
    values = [value for value in fields.get(number, ()) if isinstance(value, bytes)]
    if len(values) != len(fields.get(number, ())):
        raise MalformedMessage(f"field {number} is a number, not bytes")
    return values


def last_number(fields: Fields, number: int) -> int:
    """Return the last value of a field of numbers; 0: it is absent. Raises MalformedMessage."""
    values = fields.get(number)
    if not values:
        return 0
    value = values[-1]
    if not isinstance(value, int):
        raise MalformedMessage(f"field {number} is bytes, not a number")
    return value


_SHORT: Final = [bytes((value,)) for value in range(0x80)]


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _SHORT[value]
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def of_bytes(number: int, value: bytes) -> bytes:
    """Write a field of bytes, text or a message, also an empty one."""
    if number < 16 and len(value) < 0x80:
        return _SHORT[number << 3 | _BYTES] + _SHORT[len(value)] + value
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def of_number(number: int, value: int) -> bytes:
    """Write a field of numbers, enumerations or booleans."""
    return _varint(number << 3 | _VARINT) + _varint(value)


# -- google.protobuf.Struct: fields = 1 {key = 1, value = 2}; a Value: number = 2, text = 3, boolean = 4, struct = 5, list = 6 --


def read_struct(data: bytes) -> dict[str, object]:
    """Return a Struct as a dict. Raises MalformedMessage."""
    found: dict[str, object] = {}
    for entry in every_bytes(read(data), 1):
        fields = read(entry)
        found[text_of(last_bytes(fields, 1) or b"")] = _read_value(last_bytes(fields, 2) or b"")
    return found


def _read_value(data: bytes) -> object:
    fields = read(data)
    if (text := last_bytes(fields, 3)) is not None:
        return text_of(text)
    if (inner := last_bytes(fields, 5)) is not None:
        return read_struct(inner)
    if (items := last_bytes(fields, 6)) is not None:
        return [_read_value(item) for item in every_bytes(read(items), 1)]
    if (number := last_bytes(fields, 2)) is not None:
        if len(number) != 8:
            raise MalformedMessage("a number of a Struct does not have 8 bytes")
        found: float = struct.unpack("<d", number)[0]
        return found
    return bool(last_number(fields, 4)) if 4 in fields else None


def struct_of(members: Iterable[tuple[str, bytes]]) -> bytes:
    """Write a Struct of written values."""
    return b"".join(of_bytes(1, of_bytes(1, name.encode()) + of_bytes(2, value)) for name, value in members)


def text_value(text: str) -> bytes:
    """Write a Value that is a text."""
    return of_bytes(3, text.encode())


def struct_value(struct_: bytes) -> bytes:
    """Write a Value that is a Struct."""
    return of_bytes(5, struct_)


def text_of(data: bytes) -> str:
    """Return a text. Raises MalformedMessage where it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise MalformedMessage(f"a text is not UTF-8: {error}") from error
