"""Token ids in the forms they arrive in: a list, packed 32-bit little-endian integers, or an array with `tolist`."""

from __future__ import annotations

import sys
from array import array
from collections.abc import MutableMapping
from typing import Any, Final

__all__ = ["normalize_request_token_ids", "token_ids_len", "token_ids_to_list"]

TOKEN_BYTES: Final = 4
_TYPE_CODE: Final = "I" if array("I").itemsize == TOKEN_BYTES else "L"


def token_ids_to_list(token_ids: Any) -> list[int]:
    """A list of ints; a list is returned as it is. Raises TypeError or, for a torn buffer, ValueError."""
    if isinstance(token_ids, list):
        return token_ids
    packed = _packed(token_ids)
    if packed is not None:
        _check(packed)
        values = array(_TYPE_CODE)
        values.frombytes(packed)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tolist()
    if isinstance(token_ids, tuple):
        return list(token_ids)
    if hasattr(token_ids, "tolist"):
        return list(token_ids.tolist())
    raise TypeError(f"token_ids must be a list, packed int32 bytes or an array, got {type(token_ids).__name__}")


def token_ids_len(token_ids: Any) -> int:
    """How many tokens, without unpacking them."""
    packed = _packed(token_ids)
    if packed is None:
        return len(token_ids)
    _check(packed)
    return len(packed) // TOKEN_BYTES


def normalize_request_token_ids(request: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace the request's `token_ids` by a list, in place, and return the request."""
    request["token_ids"] = token_ids_to_list(request["token_ids"])
    return request


def _packed(token_ids: Any) -> bytes | bytearray | memoryview | None:
    if isinstance(token_ids, bytes | bytearray):
        return token_ids
    if isinstance(token_ids, memoryview) and token_ids.itemsize == 1:
        return token_ids  # a view with wider items has them as numbers already: its `tolist` is right
    return None


def _check(packed: bytes | bytearray | memoryview) -> None:
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"packed token_ids have {len(packed)} bytes, which is no multiple of {TOKEN_BYTES}")
