"""How keys are cut into buckets and written as file names, exactly as the native system does it."""

from __future__ import annotations

import secrets
from typing import Final

_LITERAL: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_ENCODED: Final = [chr(byte) if byte in _LITERAL else f"%{byte:02X}" for byte in range(256)]

TEMPORARY_PREFIX: Final = ".tmp_"  # no key starts with "." once encoded, so the two cannot meet


def encode_name(key: str) -> str:
    """Encode a key as a file name: every byte of its UTF-8 but ASCII letters and digits becomes %XX."""
    return "".join([_ENCODED[byte] for byte in key.encode()])


def decode_name(name: str) -> str | None:
    """Return the key of a file name, or None for a name that no key has."""
    found = bytearray()
    rest = iter(name)
    for char in rest:
        if char == "%":
            digits = next(rest, "") + next(rest, "")
            if len(digits) != 2 or not _HEX.issuperset(digits):
                return None
            found.append(int(digits, 16))
        elif char.isascii():
            found.append(ord(char))
        else:
            return None
    try:
        return found.decode()
    except UnicodeDecodeError:
        return None


def split_bucket(key: str) -> tuple[str, str]:
    """Split a key into ("v1/instances", "ns/c/e/1f"): the first two segments are the bucket, the rest may be empty (a
    prefix).

    Raises ValueError when there are fewer than two segments: a bucket is a directory, and there is no watch over all.
    """
    first, _, rest = key.strip("/").partition("/")
    second, _, inside = rest.partition("/")
    if not first or not second:
        raise ValueError(
            f"discovery key {key!r} names no bucket: expected BUCKET/VERSIONED_NAME/..., as in v1/instances/a"
        )
    return f"{first}/{second}", inside


def split_key(key: str) -> tuple[str, str]:
    """Like `split_bucket` for a key that is written: it must name something inside its bucket."""
    bucket, inside = split_bucket(key)
    if not inside:
        raise ValueError(f"discovery key {key!r} is a bucket: expected a key inside it")
    return bucket, inside


def new_lease_id() -> int:
    """Return a random connection id, not zero.

    The type is u64, and ids of native workers use all of it. Ours stay within 53 bits: a reader of JSON that takes numbers
    for doubles (`/health`, `nvext.worker_id`) then keeps every digit.
    """
    return secrets.randbits(53) or 1
