"""Token ids in the forms they arrive in: a list, packed 32-bit little-endian integers, or an array with `tolist`."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, Final, TypeVar, overload

from dynamo.contract.requests.invalid import InvalidRequest

__all__ = ["normalize_request_token_ids", "token_ids_len", "token_ids_to_list"]

RequestT = TypeVar("RequestT", bound=Any)

TOKEN_BYTES: Final = 4
_TYPE_CODE: Final = "I" if array("I").itemsize == TOKEN_BYTES else "L"


@overload
def token_ids_to_list(value: None) -> None: ...


@overload
def token_ids_to_list(value: Any) -> list[int]: ...


def token_ids_to_list(value: Any) -> list[int] | None:
    """Turn any of the forms into a list of ints; a list is returned as it is, and None as None.

    Raises InvalidRequest for a buffer that is cut within a token, and for what holds no token ids.
    """
    if value is None or isinstance(value, list):
        return value
    packed = _packed(value)
    if packed is not None:
        _check(packed)
        values = array(_TYPE_CODE)
        values.frombytes(packed)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tolist()
    if hasattr(value, "tolist"):
        return list(value.tolist())
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidRequest(f"token_ids must be a list, packed int32 bytes or an array, got {type(value).__name__}")
    return list(value)


def token_ids_len(value: Any) -> int:
    """Count the tokens without unpacking them; None has 0."""
    if value is None:
        return 0
    packed = _packed(value)
    if packed is None:
        return len(value)
    _check(packed)
    return len(packed) // TOKEN_BYTES


def normalize_request_token_ids(request: RequestT) -> RequestT:
    """Replace the request's `token_ids` by a list, in place, and return the request; one without them stays as it is."""
    if request.get("token_ids") is not None:
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
        raise InvalidRequest(f"packed token_ids have {len(packed)} bytes, which is not a multiple of {TOKEN_BYTES}")
