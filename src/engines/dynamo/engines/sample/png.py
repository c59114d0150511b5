"""PNG without a library: enough to write pictures and short animations, and to read what common programs write."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Final

from dynamo.errors import Cancelled

SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type


class Pixels:
    """An image as four bytes for each pixel: red, green, blue, and how opaque it is."""

    __slots__ = ("height", "pixels", "width")

    def __init__(self, width: int, height: int, pixels: bytes) -> None:
        self.width, self.height, self.pixels = width, height, pixels


def encode_png(width: int, height: int, rgb_rows: Sequence[bytes]) -> bytes:
    """Return a PNG of rows with three bytes for each pixel."""
    return SIGNATURE + _header(width, height) + _chunk(b"IDAT", _packed(rgb_rows)) + _chunk(b"IEND", b"")


def animated_png(width: int, height: int, frames: Sequence[Sequence[bytes]], frames_per_second: int) -> bytes:
    """Return a PNG that shows `frames` in turn, for ever. Viewers that know no animations show the first one."""
    written = [SIGNATURE, _header(width, height), _chunk(b"acTL", struct.pack(">II", len(frames), 0))]
    sequence = 0
    for number, rows in enumerate(frames):
        control = struct.pack(">IIIIIHHBB", sequence, width, height, 0, 0, 1, frames_per_second, 0, 0)
        written.append(_chunk(b"fcTL", control))
        sequence += 1
        if number == 0:
            written.append(_chunk(b"IDAT", _packed(rows)))
        else:
            written.append(_chunk(b"fdAT", struct.pack(">I", sequence) + _packed(rows)))
            sequence += 1
    return b"".join([*written, _chunk(b"IEND", b"")])


def read_png(data: bytes, max_pixels: int, is_given_up: Callable[[], bool] = lambda: False) -> Pixels:
    """Return the pixels of a PNG with 8 bits for each channel, not interlaced.

    Raises ValueError for any other file, and Cancelled once `is_given_up` returns True.
    """
    if not data.startswith(SIGNATURE):
        raise ValueError("it is not a PNG")
    chunks = _chunks(data)
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[b"IHDR"][:13])
    if depth != 8 or colour not in _CHANNELS or interlaced:
        raise ValueError("only PNGs with 8 bits for each channel, not interlaced, are read")
    if not 0 < width * height <= max_pixels:
        raise ValueError(f"it has {width} x {height} pixels, at most {max_pixels} in all are read")
    channels = _CHANNELS[colour]
    size = height * (1 + width * channels)
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(chunks.get(b"IDAT", b""), size)
    except zlib.error as error:
        raise ValueError(f"its pixels cannot be unpacked: {error}") from error
    if len(raw) != size:
        raise ValueError("it has too few pixels")
    rows = _unfiltered(raw, width * channels, channels, is_given_up)
    return Pixels(width, height, _as_rgba(rows, colour, chunks))


def _header(width: int, height: int) -> bytes:
    return _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))  # 8 bits each of red, green and blue


def _packed(rows: Sequence[bytes]) -> bytes:
    return zlib.compress(b"".join([b"\0" + row for row in rows]))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _chunks(data: bytes) -> dict[bytes, bytes]:
    """Return the chunks by kind, those of pixels joined. Raises ValueError for a file that is cut off."""
    found: dict[bytes, bytes] = {}
    at = len(SIGNATURE)
    while at + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        if len(body) < length:
            break
        found[kind] = found.get(kind, b"") + body if kind == b"IDAT" else body
        at += 12 + length
        if kind == b"IEND":
            break
    if len(found.get(b"IHDR", b"")) < 13:
        raise ValueError("it has no header")
    return found


def _unfiltered(raw: bytes, stride: int, channels: int, is_given_up: Callable[[], bool]) -> bytes:
    """Undo the filter that each row names: what was subtracted from its bytes."""
    rows = bytearray()
    before = bytes(stride)
    for start in range(0, len(raw), stride + 1):
        if is_given_up():
            raise Cancelled("the request ended while its image was decoded")
        row = bytearray(raw[start + 1 : start + 1 + stride])
        match raw[start]:
            case 0:
                pass
            case 1:
                for at in range(channels, stride):
                    row[at] = (row[at] + row[at - channels]) & 255
            case 2:
                row = bytearray([(value + above) & 255 for value, above in zip(row, before, strict=True)])
            case 3:
                for at in range(stride):
                    left = row[at - channels] if at >= channels else 0
                    row[at] = (row[at] + (left + before[at]) // 2) & 255
            case 4:
                for at in range(stride):
                    left, corner = (row[at - channels], before[at - channels]) if at >= channels else (0, 0)
                    row[at] = (row[at] + _paeth(left, before[at], corner)) & 255
            case other:
                raise ValueError(f"a row has the unknown filter {other}")
        rows += row
        before = bytes(row)
    return bytes(rows)


def _paeth(left: int, above: int, corner: int) -> int:
    near = left + above - corner
    to_left, to_above, to_corner = abs(near - left), abs(near - above), abs(near - corner)
    if to_left <= to_above and to_left <= to_corner:
        return left
    return above if to_above <= to_corner else corner


def _as_rgba(rows: bytes, colour: int, chunks: dict[bytes, bytes]) -> bytes:
    count = len(rows) // _CHANNELS[colour]
    if colour == 6:
        return rows
    found = bytearray(b"\xff" * (4 * count))
    if colour == 3:
        palette, alpha = chunks.get(b"PLTE", b""), chunks.get(b"tRNS", b"")
        if 3 * (max(rows) + 1) > len(palette):
            raise ValueError("it has a pixel whose colour is not in its palette")
        for channel in range(3):
            found[channel::4] = rows.translate((palette[channel::3] + bytes(256))[:256])
        found[3::4] = rows.translate((alpha + b"\xff" * 256)[:256])
        return bytes(found)
    step = _CHANNELS[colour]
    for channel in range(3):
        found[channel::4] = rows[(channel if colour == 2 else 0) :: step]
    if colour == 4:
        found[3::4] = rows[1::2]
    return bytes(found)
