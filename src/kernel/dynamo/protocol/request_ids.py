"""Ids of requests: a UUID on every wire, and what an API's answers make of it."""

from __future__ import annotations

import re
from typing import Final

_LAST_GROUP: Final = 0xFFFF  # the last four digits
_UUID: Final = re.compile(
    r"(?:[a-z]+[-_])?([0-9a-f]{8})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{12})", re.IGNORECASE
)


def part_uuid(request_id: str, number: int) -> str:
    """Return the id of one part of a request that goes to workers in several, such as a choice of `n`.

    Native workers accept only UUIDs. It differs from the request's own in the last four digits, so that a search for the
    first 32 characters finds the request and all of its parts. Another text than a UUID gets the number appended.
    """
    found = _UUID.fullmatch(request_id)
    if found is None or number >= _LAST_GROUP:
        return f"{request_id}-{number}"
    value = int("".join(found.groups()), 16)
    return _text(value & ~_LAST_GROUP | ((value + 1 + number) & _LAST_GROUP))


def uuid_in(id: str) -> str:
    """Return the UUID of a request by any spelling of it: bare, or as the `id` of an answer (`chatcmpl-...`, `resp_...`).

    Any other text is returned as it is.
    """
    found = _UUID.fullmatch(id)
    return id if found is None else "-".join(found.groups()).lower()


def _text(value: int) -> str:
    digits = f"{value:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
