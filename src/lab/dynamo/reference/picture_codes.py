"""How a model sees that has learned to: a small convolutional network turns an image into sixteen codes, a token each.

Every image is brought to one size. Each of the sixteen tokens is one of sixteen codes of its own: the most likely one of what
the network yields in its place. So an image is a few numbers to everything behind this module, as text is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from dynamo.errors import InvalidArgument
from dynamo.reference.picture_files import Pixels, read_picture
from dynamo.reference.tensor_files import Array, read_tensors
from dynamo.reference.vision import IMAGE_TOKENS, ColourGrid

FILE: Final = "vision.safetensors"  # beside config.json; not among the shards, which other engines read whole
SIDE: Final = 64  # pixels, of what the network gets
CODES: Final = 16  # for each token
CONVOLUTIONS: Final = (16, 32, 64, 64)  # channels behind each; every one halves the sides
HIDDEN: Final = 192
LARGE: Final = 2 * SIDE  # a longer side is first averaged in whole squares, without a copy of the image in float


@dataclass(frozen=True, slots=True)
class PictureCodes:
    """The tokens of a model that sees pictures."""

    image_token_id: int  # stands for an image in a rendered prompt
    first_token_id: int  # of the codes
    digest: str  # of the file: other weights are another vision
    weights: dict[str, Array] = field(compare=False, repr=False)

    def tokens(self, content: bytes, is_given_up: Callable[[], bool] = lambda: False) -> tuple[int, ...]:
        """Return the tokens of an image. Raises InvalidArgument, and Cancelled once `is_given_up` returns True."""
        codes = self.scores(scaled(read_picture(content, is_given_up))).reshape(IMAGE_TOKENS, CODES).argmax(axis=1)
        return tuple(self.first_token_id + CODES * place + int(code) for place, code in enumerate(codes))

    def scores(self, image: Array) -> Array:
        """Return what the network yields for a scaled image: a number for each code of each token."""
        x = image / np.float32(255) - np.float32(0.5)
        sums = []  # of each channel over the whole image: how much there is of something, wherever it is
        for number in range(len(CONVOLUTIONS)):
            x = _halved(x, self.weights[f"convolutions.{number}.weight"], self.weights[f"convolutions.{number}.bias"])
            sums.append(x.sum(axis=(0, 1)) / np.float32(len(x)))
        flat = np.concatenate((x.reshape(-1), *sums[:-1]))
        hidden = np.maximum(self.weights["hidden.weight"] @ flat + self.weights["hidden.bias"], 0)
        found: Array = self.weights["codes.weight"] @ hidden + self.weights["codes.bias"]
        return found


Vision = ColourGrid | PictureCodes
"""How a model sees."""


def known_tokens(vocab_size: int, vision: Vision | None) -> int:
    """Return how many tokens a prompt may hold: the vocabulary, and the codes of pictures behind it."""
    return vocab_size + IMAGE_TOKENS * CODES if isinstance(vision, PictureCodes) else vocab_size


def _halved(x: Array, weight: Array, bias: Array) -> Array:
    """Convolve (height, width, channels) with (channels behind, 3, 3, channels) in steps of two; negative results are zero."""
    height, width, channels = x.shape
    framed = np.zeros((height + 2, width + 2, channels), np.float32)
    framed[1:-1, 1:-1] = x
    windows = np.lib.stride_tricks.sliding_window_view(framed, (3, 3), axis=(0, 1))[::2, ::2]
    rows = windows.transpose(0, 1, 3, 4, 2).reshape(-1, 9 * channels)  # one for each place
    found: Array = np.maximum(rows @ weight.reshape(len(weight), -1).T + bias, 0)
    halved: Array = found.reshape(height // 2, width // 2, -1)
    return halved


def scaled(pixels: Pixels) -> Array:
    """Return an image as the network gets it, (SIDE, SIDE, 3): whole, its sides in proportion, the rest in its edge's colour."""
    height, width = pixels.shape[:2]
    step = max(height, width) // LARGE
    if step > 1 and min(height, width) >= step:
        squares = pixels[: height // step * step, : width // step * step]
        small = squares.reshape(height // step, step, width // step, step, 3).mean(axis=(1, 3), dtype=np.float32)
    else:
        small = pixels.astype(np.float32)
    height, width = small.shape[:2]
    side = max(height, width)
    found = np.empty((SIDE, SIDE, 3), np.float32)
    found[:] = np.concatenate((small[0], small[-1], small[:, 0], small[:, -1])).mean(axis=0)
    high, wide = (max(round(SIDE * length / side), 1) for length in (height, width))
    top, left = (SIDE - high) // 2, (SIDE - wide) // 2
    lines = (_shares(height, high) @ small.reshape(height, -1)).reshape(high, width, 3)
    found[top : top + high, left : left + wide] = _shares(width, wide) @ lines
    return found


def _shares(length: int, wanted: int) -> npt.NDArray[np.float32]:
    """Return how much of each old pixel is in each new one, (wanted, length): by the room they share."""
    edges = np.linspace(0, length, wanted + 1)
    low, high = edges[:-1, None], edges[1:, None]
    old = np.arange(length)
    shared = np.clip(np.minimum(high, old + 1) - np.maximum(low, old), 0, None) / (length / wanted)
    shares: npt.NDArray[np.float32] = shared.astype(np.float32)
    return shares


def read_picture_codes(directory: Path, *, image_token_id: int, first_token_id: int) -> PictureCodes:
    """Read the network beside a model. Raises InvalidArgument naming the file and the tensor that is wrong."""
    path = directory / FILE
    tensors = read_tensors(path)
    for name, shape in SHAPES.items():
        found = tensors.get(name)
        if found is None or found.shape != shape:
            what = "is missing" if found is None else f"has the shape {list(found.shape)}"
            raise InvalidArgument(f"{path}: {name} {what}; it must be {list(shape)}")
    digest = blake3(path.read_bytes()).hexdigest()
    return PictureCodes(image_token_id, first_token_id, digest, {name: tensors[name] for name in SHAPES})


def _shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of the network."""
    found: dict[str, tuple[int, ...]] = {}
    channels, side = 3, SIDE
    for number, behind in enumerate(CONVOLUTIONS):
        found[f"convolutions.{number}.weight"] = (behind, 3, 3, channels)
        found[f"convolutions.{number}.bias"] = (behind,)
        channels, side = behind, side // 2
    found["hidden.weight"], found["hidden.bias"] = (HIDDEN, side * side * channels + sum(CONVOLUTIONS[:-1])), (HIDDEN,)
    found["codes.weight"], found["codes.bias"] = (IMAGE_TOKENS * CODES, HIDDEN), (IMAGE_TOKENS * CODES,)
    return found


SHAPES: Final = _shapes()
