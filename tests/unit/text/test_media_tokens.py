"""How many tokens an image becomes, by family, and the prompt as routers hash it."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.kv.hashing import media_pad_token
from dynamo.kv.media_routing import expand_images
from dynamo.text.model import NO_MEDIA, media_tokens

QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "min_pixels": 3136,
    "max_pixels": 12845056,
}
SEES = {"image_token_id": 7, "vision_config": {}}


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [(280, 140, 50), (4, 3, 6), (28, 28, 4), (56, 56, 4), (1024, 1024, 1369), (8000, 6000, 16170), (10000, 10, None), (0, 5, None)],
)  # fmt: skip
def test_the_vectors_of_the_qwen2_vl_family(width: int, height: int, tokens: int | None) -> None:
    count = media_tokens(SEES, QWEN).count_image
    assert count is not None
    assert count(width, height) == tokens


def test_bounds_of_the_qwen2_vl_family_may_stand_in_its_size() -> None:
    size = {"shortest_edge": 3136, "longest_edge": 28 * 28 * 100}
    count = media_tokens(SEES, {"image_processor_type": "Qwen2VLImageProcessorFast", "size": size}).count_image
    assert count is not None
    assert count(2800, 2800) == 100


def test_families_with_one_number_for_every_image() -> None:
    clip = {"image_processor_type": "CLIPImageProcessor"}
    llava = {"model_type": "llava", "image_token_index": 32000, "vision_config": {"image_size": 336, "patch_size": 14}}
    found = media_tokens(llava, clip)
    assert found.image_token_id == 32000
    assert found.count_image is not None
    assert found.count_image(1, 1) == found.count_image(4000, 3) == 576
    assert media_tokens({**llava, "model_type": "llava_next"}, clip).count_image is None  # tiles
    grid = media_tokens(SEES, {"image_processor_type": "ColourGridProcessor"}).count_image
    assert grid is not None
    assert grid(5, 5) == 16


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({}, set()),
        ({"vision_config": {}}, {"image"}),
        ({"image_token_id": 3, "video_token_id": 4}, {"image", "video"}),
        ({"audio_config": {}}, {"audio"}),
        ({"image_token_id": None}, set()),
    ],
)
def test_the_kinds_that_a_config_gives_away(config: dict[str, Any], kinds: set[str]) -> None:
    assert media_tokens(config, {}).kinds == kinds


def test_what_is_not_known_is_not_counted() -> None:
    assert media_tokens({}, QWEN) == NO_MEDIA
    assert media_tokens(SEES, {}).count_image is None
    assert media_tokens(SEES, {"image_processor_type": "Other"}).count_image is None
    assert media_tokens({"vision_config": {}}, QWEN).image_token_id is None


def test_a_prompt_is_expanded_and_filled_to_whole_blocks() -> None:
    found = expand_images([1, 7, 2, 7], 7, [(0xABC, 2), (5, 3)], 4)
    assert found is not None
    first, second = media_pad_token(0xABC), media_pad_token(5)
    assert found.token_ids == [1, first, first, 2, second, second, second, 0]
    assert found.length == 7
    exact = expand_images([7, 1], 7, [(5, 3)], 4)
    assert exact is not None
    assert (exact.token_ids, exact.length) == ([second] * 3 + [1], 4)


@pytest.mark.parametrize("prompt", [[1, 2], [7, 7]])
def test_a_prompt_needs_one_placeholder_for_each_image(prompt: list[int]) -> None:
    assert expand_images(prompt, 7, [(5, 3)], 4) is None
