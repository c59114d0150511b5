"""Small pictures and sounds, made here byte by byte."""

from __future__ import annotations

import base64
import struct
import zlib

Colour = tuple[int, int, int]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(rows: list[list[Colour]]) -> bytes:
    """A PNG of these pixels."""
    raw = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in rows)
    return png_of(len(rows[0]), len(rows), zlib.compress(raw))


def png_of(width: int, height: int, packed: bytes) -> bytes:
    """A PNG whose header says this size, whatever the packed pixels are."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def quarters_png(colours: list[Colour], size: int = 40) -> bytes:
    """A PNG of four squares: top left, top right, bottom left, bottom right."""
    half = [[left] * (size // 2) + [right] * (size // 2) for left, right in (colours[:2], colours[2:])]
    return png([half[0]] * (size // 2) + [half[1]] * (size // 2))


def plain_png(colour: Colour, width: int = 8, height: int = 8) -> bytes:
    """A PNG of one colour."""
    return png([[colour] * width for _ in range(height)])


RED = plain_png((255, 0, 0))
BLUE = plain_png((0, 0, 255))
GIF = b"GIF89a" + struct.pack("<HH", 3, 2) + b"\0" * 8
JPEG = b"\xff\xd8\xff\xe0\0\x10JFIF" + b"\0" * 10 + b"\xff\xc0\0\x11\x08" + struct.pack(">HH", 5, 7) + b"\0" * 12
WEBP = b"RIFF\0\0\0\0WEBPVP8X\0\0\0\0\0\0\0\0" + b"\x08\0\0" + b"\x03\0\0"
WAV = b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 28
MP4 = b"\0\0\0\x18ftypmp42" + b"\0" * 16


def data_url(content: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


def image_part(url: str, **more: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}, **more}
