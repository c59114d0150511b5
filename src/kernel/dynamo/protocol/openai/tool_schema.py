"""A forced tool choice as a JSON schema: what the engine is guided to write when a call must come.

`tool_choice: "required"` is an array of calls, a named function is its arguments alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dynamo.protocol.openai.shapes import REQUIRED, ChatRequest, JsonObject

_DEFINITIONS: Final = ("$defs", "definitions")  # the second is the older draft's name
_ANYTHING: Final[JsonObject] = {"type": "object", "properties": {}}


def forced_schema(request: ChatRequest) -> JsonObject | None:
    """Return the schema of the whole answer, or None when no call must come. The tools have been validated."""
    choice = request.forced_choice
    tools = request.tools or []
    if choice is None:
        return None
    if choice == REQUIRED:
        return required_schema(tools, only_one=request.parallel_tool_calls is False)
    return next((parameters_of(tool) for tool in tools if tool["function"]["name"] == choice), _ANYTHING)


def parameters_of(tool: Mapping[str, Any]) -> JsonObject:
    """Return the schema of a tool's arguments; a tool without one takes any object."""
    parameters: JsonObject | None = tool["function"].get("parameters")
    return _ANYTHING if parameters is None else parameters


def call_or_shape(shape: JsonObject, tools: Sequence[Mapping[str, Any]], *, only_one: bool = False) -> JsonObject:
    """Return the schema of an answer that is either of this shape, or an array of calls as `required_schema` has it."""
    hoisted: dict[str, JsonObject] = {}
    alternatives = [
        _hoist(shape, hoisted, "response_format", "#/anyOf/0"),
        _calls_of(tools, hoisted, "#/anyOf/1", only_one=only_one),
    ]
    return {"anyOf": alternatives, **hoisted}


def required_schema(tools: Sequence[Mapping[str, Any]], *, only_one: bool = False) -> JsonObject:
    """Return an array of calls, at least one. Definitions move to the root, because references count from there."""
    hoisted: dict[str, JsonObject] = {}
    return {**_calls_of(tools, hoisted, "#", only_one=only_one), **hoisted}


def _calls_of(
    tools: Sequence[Mapping[str, Any]], hoisted: dict[str, JsonObject], root: str, *, only_one: bool
) -> JsonObject:
    alternatives = []
    for position, tool in enumerate(tools):
        name = tool["function"]["name"]
        place = f"{root}/items/anyOf/{position}/properties/parameters"
        alternatives.append(
            {
                "properties": {
                    "name": {"type": "string", "enum": [name]},
                    "parameters": _hoist(parameters_of(tool), hoisted, name, place),
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: JsonObject = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": alternatives}}
    if only_one:
        schema["maxItems"] = 1
    return schema


def _hoist(parameters: JsonObject, hoisted: dict[str, JsonObject], tool: str, root: str) -> JsonObject:
    """Return `parameters` without its definitions, which move to `hoisted`; references point to the new places."""
    moves: dict[str, str] = {"#": root}
    kept: list[tuple[str, str, Any]] = []
    for group in _DEFINITIONS:
        definitions = parameters.get(group)
        if not isinstance(definitions, dict):
            continue
        target = hoisted.setdefault(group, {})
        for name, schema in definitions.items():
            # Two tools may mean different things by one name.
            new = name if name not in target or target[name] == schema else _free_name(f"{tool}.{name}", target)
            target[new] = schema  # taken; rewritten below, once every move is known
            moves[f"#/{group}/{_pointer(name)}"] = f"#/{group}/{_pointer(new)}"
            kept.append((group, new, schema))
    for group, name, schema in kept:
        hoisted[group][name] = _moved(schema, moves)
    body = {key: value for key, value in parameters.items() if key not in _DEFINITIONS}
    moved: JsonObject = _moved(body, moves)
    return moved


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    while name in taken:
        name += "_"
    return name


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _moved(schema: Any, moves: Mapping[str, str]) -> Any:
    """Return a copy in which every local reference points to the new place of its target."""
    if isinstance(schema, list):
        return [_moved(item, moves) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: _moved(value, moves) for key, value in schema.items()}
    reference = copy.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = _moved_reference(reference, moves)
    return copy


def _moved_reference(reference: str, moves: Mapping[str, str]) -> str:
    for old, new in moves.items():
        if old != "#" and (reference == old or reference.startswith(old + "/")):
            return new + reference[len(old) :]
    if reference == "#" or reference.startswith("#/"):
        return moves["#"] + reference[1:]
    return reference  # an anchor: it names its place itself
