"""Names of KV-cache blocks, the same in every process that computes them.

A block hash covers one block's tokens; a sequence hash also covers everything before it. Only whole blocks have names.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Final

import xxhash

__all__ = ["block_hashes", "block_seed", "sequence_hashes", "to_unsigned"]

SEED: Final = 1337
_MASK: Final = 2**64 - 1
_TOKEN_BYTES: Final = 4
_TOKEN_CODE: Final = "I" if array("I").itemsize == _TOKEN_BYTES else "L"

# The native derivation for cache salts is not published. Publisher and router only have to agree, and both call this
# function; length-framed, so that no salt can imitate a LoRA name or another pair.
_SALT_DOMAIN: Final = b"dynamo-unified.cache-salt.v1\0"

_hash64 = xxhash.xxh3_64_intdigest


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    eagle: bool = False,
    mm_hashes: Mapping[int, Sequence[int]] | None = None,
) -> list[int]:
    """Return one unsigned 64-bit hash per whole block of `block_size` tokens; a shorter tail has none.

    An empty `lora_name` or `cache_salt` is the same as none. `eagle` blocks also cover the first token after them.
    `mm_hashes` gives, by block number, the media objects that touch a block.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    data = memoryview(_little_endian(token_ids))
    stride = block_size * _TOKEN_BYTES
    width = stride + (_TOKEN_BYTES if eagle else 0)
    count = max(len(token_ids) - 1, 0) // block_size if eagle else len(token_ids) // block_size
    seed = block_seed(lora_name, cache_salt)
    if not mm_hashes:
        return [_hash64(data[at : at + width], seed) for at in range(0, count * stride, stride)]
    return [
        _hash64(bytes(data[number * stride : number * stride + width]) + _objects(mm_hashes.get(number, ())), seed)
        for number in range(count)
    ]


def sequence_hashes(hashes: Sequence[int]) -> list[int]:
    """Chain block hashes: each result covers its block and all before it."""
    chained: list[int] = []
    for block_hash in hashes:
        chained.append(
            _hash64(struct.pack("<QQ", chained[-1], to_unsigned(block_hash)), SEED)
            if chained
            else to_unsigned(block_hash)
        )
    return chained


def block_seed(lora_name: str | None = None, cache_salt: str | None = None) -> int:
    """Return the seed that keeps blocks of different adapters and tenants apart."""
    lora = (lora_name or "").encode()
    salt = (cache_salt or "").encode()
    if salt:
        framed = _SALT_DOMAIN + struct.pack("<I", len(salt)) + salt + struct.pack("<I", len(lora)) + lora
        return (SEED + _hash64(framed, 0)) & _MASK
    return (SEED + _hash64(lora, 0)) & _MASK if lora else SEED


def to_unsigned(value: int) -> int:
    """Return a signed or unsigned 64-bit integer as the unsigned one with the same bits. Raises ValueError if it has more."""
    if not -(2**63) <= value <= _MASK:
        raise ValueError(f"{value} does not fit into 64 bits")
    return value & _MASK


def _little_endian(token_ids: Sequence[int]) -> bytes:
    values = array(_TOKEN_CODE, token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _objects(mm_hashes: Sequence[int]) -> bytes:
    ordered = sorted(to_unsigned(value) for value in mm_hashes)
    return struct.pack(f"<{len(ordered)}Q", *ordered)
