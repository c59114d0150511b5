"""Names of KV-cache blocks, the same in every process that computes them.

A block hash covers one block's tokens; a sequence hash also covers everything before it. Only whole blocks have names.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, repeat
from typing import Final

import xxhash

SEED: Final = 1337
_LORA_SEED: Final = 0
_SALT_SEED: Final = 1
_MASK: Final = 2**64 - 1
_TOKEN_BYTES: Final = 4
_TOKEN_CODE: Final = "I" if array("I").itemsize == _TOKEN_BYTES else "L"
_PAIR: Final = struct.Struct("<QQ")
_PAD_TOKENS_FROM: Final = 1_000_000  # above the vocabulary of the models of today
_PAD_TOKEN_BITS: Final = 2**30 - 1

STRETCH_TOKENS: Final = 256
"""What a prompt shares with earlier ones is found in stretches of so many tokens: shorter ones cost more steps, longer ones
leave more to hash again behind the last one that is shared."""
KEPT_STRETCHES: Final = 8_192  # two million tokens, in 8 MB

_hash64 = xxhash.xxh3_64_intdigest
_digest = xxhash.xxh3_128_digest


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    eagle: bool = False,
    mm_hashes: Mapping[int, Sequence[int]] | None = None,
    seed: int | None = None,
) -> list[int]:
    """Return one unsigned 64-bit hash per whole block of `block_size` tokens; a shorter tail has none.

    An empty `lora_name` or `cache_salt` is the same as none. `eagle` blocks also cover the first token after them.
    `mm_hashes` gives, by block number, the media objects that touch a block. `seed` replaces the seed that `lora_name`
    and `cache_salt` make.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    data = _little_endian(token_ids)
    stride = block_size * _TOKEN_BYTES
    width = stride + (_TOKEN_BYTES if eagle else 0)
    count = max(len(token_ids) - 1, 0) // block_size if eagle else len(token_ids) // block_size
    if seed is None:
        seed = block_seed(lora_name, cache_salt) if lora_name or cache_salt else SEED
    if not eagle and not mm_hashes:
        return _hashes_of(data, block_size, seed)
    media = mm_hashes or {}
    return [_hash64(data[at * stride : at * stride + width] + _objects(media.get(at, ())), seed) for at in range(count)]


def sequence_hashes(hashes: Sequence[int], *, seed: int = SEED) -> list[int]:
    """Chain block hashes: each result covers its block and all before it."""
    return extend_sequence(None, hashes, seed=seed)


def extend_sequence(parent: int | None, hashes: Sequence[int], *, seed: int = SEED) -> list[int]:
    """Chain the hashes of blocks that follow the block with the sequence hash `parent`; None: they begin a sequence."""
    if parent is None:
        if not hashes:
            return []
        parent = to_unsigned(hashes[0])
        return [parent, *extend_sequence(parent, hashes[1:], seed=seed)]
    chained: list[int] = []
    append, pack, hash64 = chained.append, _PAIR.pack, _hash64
    before = parent
    try:
        for block_hash in hashes:
            before = hash64(pack(before, block_hash), seed)
            append(before)
    except struct.error:  # signed hashes are rare, so there is no check beforehand
        unsigned = [to_unsigned(block_hash) for block_hash in hashes]
        return extend_sequence(to_unsigned(parent), unsigned, seed=seed)
    return chained


class PrefixHasher:
    """Makes sequence hashes, and keeps those of prompts' stretches: most prompts begin as an earlier one did.

    A stretch is known by the hash of what stands before it and by 128 bits of its tokens, so two stretches are taken for one only
    where their sequence hashes might be equal, too. Those not used for longest go first, by generations: the young one becomes the
    old one, and the old one is dropped.
    """

    __slots__ = ("_block_size", "_bytes", "_old", "_young")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._bytes = max(1, STRETCH_TOKENS // block_size) * block_size * _TOKEN_BYTES
        self._young: dict[tuple[int, bytes], list[int]] = {}
        self._old: dict[tuple[int, bytes], list[int]] = {}

    def extend(self, sequence: list[int], token_ids: Sequence[int], seed: int = SEED) -> None:
        """Append the hashes of the whole blocks of tokens that follow the blocks of `sequence`. `seed`: see `block_seed`."""
        data, size, at = _little_endian(token_ids), self._bytes, 0
        before = sequence[-1] if sequence else seed
        while len(piece := data[at : at + size]) == size:
            key = before, _digest(piece)
            if (found := self._young.get(key)) is None:
                if (found := self._old.get(key)) is None:
                    break  # so what follows is new, too
                self._keep(key, found)
            sequence += found
            before, at = found[-1], at + size
        rest = extend_sequence(sequence[-1] if sequence else None, _hashes_of(data[at:], self._block_size, seed))
        blocks = size // (self._block_size * _TOKEN_BYTES)
        for start in range(0, len(rest) - blocks + 1, blocks):
            found = rest[start : start + blocks]
            self._keep((before, _digest(data[at : at + size])), found)
            before, at = found[-1], at + size
        sequence += rest

    def _keep(self, key: tuple[int, bytes], hashes: list[int]) -> None:
        if len(self._young) >= KEPT_STRETCHES // 2:
            self._young, self._old = {}, self._young
        self._young[key] = hashes


def block_seed(lora_name: str | None = None, cache_salt: str | None = None) -> int:
    """Return the seed that keeps blocks of different adapters and tenants apart.

    Publisher and router must agree on both names; engines never compute this.
    """
    seed = SEED
    if lora_name:
        seed += _hash64(lora_name.encode(), _LORA_SEED)
    if cache_salt:
        seed += _hash64(cache_salt.encode(), _SALT_SEED)
    return seed & _MASK


def to_unsigned(value: int) -> int:
    """Return a signed or unsigned 64-bit integer as the unsigned one with the same bits. Raises ValueError if it has more."""
    if not -(2**63) <= value <= _MASK:
        raise ValueError(f"{value} does not fit into 64 bits")
    return value & _MASK


def media_pad_token(mm_hash: int) -> int:
    """Return the token id that stands for a media object where a block is hashed by its tokens alone."""
    return _PAD_TOKENS_FROM + (mm_hash & _PAD_TOKEN_BITS)


def with_pad_tokens(token_ids: Sequence[int], placeholders: Collection[int], mm_hashes: Sequence[int]) -> list[int]:
    """Return the tokens of one block with each run of a placeholder replaced by the pad token of the next object.

    Runs beyond the last object get the pad token of the last one. Without objects the tokens stay as they are.
    """
    if not mm_hashes:
        return list(token_ids)
    pads = [media_pad_token(mm_hash) for mm_hash in mm_hashes]
    padded: list[int] = []
    run = -1
    previous: int | None = None
    for token in token_ids:
        if token in placeholders:
            run += previous != token
            padded.append(pads[min(run, len(pads) - 1)])
        else:
            padded.append(token)
        previous = token
    return padded


def _hashes_of(data: bytes, block_size: int, seed: int) -> list[int]:
    """Return the hashes of whole blocks of tokens, without a step of Python for each."""
    stride = block_size * _TOKEN_BYTES
    pieces = struct.iter_unpack(f"{stride}s", data[: len(data) - len(data) % stride])
    return list(map(_hash64, chain.from_iterable(pieces), repeat(seed)))


def _little_endian(token_ids: Sequence[int]) -> bytes:
    values = array(_TOKEN_CODE, token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _objects(mm_hashes: Sequence[int]) -> bytes:
    ordered = sorted(to_unsigned(value) for value in mm_hashes)
    return struct.pack(f"<{len(ordered)}Q", *ordered)
