import operator
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv import block_hashes, hashing, sequence_hashes, to_unsigned
from dynamo.kv.hashing import block_seed, extend_sequence, media_pad_token, with_pad_tokens
from support.cases import each_case

TOKENS = list(range(1, 33))
PLAIN = [16863443419780771464, 2287610619914608821]


@each_case(
    ("options", "expected"),
    [
        ({}, PLAIN),
        ({"lora_name": "", "cache_salt": ""}, PLAIN),
        ({"lora_name": "a"}, [13989385890342586959, 2612645568696598570]),
        ({"cache_salt": "a"}, [13141995645013051325, 14043154804904954999]),
        ({"lora_name": "a", "cache_salt": "b"}, [13282007913120652853, 10936094188308344975]),
        ({"eagle": True}, [6752489653130089168]),
        ({"mm_hashes": {0: [7]}}, [5771247725381875071, 2287610619914608821]),
    ],
)
def test_block_hashes_are_the_native_ones(options: dict[str, Any], expected: list[int]) -> None:
    assert block_hashes(TOKENS, 16, **options) == expected


def test_a_salt_differs_from_no_salt_from_another_salt_and_from_an_adapter_of_the_same_name() -> None:
    seeds = {block_seed(), block_seed("a"), block_seed(None, "a"), block_seed(None, "b"), block_seed("a", "b")}
    assert len(seeds) == 5
    assert block_seed("ab", "c") != block_seed("b", "ca")
    assert block_seed("a", "b") != block_seed("b", "a")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 20))
def test_only_whole_blocks_have_names_and_a_prefix_keeps_them(token_ids: list[int], block_size: int) -> None:
    hashes = block_hashes(token_ids, block_size)
    whole = len(token_ids) // block_size
    assert len(hashes) == whole
    assert block_hashes(token_ids[: whole * block_size], block_size) == hashes
    eagle = block_hashes(token_ids, block_size, eagle=True)
    assert len(eagle) == max(len(token_ids) - 1, 0) // block_size


def test_a_sequence_hash_covers_everything_before_it() -> None:
    first = sequence_hashes([1, 2, 3])
    assert first[0] == 1
    assert sequence_hashes([9, 2, 3])[1:] != first[1:]
    assert sequence_hashes([1, 2]) == first[:2]
    assert sequence_hashes([]) == []


def test_media_hashes_count_in_any_order() -> None:
    assert block_hashes(TOKENS, 16, mm_hashes={0: [9, 7]}) == block_hashes(TOKENS, 16, mm_hashes={0: [7, 9]})


@each_case("value", [-1, -(2**63), 0, 2**64 - 1])
def test_signed_hashes_become_unsigned_with_the_same_bits(value: int) -> None:
    assert to_unsigned(value) == value % 2**64


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_a_hash_of_more_than_64_bits_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        to_unsigned(value)


def test_a_block_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size"):
        block_hashes([1], 0)


@given(st.lists(st.integers(-(2**63), 2**64 - 1), max_size=20), st.integers(0, 20))
def test_a_sequence_can_be_continued_from_any_of_its_blocks(hashes: list[int], cut: int) -> None:
    whole = sequence_hashes(hashes)
    head = whole[:cut]
    assert head + extend_sequence(head[-1] if head else None, hashes[len(head) :]) == whole


def test_a_hash_of_more_than_64_bits_has_no_place_in_a_sequence() -> None:
    for wrong in ([2**64], [1, 2**64]):
        with pytest.raises((ValueError, struct.error)):
            sequence_hashes(wrong)


def test_a_pad_token_stands_for_each_run_of_image_tokens() -> None:
    assert media_pad_token(2**64 - 1) == 1_000_000 + 2**30 - 1
    assert media_pad_token(7) == 1_000_007
    image = 99
    assert with_pad_tokens([1, image, image, 2, image], {image}, [7, 8]) == [1, 1_000_007, 1_000_007, 2, 1_000_008]
    assert with_pad_tokens([image, 1, image, 2, image], {image}, [7, 8]) == [1_000_007, 1, 1_000_008, 2, 1_000_008]
    assert with_pad_tokens([1, image], {image}, []) == [1, image]


@given(
    st.sampled_from([1, 16, 48, 300]),
    st.lists(st.tuples(st.integers(0, 900), st.integers(0, 2), st.booleans()), min_size=1, max_size=8),
)
def test_prompts_that_begin_as_earlier_ones_get_the_hashes_that_they_get_alone(
    block_size: int, prompts: list[tuple[int, int, bool]]
) -> None:
    hasher = hashing.PrefixHasher(block_size)
    for length, kind, is_salted in prompts:
        ids = [min(at // 300, kind) for at in range(length)]  # alike for 300 tokens or for 600
        salt = "tenant" if is_salted else None
        sequence: list[int] = []
        hasher.extend(sequence, ids, block_seed(cache_salt=salt))
        assert sequence == sequence_hashes(block_hashes(ids, block_size, cache_salt=salt))


def test_kept_stretches_have_a_bound_and_those_in_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "KEPT_STRETCHES", 8)
    hasher, used = hashing.PrefixHasher(16), [1] * 256
    kept: list[int] = []
    hasher.extend(kept, used)
    for number in range(2, 40):
        hasher.extend([], [number] * 256)
        again: list[int] = []
        hasher.extend(again, used)
        assert all(map(operator.is_, again, kept))  # found, not made again
        assert len(hasher._young) + len(hasher._old) <= 8
