"""JSON schemas that no grammar can be made of, found before an engine tries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

from dynamo.errors import HttpError

__all__ = ["admits_only_empty_object", "reject_nonprogressing_guided_json_ref_cycles"]

# Below these members a schema describes another value or an alternative.
_SUBSCHEMAS: Final = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_SUBSCHEMA_LISTS: Final = ("prefixItems", "items", "anyOf", "oneOf", "allOf")
_SUBSCHEMA_MAPS: Final = ("properties", "patternProperties", "dependentSchemas")


def admits_only_empty_object(schema: Any) -> bool:
    """Return whether a schema has the form of an object that may have no members."""
    return (
        isinstance(schema, dict)
        and schema.get("type") == "object"
        and schema.get("additionalProperties") is False
        and not schema.get("properties")
        and not schema.get("patternProperties")
    )


def reject_nonprogressing_guided_json_ref_cycles(schema: Any) -> None:
    """Raise HttpError (400) for a schema with local references that lead back to themselves without a value in between.

    `schema` may be JSON text. What is not an object passes, and so do references to other documents and to nothing.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            return
    if not isinstance(schema, dict):
        return
    _Search(schema).run()


class _Search:
    """Visits every schema that the root reaches, once, without recursion."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._checked: set[int] = set()  # by identity: the nodes whose chain of references ends

    def run(self) -> None:
        """Check the chain of references at every reachable node."""
        waiting, seen = [self._root], {id(self._root)}
        while waiting:
            node = waiting.pop()
            self._check_chain(node)
            for child in (*_children(node), *self._targets(node)):
                if id(child) not in seen:
                    seen.add(id(child))
                    waiting.append(child)

    def _check_chain(self, start: dict[str, Any]) -> None:
        """Walk the edges that describe the same value (`$ref`, `allOf`), depth first."""
        on_path = {id(start)}
        path = [(start, iter(self._targets(start)))]
        while path:
            node, targets = path[-1]
            target = next(targets, None)
            if target is None:
                path.pop()
                on_path.discard(id(node))
                self._checked.add(id(node))
            elif id(target) in on_path:
                raise HttpError(400, "Invalid guided_json schema: non-progressing local $ref cycle detected")
            elif id(target) not in self._checked:
                on_path.add(id(target))
                path.append((target, iter(self._targets(target))))

    def _targets(self, node: dict[str, Any]) -> list[dict[str, Any]]:
        found = [part for part in _list(node.get("allOf")) if isinstance(part, dict)]
        reference = node.get("$ref")
        if isinstance(reference, str) and (target := self._resolve(reference)) is not None:
            found.append(target)
        return found

    def _resolve(self, reference: str) -> dict[str, Any] | None:
        if not reference.startswith("#"):
            return None
        found: Any = self._root
        for part in unquote(reference[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(key)
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                return None
        return found if isinstance(found, dict) else None


def _children(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    candidates = [node.get(name) for name in _SUBSCHEMAS]
    for name in _SUBSCHEMA_LISTS:
        candidates += _list(node.get(name))
    for name in _SUBSCHEMA_MAPS:
        members = node.get(name)
        candidates += list(members.values()) if isinstance(members, dict) else []
    yield from (child for child in candidates if isinstance(child, dict))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
