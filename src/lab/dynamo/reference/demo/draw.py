"""`python -m dynamo.reference.demo.draw`: write a picture that the demonstration model knows, as PNG."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from random import Random
from typing import Final

from dynamo.reference.demo.drawing import COLOURS, SHAPES, Drawing, Mark, encode_png, render

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
