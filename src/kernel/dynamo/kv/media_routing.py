"""What blocks of prompts with media are hashed over, at the request's side and at the engine's. Pure.

A request carries `mm_routing_info`: the prompt as routers hash it, where each placeholder is as many pad tokens as its media
object has tokens. An engine names the tokens of its blocks, with the placeholder in every place of an object, and the objects
of each block; the same pad tokens take the places of these, so both sides compute the same hashes.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from dynamo.kv.hashing import media_pad_token, to_unsigned, with_pad_tokens

MEMBER = "mm_routing_info"


class RoutedPrompt(NamedTuple):
    """A prompt as routers see it."""

    token_ids: Sequence[int]
    length: int  # tokens of the prompt; what is left of `token_ids` fills the last block
    mm_hashes: Mapping[int, Sequence[int]] = {}  # of objects whose hashes are appended to blocks, by block number


def routed_prompt(info: object, token_ids: Sequence[int]) -> RoutedPrompt:
    """Read the `mm_routing_info` of a request whose prompt is `token_ids`. Raises ValueError naming the member that is wrong."""
    if not isinstance(info, Mapping):
        raise ValueError(f"{MEMBER} must be an object, got {type(info).__name__}")
    routed = info.get("routing_token_ids")
    if routed is None:
        routed = token_ids
    elif not isinstance(routed, list):
        raise ValueError(f"{MEMBER}.routing_token_ids must be a list of token ids, got {type(routed).__name__}")
    try:
        array("I", routed)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{MEMBER}.routing_token_ids must be unsigned 32-bit token ids: {error}") from error
    length = info.get("expanded_prompt_len")
    if length is None:
        length = len(routed)
    elif type(length) is not int or not 0 <= length <= len(routed):
        raise ValueError(f"{MEMBER}.expanded_prompt_len must be an integer from 0 to {len(routed)}, got {length!r}")
    try:
        found = media_of_blocks(info.get("block_mm_infos"))
        media = {number: [to_unsigned(each) for each in objects] for number, objects in found.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{MEMBER}: {error}") from error
    return RoutedPrompt(routed, length, media)


def padded_blocks(
    token_ids: Sequence[int], block_size: int, placeholders: Collection[int], mm_hashes: Mapping[int, Sequence[int]]
) -> list[int]:
    """Return the tokens of an engine's blocks, in a row, with pad tokens in the places of media.

    `mm_hashes` are the objects of each block by its number, in the order of their places.
    """
    padded = list(token_ids)
    for number, objects in mm_hashes.items():
        start, end = number * block_size, (number + 1) * block_size
        padded[start:end] = with_pad_tokens(padded[start:end], placeholders, objects)
    return padded


def media_of_blocks(
    block_mm_infos: Sequence[Mapping[str, Sequence[Mapping[str, int]]] | None] | None,
) -> dict[int, list[int]]:
    """Return the media hashes by block number. `block_mm_infos` has for each block None or `{"mm_objects": [{"mm_hash": int}]}`; raises ValueError for another form."""
    media: dict[int, list[int]] = {}
    for number, info in enumerate(block_mm_infos or ()):
        if info is None:
            continue
        try:
            media[number] = [entry["mm_hash"] for entry in info["mm_objects"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"block_mm_infos[{number}] must be {{'mm_objects': [{{'mm_hash': int}}]}}") from error
    return media


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
