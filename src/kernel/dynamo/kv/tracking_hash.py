"""Names of blocks in a router's account of active requests, public or under a key.

Routers that share one account exchange these hashes. `public-xxh3-v1` names blocks as KV events do. With
`keyed-xxh3-v1` a listener without the key cannot test whether a known prompt is among them: both seeds come from a
keyed BLAKE3 digest over everything that separates one account from another. The order of its fields, the domain and the
place of the seeds are those of the native system; how it frames a length is not published, so 8 bytes, little-endian,
are our choice, and keyed accounts are shared only among routers of this package.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Final

import blake3
import msgspec

from dynamo.kv.hashing import SEED, block_hashes, block_seed, sequence_hashes

PUBLIC: Final = "public-xxh3-v1"
KEYED: Final = "keyed-xxh3-v1"
KEY_BYTES: Final = 32
_DOMAIN: Final = b"dynamo.router.tracking-hash/keyed-xxh3-v1\0"


class TrackingSeeds(msgspec.Struct, frozen=True):
    """The seeds of block hashes and of their chain."""

    block: int
    chain: int = SEED

    def hashes(self, token_ids: Sequence[int], block_size: int, *, eagle: bool = False) -> list[int]:
        """Return one chained hash per whole block."""
        return sequence_hashes(block_hashes(token_ids, block_size, eagle=eagle, seed=self.block), seed=self.chain)


class TrackingScope(msgspec.Struct, frozen=True):
    """What separates one account of keyed hashes from another."""

    key_id: str
    model: str
    routing_group: str
    block_size: int
    cache_salt: str = ""
    lora_name: str = ""
    is_eagle: bool = False


def public_seeds(lora_name: str | None = None, cache_salt: str | None = None) -> TrackingSeeds:
    """Return the seeds of `public-xxh3-v1`: those of KV events."""
    return TrackingSeeds(block_seed(lora_name, cache_salt))


def keyed_seeds(key: bytes, scope: TrackingScope) -> TrackingSeeds:
    """Return the seeds of `keyed-xxh3-v1`. Raises ValueError for a key that is not 32 bytes long."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a tracking key has {KEY_BYTES} bytes, got {len(key)}")
    if scope.block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {scope.block_size}")
    fields = (
        scope.key_id.encode(),
        scope.model.encode(),
        scope.routing_group.encode(),
        struct.pack("<Q", scope.block_size),
        scope.cache_salt.encode(),
        scope.lora_name.encode(),
        bytes([scope.is_eagle]),
    )
    framed = b"".join(struct.pack("<Q", len(field)) + field for field in fields)
    digest = blake3.blake3(_DOMAIN + framed, key=key).digest()
    block, chain = struct.unpack_from("<QQ", digest)
    return TrackingSeeds(block, chain)


def random_hashes(count: int, rng: random.Random) -> list[int]:
    """Return hashes of blocks that no other request shares: for requests whose cache is not used again."""
    return [rng.getrandbits(64) for _ in range(count)]
