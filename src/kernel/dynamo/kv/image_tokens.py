"""A prompt with images as routers hash it: each placeholder becomes as many pad tokens as its image has tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dynamo.kv.hashing import media_pad_token


class ExpandedPrompt(NamedTuple):
    """The tokens that are hashed, and how many of them there are without the padding behind."""

    token_ids: list[int]
    length: int


def expand_images(
    token_ids: Sequence[int], image_token_id: int, images: Sequence[tuple[int, int]], block_size: int
) -> ExpandedPrompt | None:
    """Replace each placeholder by the pad tokens of its image, (mm_hash, tokens), and fill the last block with zeros.

    None where the prompt does not have exactly one placeholder for each image.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    places = [place for place, token in enumerate(token_ids) if token == image_token_id]
    if len(places) != len(images):
        return None
    expanded: list[int] = []
    start = 0
    for place, (mm_hash, tokens) in zip(places, images, strict=True):
        expanded += token_ids[start:place]
        expanded += [media_pad_token(mm_hash)] * tokens
        start = place + 1
    expanded += token_ids[start:]
    length = len(expanded)
    expanded += [0] * (-length % block_size)
    return ExpandedPrompt(expanded, length)
