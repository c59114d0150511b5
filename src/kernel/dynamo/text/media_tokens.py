"""What a model's files define of media: which kinds it takes, which token stands for an image, and how many tokens one becomes.

The counts are for routing and for usage; the engine decides what an image really becomes. A further family is a function here
and a row of `_FAMILIES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

ImageCounter = Callable[[int, int], "int | None"]
"""Return how many tokens an image of this width and height becomes; None: the model does not take such an image."""

GRID_PROCESSOR: Final = "ColourGridProcessor"
CODES_PROCESSOR: Final = "PictureCodesProcessor"
"""The image processors of the reference engine: every image is 4 x 4 colours, or sixteen codes, a token each."""

_GRID_TOKENS: Final = 16
_MAX_ASPECT: Final = 200  # width to height or the reverse, of the Qwen2-VL family

# The members of config.json that give a kind away.
_SIGNS: Final[Mapping[str, tuple[str, ...]]] = {
    "image": ("image_token_id", "image_token_index", "vision_config", "img_processor"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index", "audio_config"),
}


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """What is known of the media of one model."""

    kinds: frozenset[str] = frozenset()  # image, video, audio
    image_token_id: int | None = None  # stands once for each image of a rendered prompt; None: not known
    count_image: ImageCounter | None = None  # None: of no family that is known here


NO_MEDIA: Final = MediaTokens()


def media_tokens(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> MediaTokens:
    """Read what config.json and preprocessor_config.json (empty: it is not there) define of media."""
    kinds = frozenset(kind for kind, signs in _SIGNS.items() if any(config.get(sign) is not None for sign in signs))
    if "image" not in kinds:
        return MediaTokens(kinds)
    token_id = next((found for sign in _SIGNS["image"][:2] if _is_id(found := config.get(sign))), None)
    family = preprocessor.get("image_processor_type") if preprocessor else None
    make = _FAMILIES.get(family) if isinstance(family, str) else None
    return MediaTokens(kinds, token_id, None if make is None else make(config, preprocessor))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _qwen2_vl(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> ImageCounter | None:
    size = preprocessor.get("size")
    named: Mapping[str, Any] = size if isinstance(size, Mapping) else {}
    patch = _positive(preprocessor.get("patch_size"), 14)
    merge = _positive(preprocessor.get("merge_size"), 2)
    least = _positive(preprocessor.get("min_pixels", named.get("shortest_edge")), 56 * 56)
    most = _positive(preprocessor.get("max_pixels", named.get("longest_edge")), 28 * 28 * 1280)
    side = patch * merge

    def count(width: int, height: int) -> int | None:
        if width < 1 or height < 1 or max(width, height) / min(width, height) > _MAX_ASPECT:
            return None
        across, down = round(width / side), round(height / side)
        if across * down * side * side > most:
            shrink = math.sqrt(width * height / most)
            across = max(1, math.floor(width / shrink / side))
            down = max(1, math.floor(height / shrink / side))
        elif across * down * side * side < least:
            grow = math.sqrt(least / (width * height))
            across, down = math.ceil(width * grow / side), math.ceil(height * grow / side)
        return across * down

    return count


def _llava(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> ImageCounter | None:
    """Return the counter of models that scale every image to one size (LLaVA 1.5: 336 by 336 in patches of 14)."""
    if config.get("model_type") != "llava":
        return None  # the same processor stands before models that cut images into tiles
    vision = config.get("vision_config")
    settings: Mapping[str, Any] = vision if isinstance(vision, Mapping) else {}
    per_side = _positive(settings.get("image_size"), 336) // _positive(settings.get("patch_size"), 14)
    tokens = _positive(config.get("image_seq_length"), per_side * per_side)
    return lambda width, height: tokens


def _grid(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> ImageCounter | None:
    return lambda width, height: _GRID_TOKENS


def _positive(value: Any, default: int) -> int:
    return value if _is_id(value) and value > 0 else default


_FAMILIES: Final[Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], ImageCounter | None]]] = {
    "Qwen2VLImageProcessor": _qwen2_vl,
    "Qwen2VLImageProcessorFast": _qwen2_vl,
    "CLIPImageProcessor": _llava,
    "CLIPImageProcessorFast": _llava,
    GRID_PROCESSOR: _grid,
    CODES_PROCESSOR: _grid,
}
