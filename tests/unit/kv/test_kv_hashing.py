import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv import block_hashes, sequence_hashes, to_unsigned
from dynamo.kv.hashing import block_seed

TOKENS = list(range(1, 33))
PLAIN = [16863443419780771464, 2287610619914608821]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, PLAIN),
        ({"lora_name": "", "cache_salt": ""}, PLAIN),
        ({"lora_name": "a"}, [13989385890342586959, 2612645568696598570]),
        ({"eagle": True}, [6752489653130089168]),
        ({"mm_hashes": {0: [7]}}, [5771247725381875071, 2287610619914608821]),
    ],
)
def test_block_hashes_are_the_native_ones(options: dict, expected: list[int]) -> None:
    assert block_hashes(TOKENS, 16, **options) == expected


def test_a_salt_differs_from_no_salt_from_another_salt_and_from_an_adapter_of_the_same_name() -> None:
    seeds = {block_seed(), block_seed("a"), block_seed(None, "a"), block_seed(None, "b"), block_seed("a", "b")}
    assert len(seeds) == 5
    assert block_seed("ab", "c") != block_seed("b", "ca")


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


@pytest.mark.parametrize("value", [-1, -(2**63), 0, 2**64 - 1])
def test_signed_hashes_become_unsigned_with_the_same_bits(value: int) -> None:
    assert to_unsigned(value) == value % 2**64


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_a_hash_of_more_than_64_bits_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        to_unsigned(value)


def test_a_block_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size"):
        block_hashes([1], 0)
