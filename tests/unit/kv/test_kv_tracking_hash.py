import random
import struct
from itertools import pairwise

import blake3
import msgspec
import pytest
import xxhash

from dynamo.kv import block_hashes, sequence_hashes
from dynamo.kv.tracking_hash import TrackingScope, keyed_seeds, public_seeds, random_hashes

KEY = bytes(range(32))
SCOPE = TrackingScope("k1", "model", "group", 16)
TOKENS = list(range(1, 49))


def test_public_tracking_hashes_are_the_names_of_the_blocks_in_kv_events() -> None:
    names = sequence_hashes(block_hashes(TOKENS, 16, lora_name="a", cache_salt="b"))
    assert public_seeds("a", "b").hashes(TOKENS, 16) == names
    eagle = sequence_hashes(block_hashes(TOKENS, 16, eagle=True))
    assert public_seeds().hashes(TOKENS, 16, eagle=True) == eagle


def test_keyed_hashes_are_the_public_ones_under_seeds_of_the_digest() -> None:
    seeds = keyed_seeds(KEY, SCOPE)
    framed = b"dynamo.router.tracking-hash/keyed-xxh3-v1\0"
    for field in (b"k1", b"model", b"group", struct.pack("<Q", 16), b"", b"", b"\0"):
        framed += struct.pack("<Q", len(field)) + field
    digest = blake3.blake3(framed, key=KEY).digest()
    assert seeds.block.to_bytes(8, "little") + seeds.chain.to_bytes(8, "little") == digest[:16]
    tokens = struct.pack("<16I", *TOKENS[:16]), struct.pack("<16I", *TOKENS[16:32])
    first, second = (xxhash.xxh3_64_intdigest(part, seeds.block) for part in tokens)
    chained = xxhash.xxh3_64_intdigest(struct.pack("<QQ", first, second), seeds.chain)
    assert seeds.hashes(TOKENS[:32], 16) == [first, chained]


def test_every_field_of_a_scope_and_the_key_make_other_hashes() -> None:
    others = [
        msgspec.structs.replace(SCOPE, **change)
        for change in (
            {"key_id": "k2"},
            {"model": "m"},
            {"routing_group": "g"},
            {"block_size": 32},
            {"cache_salt": "s"},
            {"lora_name": "s"},
            {"is_eagle": True},
            {"key_id": "k1m", "model": "odel"},  # the same letters, cut elsewhere
        )
    ]
    seeds = [keyed_seeds(KEY, scope) for scope in (SCOPE, *others)] + [keyed_seeds(bytes(32), SCOPE)]
    assert len(set(seeds)) == len(seeds)


def test_a_key_of_another_length_and_a_block_size_of_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        keyed_seeds(b"short", SCOPE)
    with pytest.raises(ValueError, match="block_size"):
        keyed_seeds(KEY, msgspec.structs.replace(SCOPE, block_size=0))


def test_random_hashes_are_shared_with_nobody() -> None:
    rng = random.Random(1)
    drawn = sorted(random_hashes(100, rng) + random_hashes(100, rng))
    assert all(low < high for low, high in pairwise(drawn))
    assert drawn[0] >= 0
    assert drawn[-1] < 2**64
