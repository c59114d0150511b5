"""The pixels of image files. PNG of eight bits for each channel is read here; Pillow reads the rest where it is installed."""

from __future__ import annotations

import io
import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamo.errors import InvalidArgument
from dynamo.settings.extras import install_command

MAX_PIXELS: Final = 16_000_000
_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_BY_PILLOW: Final = ("PNG", "JPEG", "WEBP", "GIF")

Pixels = npt.NDArray[np.uint8]


def read_picture(content: bytes) -> Pixels:
    """Return the pixels of an image, (height, width, 3), as it is meant to be seen, over white where it is transparent.

    Of a GIF or WebP that moves it is the first picture. Raises InvalidArgument for what is no image, is too large, or
    needs Pillow, which is not there.
    """
    return read_png(content) if _is_plain_png(content) else _read_with_pillow(content)


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


def read_png(content: bytes) -> Pixels:
    """Return the pixels of a PNG of eight bits for each channel, (height, width, 3), over white where it is transparent.

    Raises InvalidArgument for any other image.
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
    rows = _rows(bytes(packed), width * _CHANNELS[colour_type], height, _CHANNELS[colour_type])
    return _rgb(rows.reshape(height, width, _CHANNELS[colour_type]), colour_type, palette)


def _rows(packed: bytes, stride: int, height: int, step: int) -> Pixels:
    """Unpack the lines and undo their filters."""
    try:
        raw = zlib.decompressobj().decompress(packed, (stride + 1) * height)
    except zlib.error as error:
        raise InvalidArgument(f"the pixels of the image cannot be unpacked: {error}") from error
    if len(raw) < (stride + 1) * height:
        raise InvalidArgument("the image ends before its last line")
    lines = np.frombuffer(raw, np.uint8).reshape(height, stride + 1)
    found = np.zeros((height, stride), np.uint8)
    above = np.zeros(stride, np.uint8)
    for number in range(height):
        above = found[number] = _unfiltered(int(lines[number, 0]), lines[number, 1:], above, step)
    return found


def _unfiltered(kind: int, line: Pixels, above: Pixels, step: int) -> Pixels:
    if kind == 0:
        return line
    if kind == 1:  # each byte on top of the pixel before it
        return np.cumsum(line.reshape(-1, step), axis=0, dtype=np.uint8).reshape(-1)
    if kind == 2:
        return line + above
    if kind not in (3, 4):
        raise InvalidArgument(f"the image has a line with the filter {kind}, which there is not")
    upper = [0] * step + above.tolist()
    found = [0] * step
    for place, value in enumerate(line.tolist()):
        before, over, corner = found[place], upper[place + step], upper[place]
        if kind == 3:
            guess = (before + over) // 2
        else:
            near = [abs(over - corner), abs(before - corner), abs(before + over - 2 * corner)]
            guess = (before, over, corner)[near.index(min(near))]
        found.append((value + guess) & 255)
    return np.array(found[step:], np.uint8)


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
