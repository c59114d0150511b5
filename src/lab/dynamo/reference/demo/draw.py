"""`python -m dynamo.reference.demo.draw`: write a picture that the demonstration model knows, as PNG."""

from __future__ import annotations

import argparse
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt

# Simple drawings, for the demonstration model to describe: dots, shapes and digits on a plain ground.
#
# `python -m dynamo.reference.demo.draw` writes one as PNG, and `tools/demo_model` draws what the model is trained on.

Colour = tuple[int, int, int]
Pixels = npt.NDArray[np.uint8]
Distances = npt.NDArray[np.float32]
Point = tuple[float, float]

COLOURS: Final[dict[str, Colour]] = {
    "red": (220, 30, 30),
    "green": (30, 150, 50),
    "blue": (30, 70, 220),
    "yellow": (245, 215, 30),
    "orange": (250, 140, 20),
    "purple": (140, 40, 170),
    "black": (15, 15, 15),
    "white": (252, 252, 252),
}
SHAPES: Final = ("circle", "square", "triangle")

ROUND_POINTS: Final = 14  # of a full circle in a digit


def _arc(x: float, y: float, across: float, down: float, begin: float, end: float) -> list[Point]:
    """Return points of an ellipse, from one angle to another in degrees; 0 is to the right, 90 below."""
    count = max(3, round(abs(end - begin) / 360 * ROUND_POINTS) + 1)
    angles = [math.radians(begin + (end - begin) * n / (count - 1)) for n in range(count)]
    return [(x + across * math.cos(angle), y + down * math.sin(angle)) for angle in angles]


