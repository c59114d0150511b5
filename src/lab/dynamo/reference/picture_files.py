"""The pixels of image files. PNG of eight bits for each channel is read here; Pillow reads the rest where it is installed."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamo.errors import Cancelled, InvalidArgument
from dynamo.settings.extras import install_command

MAX_PIXELS: Final = 16_000_000
MAX_SIDE: Final = 16_384  # pixels: each costs a step of Python, and the sides are scaled by a matrix of this length
_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_BY_PILLOW: Final = ("PNG", "JPEG", "WEBP", "GIF")

Pixels = npt.NDArray[np.uint8]


def read_picture(content: bytes, is_given_up: Callable[[], bool] = lambda: False) -> Pixels:
    """Return the pixels of an image, (height, width, 3), as it is meant to be seen, over white where it is transparent.

    Of a GIF or WebP that moves it is the first picture. Raises InvalidArgument for what is no image, is too large, or
    needs Pillow, which is not there; Cancelled once `is_given_up` returns True.
    """
    return read_png(content, is_given_up) if _is_plain_png(content) else _read_with_pillow(content)


def _is_plain_png(content: bytes) -> bool:
    """Return whether `read_png` can read it, or can name best what is wrong with it."""
    is_png = content.startswith(_SIGNATURE)
    return is_png and (content[12:16] != b"IHDR" or len(content) < 29 or (content[24] == 8 and content[28] == 0))


def _read_with_pillow(content: bytes) -> Pixels:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError  # an extra
    except ImportError:
        raise _needs_pillow() from None
    try:
        with Image.open(io.BytesIO(content), formats=_BY_PILLOW) as image:
            _check_size(*image.size)  # before any pixel is decoded
            upright = ImageOps.exif_transpose(image)
            over = Image.new("RGBA", upright.size, "white")
            over.alpha_composite(upright.convert("RGBA"))
            return np.array(over.convert("RGB"), np.uint8)
    except UnidentifiedImageError:
        raise InvalidArgument("the image cannot be read: it is none of PNG, JPEG, WebP and GIF, or broken") from None
    # What Pillow raises for broken files is one of these, by format and place.
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise InvalidArgument(f"the image cannot be read: {error}") from error


def _check_size(width: int, height: int) -> None:
    if not 0 < width * height <= MAX_PIXELS:
        raise InvalidArgument(
            f"the image has {width} x {height} pixels; the reference engine sees at most {MAX_PIXELS}"
        )
    if max(width, height) > MAX_SIDE:
        raise InvalidArgument(f"the image has {width} x {height} pixels; a side has at most {MAX_SIDE} for this engine")


def read_png(content: bytes, is_given_up: Callable[[], bool] = lambda: False) -> Pixels:
    """Return the pixels of a PNG of eight bits for each channel, (height, width, 3), over white where it is transparent.

    Raises InvalidArgument for any other image, and Cancelled once `is_given_up` returns True.
    """
    if not content.startswith(_SIGNATURE):
        raise _needs_pillow()
    header, palette, packed = b"", b"", bytearray()
    at = len(_SIGNATURE)
    while at + 12 <= len(content):
        length, kind = int.from_bytes(content[at : at + 4], "big"), content[at + 4 : at + 8]
        data = content[at + 8 : at + 8 + length]
        if len(data) < length:
            break
        if kind == b"IHDR":
            header = data
        elif kind == b"PLTE":
            palette = data
        elif kind == b"IDAT":
            packed += data
        elif kind == b"IEND":
            break
        at += 12 + length
    if len(header) != 13:
        raise InvalidArgument("the image has no header")
    width, height = int.from_bytes(header[:4], "big"), int.from_bytes(header[4:8], "big")
    depth, colour_type, interlaced = header[8], header[9], header[12]
    if depth != 8 or colour_type not in _CHANNELS or interlaced:
        raise _needs_pillow()
    _check_size(width, height)
    return _rgb(_rows(bytes(packed), width, height, _CHANNELS[colour_type], is_given_up), colour_type, palette)


def _rows(packed: bytes, width: int, height: int, step: int, is_given_up: Callable[[], bool]) -> Pixels:
    """Unpack the lines and undo their filters; (height, width, step)."""
    size = (width * step + 1) * height
    try:
        raw = zlib.decompressobj().decompress(packed, size)
    except zlib.error as error:
        raise InvalidArgument(f"the pixels of the image cannot be unpacked: {error}") from error
    if len(raw) < size:
        raise InvalidArgument("the image ends before its last line")
    lines = np.frombuffer(raw, np.uint8).reshape(height, width * step + 1)
    kinds, given = lines[:, 0], lines[:, 1:].reshape(height, width, step)
    if (highest := int(kinds.max())) > 4:
        raise InvalidArgument(f"the image has a line with the filter {highest}, which there is not")
    if highest > 2:
        return _by_diagonals(kinds, given, is_given_up)
    found = np.empty((height, width, step), np.uint8)
    above = np.zeros((width, step), np.uint8)
    for number, kind in enumerate(kinds.tolist()):
        _go_on(number, is_given_up)
        line = given[number]
        if kind == 1:  # each byte on top of the pixel before it
            line = np.cumsum(line, axis=0, dtype=np.uint8)
        above = found[number] = line + above if kind == 2 else line
    return found


def _by_diagonals(kinds: Pixels, given: Pixels, is_given_up: Callable[[], bool]) -> Pixels:
    """Undo any filters. A pixel needs those left of it, above, and left of that one: all of a diagonal are done at once."""
    height, width, step = given.shape
    framed = np.zeros((height + 1, width + 1, step), np.uint8)  # beyond the edges is nothing
    framed[1:, 1:] = given
    flat, across = framed.reshape(-1, step), width + 1
    lefts, overs, means, nearest = (kinds.reshape(-1, 1) == kind for kind in (1, 2, 3, 4))
    for diagonal in range(height + width - 1):
        _go_on(diagonal, is_given_up)
        top, bottom = max(0, diagonal - width + 1), min(height, diagonal + 1)
        first = (top + 1) * across + diagonal - top + 1
        places = slice(first, first + (bottom - top - 1) * width + 1, width)  # a line on, and a pixel back
        before, over, corner = (
            flat[places.start - back : places.stop - back : width].astype(np.int16) for back in (1, across, across + 1)
        )
        to_before, to_over = np.abs(over - corner), np.abs(before - corner)
        to_corner = np.abs(before + over - 2 * corner)
        guess = np.where(to_over <= to_corner, over, corner)
        guess = np.where((to_before <= to_over) & (to_before <= to_corner), before, guess) * nearest[top:bottom]
        guess += ((before + over) >> 1) * means[top:bottom] + before * lefts[top:bottom] + over * overs[top:bottom]
        flat[places] += guess.astype(np.uint8)
    return framed[1:, 1:]


def _go_on(number: int, is_given_up: Callable[[], bool]) -> None:
    """Raise Cancelled where the picture is not wanted any more; it is found out at every 64th line."""
    if number % 64 == 0 and is_given_up():
        raise Cancelled("the request ended while its image was decoded")


def _rgb(pixels: Pixels, colour_type: int, palette: bytes) -> Pixels:
    if colour_type == 3:
        colours = np.frombuffer(palette[: len(palette) // 3 * 3], np.uint8).reshape(-1, 3)
        if not len(colours) or int(pixels.max()) >= len(colours):
            raise InvalidArgument("the image names a colour that its palette does not have")
        return colours[pixels[:, :, 0]]
    if colour_type in (4, 6):
        alpha = pixels[:, :, -1:].astype(np.uint16)
        pixels = ((pixels[:, :, :-1] * alpha + 255 * (255 - alpha)) // 255).astype(np.uint8)
    return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels


def _needs_pillow() -> InvalidArgument:
    return InvalidArgument(
        "without Pillow the reference engine sees PNG images of 8 bits for each channel, not interlaced; "
        f"for JPEG, WebP, GIF and other PNG on its machine: {install_command('pictures')}"
    )
