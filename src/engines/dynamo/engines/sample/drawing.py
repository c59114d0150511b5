"""What the sample engines draw: pictures of coloured blocks that a seed and a prompt decide, in ever finer steps."""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from dynamo.engines.sample.png import Pixels, encode_png

BLOCKS: Final = 8  # of one colour each, on a side of a finished picture
FULL_STEP: Final = 3  # the step in which it is finished; step n has 2^n blocks on a side


class Blocks:
    """The colours of one picture. The same text has the same."""

    def __init__(self, text: str) -> None:
        self._colours = blake3(text.encode(errors="replace")).digest(length=3 * BLOCKS * BLOCKS)

    def shown(self, step: int) -> list[list[bytes]]:
        """Return the colour of each block as it is in a step: before the last one, the mean of the blocks that it covers."""
        side = 1 << step
        span = BLOCKS // side
        return [[self._mean(row * span, column * span, span) for column in range(side)] for row in range(side)]

    def rows(self, width: int, height: int, step: int = FULL_STEP, *, shift: int = 0) -> list[bytes]:
        """Return the rows of pixels, three bytes each. `shift`: how many blocks the picture has moved to the right."""
        grid = self.shown(step)
        side = len(grid)
        rows: list[bytes] = []
        for number, blocks in enumerate(grid):
            line = b"".join(
                [
                    blocks[(column - shift) % side] * ((column + 1) * width // side - column * width // side)
                    for column in range(side)
                ]
            )
            rows += [line] * ((number + 1) * height // side - number * height // side)
        return rows

    def _mean(self, row: int, column: int, span: int) -> bytes:
        if span == 1:
            at = 3 * (row * BLOCKS + column)
            return self._colours[at : at + 3]
        places = [3 * (y * BLOCKS + x) for y in range(row, row + span) for x in range(column, column + span)]
        return bytes([sum(self._colours[at + channel] for at in places) // len(places) for channel in range(3)])


def draw_png(text: str, width: int, height: int, step: int = FULL_STEP) -> bytes:
    """Return a picture of coloured blocks as PNG. The same text draws the same picture."""
    return encode_png(width, height, Blocks(text).rows(width, height, step))


def edited_png(image: Pixels, mask: Pixels | None, text: str, step: int = FULL_STEP) -> bytes:
    """Return `image` with the picture of `text` in it, in its size.

    With a mask (of the same size) it stands where that is transparent, and nothing else is touched; without one it is mixed
    with the whole image, half and half.
    """
    drawn = Blocks(text).rows(image.width, image.height, step)
    rows: list[bytes] = []
    for number, line in enumerate(drawn):
        begin = 4 * number * image.width
        given = image.pixels[begin : begin + 4 * image.width]
        row = bytearray(line)
        if mask is None:
            for channel in range(3):
                mixed = zip(given[channel::4], line[channel::3], strict=True)
                row[channel::3] = bytes([(one + other) // 2 for one, other in mixed])
        else:
            opaque = mask.pixels[begin + 3 : begin + 4 * image.width : 4]
            for at, alpha in enumerate(opaque):
                if alpha:
                    row[3 * at : 3 * at + 3] = given[4 * at : 4 * at + 3]
        rows.append(bytes(row))
    return encode_png(image.width, image.height, rows)