# The strokes of each digit, and other ways to write it; from -1 to 1 downwards, from -0.55 to 0.55 to the right.
DIGITS: Final[tuple[tuple[Sequence[Sequence[Point]], ...], ...]] = (
    ([_arc(0, 0, 0.55, 1, 0, 360)], [_arc(0, 0, 0.45, 1, 0, 360)]),
    ([[(-0.35, -0.6), (0.1, -1), (0.1, 1)], [(-0.35, 1), (0.5, 1)]], [[(-0.3, -0.6), (0.1, -1), (0.1, 1)]], [[(0, -1), (0, 1)]]),
    ([[*_arc(0, -0.5, 0.5, 0.5, 180, 380), (-0.5, 1), (0.55, 1)]], [[*_arc(0, -0.45, 0.5, 0.55, 200, 395), (-0.55, 1), (0.55, 1)]]),
    ([_arc(0, -0.5, 0.48, 0.5, 200, 450), _arc(0, 0.48, 0.55, 0.52, 270, 520)], [[(-0.5, -1), (0.5, -1), (-0.05, -0.2), *_arc(0, 0.4, 0.55, 0.6, 275, 510)]]),
    ([[(0.25, 1), (0.25, -1), (-0.55, 0.4), (0.55, 0.4)]], [[(-0.4, -1), (-0.55, 0.15), (0.55, 0.15)], [(0.35, -0.6), (0.35, 1)]]),
    ([[(0.5, -1), (-0.4, -1), (-0.45, -0.15), *_arc(0, 0.35, 0.55, 0.65, 230, 500)]], [[(0.45, -1), (-0.45, -1), (-0.45, -0.05), *_arc(-0.05, 0.4, 0.55, 0.6, 240, 495)]]),
    ([[(0.4, -0.9), *_arc(0.5, 0.4, 1.05, 1.4, 260, 185)], _arc(0, 0.42, 0.53, 0.58, 0, 360)], [[*_arc(0.05, -0.4, 0.5, 0.6, 320, 180), *_arc(0, 0.4, 0.5, 0.6, 180, -180)]]),
    ([[(-0.55, -1), (0.55, -1), (-0.15, 1)]], [[(-0.55, -1), (0.55, -1), (-0.1, 1)], [(-0.3, 0), (0.4, 0)]], [[(-0.5, -0.7), (-0.5, -1), (0.5, -1), (0, 0), (-0.1, 1)]]),
    ([_arc(0, -0.5, 0.46, 0.5, 0, 360), _arc(0, 0.48, 0.55, 0.52, 0, 360)], [_arc(0, -0.5, 0.5, 0.5, 0, 360), _arc(0, 0.5, 0.5, 0.5, 0, 360)]),
    ([[*_arc(0, -0.42, 0.53, 0.58, 0, 360), *_arc(-0.5, -0.4, 1.05, 1.4, 0, 80)]], [[*_arc(0, -0.4, 0.5, 0.6, 0, 360), *_arc(-0.05, 0.4, 0.5, 0.6, 0, 130)]], [[*_arc(0, -0.42, 0.52, 0.58, 0, 360), (0.5, 1)]]),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing in a drawing."""

    what: str  # a shape or a digit
    colour: Colour
    x: float  # of its middle, in pixels from the left
    y: float  # from the top
    size: float  # from its middle to its edge; of a digit, half its height
    turn: float = 0.0  # degrees
    style: int = 0  # of the ways to write a digit
    stroke: float = 0.3  # width of a digit's lines, as a share of its size
    slant: float = 0.0  # how far the upper edge of a digit leans to the right, as a share of its height


@dataclass(frozen=True, slots=True)
class Drawing:
    """A whole picture. Later marks cover earlier ones."""

    width: int
    height: int
    ground: Colour
    marks: tuple[Mark, ...]
    is_smooth: bool = True  # edges are; else a pixel has one colour or the other


def render(drawing: Drawing) -> Pixels:
    """Return the pixels, (height, width, 3)."""
    canvas = np.empty((drawing.height, drawing.width, 3), np.float32)
    canvas[:] = drawing.ground
    for mark in drawing.marks:
        reach = mark.size * 1.5 + 2
        left, right = max(int(mark.x - reach), 0), min(int(mark.x + reach) + 1, drawing.width)
        top, bottom = max(int(mark.y - reach), 0), min(int(mark.y + reach) + 1, drawing.height)
        if left >= right or top >= bottom:
            continue
        x = (np.arange(left, right, dtype=np.float32) + np.float32(0.5 - mark.x))[None, :]
        y = (np.arange(top, bottom, dtype=np.float32) + np.float32(0.5 - mark.y))[:, None]
        distance = _distance(mark, x, y)
        cover = np.clip(0.5 - distance, 0, 1) if drawing.is_smooth else (distance < 0).astype(np.float32)
        part = canvas[top:bottom, left:right]
        part += cover[:, :, None] * (np.array(mark.colour, np.float32) - part)
    return np.rint(canvas).astype(np.uint8)


def _distance(mark: Mark, x: Distances, y: Distances) -> Distances:
    """Return how far each pixel is from the edge of a mark; below 0 inside."""
    angle = math.radians(mark.turn)
    cos, sin = np.float32(math.cos(angle)), np.float32(math.sin(angle))
    across, down = x * cos + y * sin, y * cos - x * sin
    size = np.float32(mark.size)
    found: Distances
    if mark.what == "circle":
        found = np.sqrt(x * x + y * y) - size
    elif mark.what == "square":
        found = np.maximum(np.abs(across), np.abs(down)) - size * np.float32(0.9)
    elif mark.what == "triangle":  # upright, of equal sides; its middle is that of the box around it
        found = np.maximum(
            down - size * np.float32(0.87), np.abs(across) * np.float32(0.894) - (down + size) * np.float32(0.447)
        )
    else:
        across = across + np.float32(mark.slant) * down
        found = np.full(np.broadcast_shapes(across.shape, down.shape), np.float32(np.inf))
        for line in DIGITS[int(mark.what)][mark.style]:
            for (x1, y1), (x2, y2) in pairwise(line):
                found = np.minimum(found, _to_segment(across / size, down / size, x1, y1, x2 - x1, y2 - y1))
        found = found * size - size * np.float32(mark.stroke / 2)
    return found


def _to_segment(x: npt.NDArray[Any], y: npt.NDArray[Any], x1: float, y1: float, dx: float, dy: float) -> Distances:
    length = dx * dx + dy * dy
    x, y = x - np.float32(x1), y - np.float32(y1)
    along = np.clip((x * np.float32(dx) + y * np.float32(dy)) / np.float32(length or 1), 0, 1)
    found: Distances = np.hypot(x - along * np.float32(dx), y - along * np.float32(dy))
    return found


def encode_png(pixels: Pixels) -> bytes:
    """Return the picture as PNG."""
    height, width = pixels.shape[:2]
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = pixels.reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits each of red, green and blue
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


MAX_DOTS: Final = 9
MAX_SIDE: Final = 4000  # pixels
PLACE_TRIES: Final = 1000


def draw(
    *, dots: int | None = None, shape: str | None = None, digit: int | None = None, colour: str = "red", side: int = 128
) -> Drawing:
    """Return one of: some dots, a shape, a digit. The same drawing at every call."""
    ground = COLOURS["black" if colour == "white" else "white"]
    middle = side / 2
    if dots is None:
        size = 0.3 * side if shape else 0.36 * side
        marks: tuple[Mark, ...] = (Mark(shape or str(digit), COLOURS[colour], middle, middle, size),)
    else:
        marks = _dots(dots, colour, side)
    return Drawing(side, side, ground, marks)


def _dots(count: int, colour: str, side: int) -> tuple[Mark, ...]:
    rng, size = Random(count), 0.07 * side
    marks: list[Mark] = []
    for _ in range(PLACE_TRIES):
        if len(marks) == count:
            break
        x, y = (rng.uniform(1.5 * size, side - 1.5 * size) for _ in range(2))
        if all(math.dist((x, y), (other.x, other.y)) > 2.8 * size for other in marks):
            marks.append(Mark("circle", COLOURS[colour], x, y, size))
    return tuple(marks)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dynamo.reference.demo.draw", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--dots", type=int, choices=range(1, MAX_DOTS + 1), metavar="N", help=f"1 to {MAX_DOTS} dots")
    what.add_argument("--shape", choices=SHAPES, help="one shape")
    what.add_argument("--digit", type=int, choices=range(10), metavar="N", help="a digit, 0 to 9")
    parser.add_argument("--colour", choices=COLOURS, default="red", help="(default: %(default)s)")
    parser.add_argument("--side", type=int, default=128, metavar="PIXELS", help="of the picture (default: %(default)s)")
    parser.add_argument("file", type=Path, help="the PNG to write")
    options = parser.parse_args(argv)
    if not 16 <= options.side <= MAX_SIDE:
        parser.error(f"--side must be in 16..{MAX_SIDE}, got {options.side}")
    drawing = draw(
        dots=options.dots, shape=options.shape, digit=options.digit, colour=options.colour, side=options.side
    )
    try:
        options.file.write_bytes(encode_png(render(drawing)))
    except OSError as error:
        parser.error(f"{options.file} cannot be written: {error.strerror or error}")


if __name__ == "__main__":
    main()
