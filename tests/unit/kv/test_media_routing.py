"""Prompts with media have the same block hashes at the request's side and at the engine's."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.kv.hashing import block_hashes, media_pad_token
from dynamo.kv.media_routing import RoutedPrompt, padded_blocks, routed_prompt
from support.cases import each_case

IMAGE, VIDEO = 151_655, 151_656
FIRST, SECOND = 0x7A9BBCB11A898630, 0x0123456789ABCDEF
A, B = 1_000_000 + (FIRST & (2**30 - 1)), 1_000_000 + (SECOND & (2**30 - 1))


def test_a_request_without_expansion_is_its_prompt() -> None:
    assert routed_prompt({}, (1, 2)) == RoutedPrompt((1, 2), 2, {})


def test_the_routing_tokens_take_the_place_of_the_prompt_without_what_fills_the_last_block() -> None:
    info = {"routing_token_ids": [1, A, A, 0], "block_mm_infos": [], "expanded_prompt_len": 3}
    assert routed_prompt(info, [1, IMAGE]) == RoutedPrompt([1, A, A, 0], 3, {})


def test_media_of_blocks_are_appended_where_the_request_says_so() -> None:
    info = {"block_mm_infos": [None, {"mm_objects": [{"mm_hash": 7}, {"mm_hash": -1}]}]}
    assert routed_prompt(info, [1] * 8).mm_hashes == {1: [7, 2**64 - 1]}


@each_case(
    "info, member",
    [
        ([], "mm_routing_info must be an object"),
        ({"routing_token_ids": "12"}, "routing_token_ids"),
        ({"routing_token_ids": [1, "2"]}, "routing_token_ids"),
        ({"routing_token_ids": [1, -1]}, "routing_token_ids"),
        ({"routing_token_ids": [1, 2**32]}, "routing_token_ids"),
        ({"routing_token_ids": [1, 2], "expanded_prompt_len": 3}, "expanded_prompt_len"),
        ({"routing_token_ids": [1, 2], "expanded_prompt_len": True}, "expanded_prompt_len"),
        ({"block_mm_infos": [{}]}, "block_mm_infos"),
        ({"block_mm_infos": [{"mm_objects": [{"mm_hash": 2**64}]}]}, "mm_routing_info"),
        ({"block_mm_infos": [{"mm_objects": [{"mm_hash": "7"}]}]}, "mm_routing_info"),
        ({"block_mm_infos": 5}, "mm_routing_info"),
    ],
)
def test_a_member_that_cannot_be_read_is_named(info: Any, member: str) -> None:
    with pytest.raises(ValueError, match=member):
        routed_prompt(info, [1, 2])


def test_both_sides_agree_where_images_cross_blocks_and_share_them() -> None:
    # 3 tokens of text, 7 of the first image, 2 of text, 5 of the second one, 3 of text: 5 blocks of 4.
    text = iter(range(10, 20))
    shape: list[tuple[int, int]] = [(0, 3), (FIRST, 7), (0, 2), (SECOND, 5), (0, 3)]
    of_request: list[int] = []
    of_engine: list[int] = []
    for mm_hash, count in shape:
        words = [next(text) for _ in range(count)] if not mm_hash else []
        of_request += words or [media_pad_token(mm_hash)] * count
        of_engine += words or [IMAGE] * count
    objects = {0: [FIRST], 1: [FIRST], 2: [FIRST], 3: [SECOND], 4: [SECOND]}
    padded = padded_blocks(of_engine, 4, {IMAGE}, objects)
    assert padded == of_request
    assert block_hashes(padded, 4) == block_hashes(of_request, 4)
    assert block_hashes(padded, 4) != block_hashes(of_engine, 4)


def test_a_block_with_the_end_of_one_image_and_the_begin_of_another_has_both_pads() -> None:
    assert padded_blocks([IMAGE, 5, IMAGE, IMAGE], 4, {IMAGE}, {0: [FIRST, SECOND]}) == [A, 5, B, B]


def test_an_image_next_to_a_video_is_a_run_of_its_own() -> None:
    assert padded_blocks([IMAGE, IMAGE, VIDEO, 5], 4, {IMAGE, VIDEO}, {0: [FIRST, SECOND]}) == [A, A, B, 5]


def test_a_placeholder_in_a_block_without_objects_stays() -> None:
    assert padded_blocks([IMAGE] * 8, 4, {IMAGE}, {1: [FIRST]}) == [IMAGE] * 4 + [A] * 4
