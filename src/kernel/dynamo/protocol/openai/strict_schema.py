"""Strict schemas: every object is closed, and every property required. A client that sets `strict` relies on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE_SCHEMAS: Final = (
    *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedProperties", "unevaluatedItems", "additionalItems", "contentSchema"),
)


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Walk the schemas right below one, each with its place. Values that only resemble schemas are passed over."""
    for group in _SCHEMAS_BY_NAME:
        if isinstance(named := schema.get(group), dict):
            yield from (((group, name), inner) for name, inner in named.items())
    for group in _LISTS_OF_SCHEMAS:
        if isinstance(listed := schema.get(group), list):
            yield from (((group, position), inner) for position, inner in enumerate(listed))
    for name in _SINGLE_SCHEMAS:
        if name not in schema:
            continue
        if isinstance(inner := schema[name], list):  # `items` of older drafts
            yield from (((name, position), one) for position, one in enumerate(inner))
        else:
            yield (name,), inner


def strictness_fault(schema: Mapping[str, Any]) -> str | None:
    """Return what is not strict about a schema and where; None for a strict one."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        where, one = waiting.pop()
        if not isinstance(one, dict):
            continue
        place = f" at `{where}`" if where else ""
        properties = one.get("properties")
        if isinstance(properties, dict) or one.get("type") == "object":
            if one.get("additionalProperties") is not False:
                return f"`additionalProperties` must be false{place}"
            required = one.get("required")
            missing = [name for name in properties or () if not isinstance(required, list) or name not in required]
            if missing:
                return f"`required` must name every property, and lacks `{missing[0][:64]}`{place}"
        inner = [(".".join([*([where] if where else []), *map(str, path)]), value) for path, value in subschemas(one)]
        waiting += reversed(inner)
    return None
