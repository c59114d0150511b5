"""The tools that an answer may call, and what their schemas accept where a format carries values as plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from dynamo.protocol.openai.shapes import JsonMapping, JsonObject
from dynamo.text.formats.json_reader import JsonReader

_INTEGER: Final = re.compile(r"-?[0-9]{1,1000}")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,999})(?:\.[0-9]{1,999})?(?:[eE][+-]?[0-9]{1,9})?")
_MAX_REFERENCES: Final = 32  # that one schema follows; beyond that it accepts anything
_BRANCHES: Final = ("allOf", "anyOf", "oneOf")


class Kinds(NamedTuple):
    """What values a schema accepts."""

    types: frozenset[str] | None  # names of JSON Schema; None: anything
    values: tuple[Any, ...] = ()  # of `enum` and `const`

    @property
    def is_text(self) -> bool:
        """Whether only strings are accepted."""
        return self.types is not None and self.types == {"string"}


ANYTHING: Final = Kinds(None)


class ToolSet:
    """The tools of one request."""

    __slots__ = ("_kinds", "_schemas", "names")

    def __init__(self, tools: Sequence[JsonMapping] = ()) -> None:
        self._schemas: JsonObject = {}
        for tool in tools:
            function = tool.get("function") or {}
            if isinstance(name := function.get("name"), str):
                self._schemas[name] = function.get("parameters")
        self.names: frozenset[str] = frozenset(self._schemas)
        self._kinds: dict[tuple[str, str], Kinds] = {}

    def resolve(self, name: str) -> str:
        """Return the tool that a call of `name` means: the name itself, unless a namespace in front of it is not known."""
        if name in self._schemas or "." not in name:
            return name
        bare = name.removeprefix("functions.")
        if bare in self._schemas:
            return bare
        first, _, rest = bare.partition(".")
        return rest if first == rest and rest in self._schemas else name

    def parameters(self, name: str) -> list[str]:
        """Return the names of a tool's parameters, in order."""
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return list(properties) if isinstance(properties, dict) else []

    def kinds(self, name: str, *path: str) -> Kinds:
        """Return what the value at `path` in the arguments of a tool may be. "[]" in a path is an element of an array."""
        key = (name, "\0".join(path))
        if key not in self._kinds:
            root = self._schemas.get(name)
            schemas = [root]
            for step in path:
                schemas = [found for schema in schemas for found in _members(schema, root, step)]
            found = [_kinds(schema, root, _MAX_REFERENCES) for schema in schemas]
            self._kinds[key] = _union(found) if found else ANYTHING
        return self._kinds[key]


NO_TOOLS: Final = ToolSet()


def json_string(text: str) -> str:
    """Return `text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def typed(text: str, kinds: Kinds, *, reads_json: bool) -> str:
    """Return the JSON that `text` is as a value of these kinds; a string where nothing else fits.

    `reads_json`: where the schema accepts anything, text that is JSON is that value.
    """
    if kinds.is_text:
        return json_string(text)
    stripped = text.strip()
    if kinds.types is None and not kinds.values:
        found = _json(stripped) if reads_json else None
        return json_string(text) if found is None else found
    for value in kinds.values:
        if value == text and isinstance(value, str):
            return json_string(text)
    for value in kinds.values:
        if json.dumps(value) == stripped:
            return stripped
    return _fitting(stripped, kinds.types or frozenset()) or json_string(text)


def _fitting(text: str, types: frozenset[str]) -> str | None:
    lower = text.lower()
    if "null" in types and (lower == "null" or (lower in ("none", "nil") and "string" not in types)):
        return "null"
    if "boolean" in types and lower in ("true", "false"):
        return lower
    if types & {"integer", "number"} and _INTEGER.fullmatch(text):
        sign, digits = ("-", text[1:]) if text[0] == "-" else ("", text)
        return sign + (digits.lstrip("0") or "0")
    if "number" in types and _NUMBER.fullmatch(text) and abs(float(text)) != float("inf"):
        return text
    if (text[:1] == "{" and "object" in types) or (text[:1] == "[" and "array" in types):
        return _json(text)
    return None


def _json(text: str) -> str | None:
    """Return the JSON of text that is one value and nothing else."""
    reader = JsonReader()
    end, read = reader.read(text)
    read += reader.finish()
    return read if reader.is_complete and end == len(text) else None


def _kinds(schema: Any, root: Any, left: int) -> Kinds:
    schema = _resolved(schema, root, left)
    if not isinstance(schema, dict) or left <= 0:
        return ANYTHING
    found: list[Kinds] = []
    declared = schema.get("type")
    if isinstance(declared, str):
        found.append(Kinds(frozenset([declared])))
    elif isinstance(declared, list):
        found.append(Kinds(frozenset(kind for kind in declared if isinstance(kind, str))))
    values = schema.get("enum") if isinstance(schema.get("enum"), list) else None
    if "const" in schema:
        values = [schema["const"]]
    if values is not None:
        found.append(Kinds(frozenset(map(_type_of, values)), tuple(values)))
    for word in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(word), list) and branches:
            accepted = [_kinds(branch, root, left - 8) for branch in branches]
            found += [_union(accepted)]
    if isinstance(parts := schema.get("allOf"), list):
        found += [_kinds(part, root, left - 8) for part in parts]
    if not found and ("properties" in schema or "items" in schema):
        return Kinds(frozenset(["object" if "properties" in schema else "array"]))
    types: frozenset[str] | None = None
    for one in found:
        if one.types is not None:
            both = one.types if types is None else _common(types, one.types)
            types = both
    return Kinds(types, next((one.values for one in found if one.values), ()))


def _common(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    both = first & second
    if "integer" in first | second and "number" in first | second:
        both |= {"integer"}
    return both or first


def _union(found: Sequence[Kinds]) -> Kinds:
    types: frozenset[str] = frozenset()
    for one in found:
        if one.types is None:
            return ANYTHING
        types |= one.types
    return Kinds(types, tuple(value for one in found for value in one.values))


def _members(schema: Any, root: Any, step: str) -> Iterator[Any]:
    """Yield the schemas of a member of `schema`; "[]" is an element."""
    waiting, left = [schema], _MAX_REFERENCES
    while waiting and left > 0:
        one, left = _resolved(waiting.pop(), root, _MAX_REFERENCES), left - 1
        if not isinstance(one, dict):
            continue
        if step == "[]":
            if "items" in one:
                yield one["items"]
        else:
            properties, others = one.get("properties"), one.get("additionalProperties")
            if isinstance(properties, dict) and step in properties:
                yield properties[step]
            elif isinstance(others, dict):
                yield others
        for word in _BRANCHES:
            if isinstance(branches := one.get(word), list):
                waiting += branches


def _resolved(schema: Any, root: Any, left: int) -> Any:
    """Follow local references; None where they lead nowhere or in a circle."""
    while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
        if left <= 0 or not reference.startswith("#"):
            return None
        left -= 1
        target: Any = root
        for part in reference[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, dict) else None
        schema = target
    return schema


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "object")
