"""Tools of a Messages request as those of a chat.

A tool of the client has a schema. Some that Anthropic defines are run by the client too (bash, text editor, memory,
computer): the model gets them as functions with their published parameters. Those that Anthropic's servers run (web search
and the like) run nowhere here: they are refused, or left out where the frontend ignores what it does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from dynamo.protocol.messages.shapes import ToolChoice, invalid, read_as
from dynamo.protocol.openai.shapes import ChosenFunction, JsonObject, NamedToolChoice
from dynamo.protocol.openai.validation import LET_PASS

_NEEDLESS: Final = "tool_search_tool"  # it finds tools whose loading is deferred, and all of those are offered at once


class ClientTool(Struct):
    name: str
    input_schema: JsonObject | None = None
    description: str | None = None
    type: str | None = None  # "custom"
    strict: bool | None = None
    defer_loading: bool | None = None  # its schema may come later; the model gets the tool all the same
    eager_input_streaming: bool | None = None  # its input is streamed as it is written, before it is known to be whole


class DefinedTool(Struct):
    type: str
    name: str | None = None


class Toolset(Struct, frozen=True):
    """What the model is offered."""

    tools: Sequence[JsonObject]  # as chat has them
    eager: frozenset[str]  # the names of those whose input is streamed as it is written
    left_out: frozenset[str]  # the names, or types, of those that are run elsewhere


def read_tools(given: Sequence[JsonObject], *, leaves_out: bool = True) -> Toolset:
    """Return what the model is offered. `leaves_out`: a tool that Anthropic's servers run is left out, not refused.

    Raises RequestRejected (400) that names the tool.
    """
    tools: list[JsonObject] = []
    eager: set[str] = set()
    left_out: set[str] = set()
    for number, entry in enumerate(given):
        where = f"tools[{number}]"
        kind = entry.get("type")
        if kind is not None and kind != "custom":
            defined = read_as(DefinedTool, entry, where)
            found = _client_run(defined)
            if found is None and not (leaves_out or kind.startswith(_NEEDLESS)):
                invalid(f"{where}.type", f"`{kind[:64]}` is not served: nothing here runs it{LET_PASS}")
            if found is None:
                left_out |= {defined.name or kind, kind}
            else:
                tools.append(found)
            continue
        tool = read_as(ClientTool, entry, where)
        if tool.input_schema is None and not tool.defer_loading:
            invalid(f"{where}.input_schema", "field required for client tools")
        schema: JsonObject = {"type": "object"} if tool.input_schema is None else tool.input_schema
        function: JsonObject = {"name": tool.name, "description": tool.description, "parameters": schema}
        if tool.description is None:
            del function["description"]
        if tool.strict is not None:
            function["strict"] = tool.strict
        tools.append({"type": "function", "function": function})
        if tool.eager_input_streaming:
            eager.add(tool.name)
    return Toolset(tools, frozenset(eager), frozenset(left_out))


def chat_tool_choice(choice: ToolChoice | None, toolset: Toolset) -> Any:
    """Return chat's `tool_choice`: a word, a function, or None for the default. Raises RequestRejected (400)."""
    if choice is None or choice.type == "auto":
        return None
    if choice.type == "none":
        return "none"
    name = choice.name if choice.type == "tool" else None
    if name in toolset.left_out or (not toolset.tools and toolset.left_out):
        return None  # what was to be called is not here
    if not toolset.tools:
        invalid("tool_choice", f'"{choice.type}" needs tools')
    if name is None:
        return "required"
    if all(tool["function"]["name"] != name for tool in toolset.tools):
        invalid("tool_choice.name", f'tool "{name[:128]}" is not among the tools')
    return NamedToolChoice(ChosenFunction(name))


def _client_run(tool: DefinedTool) -> JsonObject | None:
    for prefix, (name, description, parameters) in _CLIENT_RUN.items():
        if tool.type.startswith(prefix):
            function = {"name": tool.name or name, "description": description, "parameters": parameters}
            return {"type": "function", "function": function}
    return None


def _schema(required: Sequence[str], **properties: JsonObject) -> JsonObject:
    return {"type": "object", "properties": properties, "required": list(required)}


_TEXT: Final[JsonObject] = {"type": "string"}
_INTEGER: Final[JsonObject] = {"type": "integer"}
_PAIR: Final[JsonObject] = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}


def _one_of(*words: str) -> JsonObject:
    return {"type": "string", "enum": list(words)}


# Published by Anthropic with each of these tools; the client runs them.
_CLIENT_RUN: Final[dict[str, tuple[str, str, JsonObject]]] = {
    "bash_": (
        "bash",
        "Run a command in a shell that stays open between calls; `restart` starts it afresh.",
        _schema((), command=_TEXT, restart={"type": "boolean"}),
    ),
    "text_editor_": (
        "str_replace_based_edit_tool",
        "View, create and edit text files.",
        _schema(
            ("command", "path"),
            command=_one_of("view", "create", "str_replace", "insert", "undo_edit"),
            path=_TEXT,
            file_text=_TEXT,
            old_str=_TEXT,
            new_str=_TEXT,
            insert_line=_INTEGER,
            insert_text=_TEXT,
            view_range=_PAIR,
        ),
    ),
    "memory_": (
        "memory",
        "Read and write files that are kept between conversations.",
        _schema(
            ("command",),
            command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            path=_TEXT,
            file_text=_TEXT,
            old_str=_TEXT,
            new_str=_TEXT,
            insert_line=_INTEGER,
            insert_text=_TEXT,
            old_path=_TEXT,
            new_path=_TEXT,
            view_range=_PAIR,
        ),
    ),
    "computer_": (
        "computer",
        "Use a computer's mouse, keyboard and screen.",
        _schema(
            ("action",),
            action=_TEXT,
            coordinate=_PAIR,
            start_coordinate=_PAIR,
            text=_TEXT,
            scroll_direction=_one_of("up", "down", "left", "right"),
            scroll_amount=_INTEGER,
            duration={"type": "number"},
        ),
    ),
}
