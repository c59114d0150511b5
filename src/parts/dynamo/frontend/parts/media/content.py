"""What the bytes of a part are: their format by their first bytes, the size of an image by its header, and data URLs.

Nothing is decoded here. What a header does not state plainly is refused.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Final

import xxhash
from blake3 import blake3
from msgspec import Struct

from dynamo.frontend.parts.media.addresses import MediaRefused

MAX_JPEG_SEGMENTS: Final = 4096  # before the size; each costs a step of Python

# Format -> the kinds of media it may be.
_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "image/png": ("image",),
    "image/jpeg": ("image",),
    "image/gif": ("image",),
    "image/webp": ("image",),
    "audio/wav": ("audio",),
    "audio/mpeg": ("audio",),
    "audio/flac": ("audio",),
    "audio/ogg": ("audio", "video"),
    "audio/mp4": ("audio",),
    "video/mp4": ("video", "audio"),
    "video/webm": ("video", "audio"),
}
_ALLOWED: Final = {
    "image": "PNG, JPEG, WebP and GIF",
    "audio": "WAV, MP3, FLAC, OGG, MP4 and WebM",
    "video": "MP4, WebM and OGG",
}


class Media(Struct, frozen=True):
    """One part whose content is here."""

    url: str  # a data URL with the format that the bytes have
    content_hash: int  # XXH3-64 of the bytes: routers and engines name the content by it
    digest: bytes  # BLAKE3 of the bytes: what the cache names it by, as two contents never have the same one
    size: int  # of the bytes
    width: int = 0  # of an image
    height: int = 0


def read_media(data: bytes, kind: str, *, max_pixels: int, given_url: str | None = None) -> Media:
    """Check the bytes of a part of this kind (`image`, `audio`, `video`) and return them as a data URL.

    `given_url`: the data URL they came from, which is kept where it names the right format. Raises MediaRefused.
    """
    if not data:
        raise MediaRefused("it is empty")
    mime = media_type(data)
    if mime is None or kind not in _KINDS[mime]:
        raise MediaRefused(f"its content is not {_a(kind)} in a format that is taken ({_ALLOWED[kind]})")
    width = height = 0
    if kind == "image":
        width, height = _SIZES[mime](data)
        if width < 1 or height < 1:
            raise MediaRefused("its header gives an image without a size")
        if width * height > max_pixels:
            raise MediaRefused(
                f"the image has {width} x {height} pixels, at most {max_pixels} in all are taken (DYN_MM_MAX_IMAGE_MPIXELS)"
            )
    head = f"data:{mime};base64,"
    url = given_url if given_url is not None and given_url.startswith(head) else head + base64.b64encode(data).decode()
    return Media(url, xxhash.xxh3_64_intdigest(data), blake3(data).digest(), len(data), width, height)


def read_data_url(url: str, max_bytes: int) -> bytes:
    """Return the content of a data URL. Raises MediaRefused."""
    if len(url) > max_bytes:
        raise MediaRefused(
            f"URL is {len(url)} bytes, exceeds the {max_bytes}-byte limit. To raise the limit, set DYN_MM_MAX_DATA_URL_MB"
        )
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaRefused("a data URL must be in base64 (data:<media type>;base64,<content>)")
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except (binascii.Error, ValueError):
        raise MediaRefused("the data URL is not valid base64") from None


def _a(kind: str) -> str:
    return {"image": "an image", "audio": "audio", "video": "video"}[kind]


def media_type(data: bytes) -> str | None:
    """Return the format by the first 16 bytes; None: no known one. Names and headers are the sender's word only."""
    head = data[:16]
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if head.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if head.startswith(b"RIFF") and len(head) >= 12:
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(head[8:12])
    if head.startswith(b"ID3") or (len(head) > 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2):
        return "audio/mpeg"
    if head.startswith(b"fLaC"):
        return "audio/flac"
    if head.startswith(b"OggS"):
        return "audio/ogg"
    if head[4:8] == b"ftyp":
        return "audio/mp4" if head[8:12] in (b"M4A ", b"M4B ") else "video/mp4"
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "video/webm"
    return None


def _big(data: bytes, at: int, width: int) -> int:
    return int.from_bytes(_cut(data, at, width), "big")


def _little(data: bytes, at: int, width: int) -> int:
    return int.from_bytes(_cut(data, at, width), "little")


def _cut(data: bytes, at: int, width: int) -> bytes:
    found = data[at : at + width]
    if len(found) < width:
        raise MediaRefused("the header of the image is cut off")
    return found


def _png_size(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise MediaRefused("the header of the image cannot be read")
    return _big(data, 16, 4), _big(data, 20, 4)


def _gif_size(data: bytes) -> tuple[int, int]:
    return _little(data, 6, 2), _little(data, 8, 2)


def _jpeg_size(data: bytes) -> tuple[int, int]:
    at = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if _cut(data, at, 1) != b"\xff":
            break
        marker = _big(data, at + 1, 1)
        if marker == 0xFF:  # a byte of filling
            at += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # these have no length
            at += 2
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return _big(data, at + 7, 2), _big(data, at + 5, 2)
        if marker in (0xD9, 0xDA):  # the end, or pixels, before any size
            break
        length = _big(data, at + 2, 2)
        if length < 2:
            break
        at += 2 + length
    raise MediaRefused("the header of the image cannot be read")


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + _little(data, 24, 3), 1 + _little(data, 27, 3)
    if kind == b"VP8L" and _cut(data, 20, 1) == b"\x2f":
        bits = _little(data, 21, 4)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and _cut(data, 23, 3) == b"\x9d\x01\x2a":
        return _little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF
    raise MediaRefused("the header of the image cannot be read")


_SIZES: Final = {"image/png": _png_size, "image/jpeg": _jpeg_size, "image/gif": _gif_size, "image/webp": _webp_size}
