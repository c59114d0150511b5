"""How the reference engine sees: an image is averaged to 4 x 4 squares, and each square is one of 64 colours, a token each.

That is all a vision encoder of this size needs: what it answers depends on what is in the picture and where, two pictures of
the same colours are the same to it, and another order of images is another prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dynamo.reference.picture_files import Pixels, read_picture

GRID: Final = 4
COLOURS: Final = 64  # two bits each of red, green and blue
IMAGE_TOKENS: Final = GRID * GRID


@dataclass(frozen=True, slots=True)
class ColourGrid:
    """The tokens of a model that sees."""

    image_token_id: int  # stands for an image in a rendered prompt
    first_token_id: int  # of the 64 colours

    def tokens(self, content: bytes, is_given_up: Callable[[], bool] = lambda: False) -> tuple[int, ...]:
        """Return the tokens of an image. Raises InvalidArgument, and Cancelled once `is_given_up` returns True."""
        return tuple(self.first_token_id + colour for colour in colours_of(read_picture(content, is_given_up)))


def colours_of(pixels: Pixels) -> list[int]:
    """Return the colours of the squares, row by row: red * 16 + green * 4 + blue, each 0 to 3."""
    found = []
    height, width = pixels.shape[:2]
    for row in range(GRID):
        top, bottom = row * height // GRID, max((row + 1) * height // GRID, row * height // GRID + 1)
        for column in range(GRID):
            left, right = column * width // GRID, max((column + 1) * width // GRID, column * width // GRID + 1)
            red, green, blue = (int(value) // COLOURS for value in pixels[top:bottom, left:right].mean(axis=(0, 1)))
            found.append(red * 16 + green * 4 + blue)
    return found
