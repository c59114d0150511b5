"""A key as its owner writes it: `dyn-<id>.<random>`, or any string of at least 16 bytes that was imported."""

from __future__ import annotations

import base64
import hashlib
import string
from typing import Final

PREFIX: Final = "dyn-"
ID_CHARACTERS: Final = 10
RANDOM_BYTES: Final = 32
MIN_IMPORTED_BYTES: Final = 16  # a hash of less could be guessed: what is stored is not a slow hash
MAX_IMPORTED_BYTES: Final = 512
HASH_PREFIX: Final = "sha256:"
ALPHABET: Final = string.ascii_letters + string.digits


def new_id(random: bytes) -> str:
    """Return an id from at least ten random bytes; its letters are not equally likely, and are not secret."""
    return "".join([ALPHABET[byte % len(ALPHABET)] for byte in random[:ID_CHARACTERS]])


def key_text(id: str, random: bytes) -> str:
    """Return the whole key of `id`. Raises ValueError unless there are 32 random bytes."""
    if len(random) != RANDOM_BYTES:
        raise ValueError(f"a key takes {RANDOM_BYTES} random bytes, got {len(random)}")
    return f"{PREFIX}{id}.{base64.urlsafe_b64encode(random).rstrip(b'=').decode()}"


def hash_of(key: bytes) -> str:
    """Return what a key file keeps of a key. A fast hash does: a key has 256 random bits, or at least 16 bytes."""
    return HASH_PREFIX + hashlib.sha256(key).hexdigest()


def check_imported(key: str) -> None:
    """Raise ValueError for a string that is too short to be a key, or that no header can carry."""
    size = len(key.encode())
    if not MIN_IMPORTED_BYTES <= size <= MAX_IMPORTED_BYTES:
        raise ValueError(
            f"an imported key has {MIN_IMPORTED_BYTES} to {MAX_IMPORTED_BYTES} bytes, this string has {size}"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("an imported key has printable ASCII characters only, and no blank")
