"""Schemas for guided decoding: an object that lists its properties has no others.

JSON Schema lets an object have any further member unless `additionalProperties` forbids it, and clients leave that
word out. A guided model may then go on with members until its token limit. So such objects are closed here, for every
engine alike, wherever closing allows what the schema means: parts that describe one object together (`allOf`, or
`properties` beside `anyOf`) each know only their own members, and stay open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dynamo.protocol.openai.strict_schema import subschemas

TIGHT_WHITE_SPACE: Final = r"[ \n]?"
"""What may stand between two tokens of guided JSON: at most one space or line break. A free pattern lets a model write
white space until its limit."""

_LISTED_PARTS: Final = ("allOf", "anyOf", "oneOf")
_CONDITIONAL_PARTS: Final = ("then", "else")
_MEMBERS: Final = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")


def bounded_guidance(guided: Mapping[str, Any], *, closes_objects: bool) -> dict[str, Any]:
    """Return `guided_decoding` with its JSON schema closed and its white space tight, unless the client set a pattern."""
    bounded = dict(guided)
    if "json" not in bounded:
        return bounded
    bounded.setdefault("whitespace_pattern", TIGHT_WHITE_SPACE)
    if closes_objects:
        schema = bounded["json"]
        if isinstance(schema, str):
            try:
                schema = msgspec.json.decode(schema)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                return bounded  # the engine refuses it in its own words
        if isinstance(schema, dict):
            bounded["json"] = closed_schema(schema)
    return bounded


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which every object with `properties` and without `additionalProperties` is closed."""
    closed: dict[str, Any] = _closed(schema, _shared_parts(schema), "#", may_close=True)
    return closed


def _closed(schema: Any, shared: frozenset[str], place: str, *, may_close: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    may_close = may_close and place not in shared
    is_joint = _is_joint(schema)
    copy = dict(schema)
    for path, inner in subschemas(schema):
        if path[0] in ("not", "if"):
            continue  # closing what must not be would let more through, and closing a condition would change it
        is_part = _is_part(path[0])
        found = _closed(
            inner, shared, _pointer(place, path), may_close=(may_close and not is_joint) if is_part else True
        )
        if found is inner:
            continue
        if len(path) == 1:
            copy[str(path[0])] = found
        else:
            group, key = path
            if copy[str(group)] is schema[str(group)]:
                copy[str(group)] = schema[str(group)].copy()
            copy[str(group)][key] = found
    is_open = "additionalProperties" not in schema and "unevaluatedProperties" not in schema
    if is_open and may_close and not is_joint and isinstance(schema.get("properties"), dict):
        copy["additionalProperties"] = False
    return copy


def _is_part(keyword: str | int) -> bool:
    """Return whether schemas below this keyword describe the same value as the schema around them."""
    return keyword in (*_LISTED_PARTS, *_CONDITIONAL_PARTS, "if", "dependentSchemas")


def _is_joint(schema: Mapping[str, Any]) -> bool:
    """Return whether several parts of this schema may each add members to the same object."""
    parts = int("properties" in schema or "patternProperties" in schema) + int("$ref" in schema)
    for keyword in _LISTED_PARTS:
        listed = schema.get(keyword)
        bearing = sum(map(_brings_members, listed)) if isinstance(listed, list) else 0
        parts += bearing if keyword == "allOf" else min(bearing, 1)  # of alternatives one counts
    parts += sum(_brings_members(schema.get(keyword)) for keyword in _CONDITIONAL_PARTS)
    parts += 2 * int(isinstance(schema.get("dependentSchemas"), dict))
    return parts > 1


def _brings_members(schema: Any) -> bool:
    """Return whether a part may define members; a list of required names alone defines none."""
    if not isinstance(schema, dict):
        return False
    return "$ref" in schema or any(name in schema for name in (*_MEMBERS, *_LISTED_PARTS, *_CONDITIONAL_PARTS))


def _shared_parts(schema: Mapping[str, Any]) -> frozenset[str]:
    """Collect the places of definitions that are one part of several somewhere: these stay open."""
    shared: set[str] = set()
    by_place: dict[str, Any] = {}
    waiting: list[tuple[str, Any, bool]] = [("#", schema, False)]
    while waiting:
        place, one, is_joint_part = waiting.pop()
        if not isinstance(one, dict):
            continue
        by_place[place] = one
        is_joint = _is_joint(one) or is_joint_part
        reference = one.get("$ref")
        if is_joint and isinstance(reference, str):
            shared.add(reference)
        waiting += ((_pointer(place, path), inner, is_joint and _is_part(path[0])) for path, inner in subschemas(one))
    # A definition may itself be nothing but a reference to, or a choice between, others.
    pending = list(shared)
    while pending:
        target = by_place.get(pending.pop())
        for one in _parts_of(target):
            reference = one.get("$ref") if isinstance(one, dict) else None
            if isinstance(reference, str) and reference not in shared:
                shared.add(reference)
                pending.append(reference)
    return frozenset(shared)


def _parts_of(schema: Any) -> list[Any]:
    """Return a schema with all the parts that describe the same value."""
    found, waiting = [], [schema]
    while waiting:
        one = waiting.pop()
        found.append(one)
        if isinstance(one, dict):
            waiting += (inner for path, inner in subschemas(one) if _is_part(path[0]))
    return found


def _pointer(place: str, path: tuple[str | int, ...]) -> str:
    return "/".join([place, *(str(one).replace("~", "~0").replace("/", "~1") for one in path)])
