"""Reads the bodies of the routes of tokens; each fault is named as the native routes name it. Pure."""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from dynamo.frontend.parts.token_routes.rejections import NotJson, NotTheType
from dynamo.protocol.openai.body import BodyLimits, check_depth, read_json
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.shapes import JsonObject

T = TypeVar("T")

MAX_DETAIL: Final = 512  # characters of a decoder's text: it may quote the body
_MISSING: Final = re.compile(r"Object missing required field `([^`]*)`(?: - at `\$\.([^`]*)`)?")
_PLACED: Final = re.compile(r"(.*) - at `\$\.?([^`]*)`", re.DOTALL)
_DECODE: Final = msgspec.json.Decoder(Any).decode


def read_object(body: bytes, kind: type[T], limits: BodyLimits) -> tuple[T, JsonObject, bool]:
    """Return a body as a typed value, as it was sent, and whether it had to be mended first.

    Raises NotJson, NotTheType, and RequestRejected for one that is beyond the limits.
    """
    try:
        sent, is_mended = read_json(body, _DECODE, limits)
    except RequestRejected as rejected:
        if rejected.limit is not None:
            raise
        raise NotJson(_cut(rejected.message.partition("target type: ")[2])) from rejected
    try:
        found = msgspec.convert(sent, kind)
    except msgspec.ValidationError as error:
        raise _unfit(body, str(error)) from error
    check_depth((sent,), limits.depth)
    assert isinstance(sent, dict)  # as its type is a struct
    return found, sent, is_mended


def _unfit(body: bytes, detail: str) -> NotTheType:
    if (missing := _MISSING.fullmatch(detail)) is not None:
        name, holder = missing.groups()
        path = f"{holder}: " if holder else ""
        return NotTheType(f"{path}missing field `{name}` at {_end_of(body)}", f"{holder}.{name}" if holder else name)
    placed = _PLACED.fullmatch(detail)
    if placed is None:
        return NotTheType(_cut(f"{detail} at {_end_of(body)}"), None)
    return NotTheType(_cut(f"{placed[2]}: {placed[1]}"), placed[2])


def _end_of(body: bytes) -> str:
    """Return where the object ends: a reader notices there that a member is missing."""
    lines = body.rstrip().split(b"\n")
    return f"line {len(lines)} column {len(lines[-1])}"


def _cut(detail: str) -> str:
    return detail if len(detail) <= MAX_DETAIL else detail[: MAX_DETAIL - 3] + "..."
