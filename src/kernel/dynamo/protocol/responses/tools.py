"""Tools of a Responses request as functions of a chat request, and the way back from a call's name.

| type | what the model is offered |
|---|---|
| function | itself; the nested form of chat requests is accepted, too |
| custom | a function with the one string `input`; a grammar is written in its description |
| namespace | its functions by their own names, or as `namespace__name` where two tools have the same name |
| anything else | nothing: it runs elsewhere, and a request without it can be answered |
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.shapes import ChosenFunction, JsonObject, NamedToolChoice

CUSTOM_INPUT: Final = "input"
"""The one argument of the function that stands for a custom tool."""

MAX_TOOLS: Final = 1536
_CHOICE_WORDS: Final = ("auto", "none", "required")
_CUSTOM_PARAMETERS: Final[JsonObject] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


class OfferedTool(Struct, frozen=True):
    """A tool as its client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class OfferedTools(Struct, frozen=True):
    """What a request offers the model."""

    functions: Sequence[JsonObject]  # as a chat request has them
    by_name: Mapping[str, OfferedTool]  # the name that the model sees -> the tool
    choice: Literal["none", "auto", "required"] | NamedToolChoice | None
    left_out: frozenset[str] = frozenset()  # the types of tools that were not offered

    def called(self, name: str) -> OfferedTool:
        """Return the tool that the model called; one that it made up is a function of that name."""
        return self.by_name.get(name) or OfferedTool(name)

    def shown_name(self, name: str, namespace: str | None) -> str:
        """Return the name by which the model knows a tool of an earlier turn."""
        if namespace is not None:
            joined = f"{namespace}__{name}"
            if joined in self.by_name:
                return joined
        return name


class _Found(Struct):
    tool: OfferedTool
    function: JsonObject
    path: str


def offer_tools(tools: Sequence[JsonObject] | None, choice: str | JsonObject | None) -> OfferedTools:
    """Translate the tools and the choice among them.

    Raises:
        RequestRejected: 400 naming the member.
    """
    found: list[_Found] = []
    left_out: set[str] = set()
    for position, tool in enumerate(tools or ()):
        found += _read_tool(tool, f"tools[{position}]", left_out)
    if len(found) > MAX_TOOLS:
        raise _refused(f"Maximum of {MAX_TOOLS} tools are supported, got {len(found)}", "tools")
    names = Counter(one.tool.name for one in found)
    by_name: dict[str, OfferedTool] = {}
    functions: dict[str, JsonObject] = {}
    for one in found:
        name = one.tool.name
        if names[name] > 1 and one.tool.namespace is not None:
            name = f"{one.tool.namespace}__{name}"
        if name in by_name:
            raise _refused(f"two tools have the name '{name[:128]}'", f"{one.path}.name")
        by_name[name] = one.tool
        functions[name] = {"type": "function", "function": {**one.function, "name": name}}
    said, allowed = _read_choice(choice, by_name)
    if allowed is not None:
        functions = {name: function for name, function in functions.items() if name in allowed}
    if not functions and tools:
        said = None  # every tool was left out: it is a request without tools, whatever was to be chosen
    return OfferedTools(list(functions.values()), by_name, said, frozenset(left_out))


def _read_tool(tool: JsonObject, path: str, left_out: set[str], namespace: str | None = None) -> Iterator[_Found]:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise _refused("a tool needs a `type`", f"{path}.type")
    if kind == "function":
        nested = tool.get("function")
        given, where = (nested, f"{path}.function") if isinstance(nested, dict) else (tool, path)
        name = _name_of(given, where)
        function = {key: given[key] for key in ("description", "parameters", "strict") if given.get(key) is not None}
        _check_text(function, "description", where)
        if not isinstance(function.get("parameters", {}), dict):
            raise _refused(f"Parameters of function '{name[:128]}' must be a JSON object", f"{where}.parameters")
        if not isinstance(function.get("strict", False), bool):
            raise _refused("`strict` must be true or false", f"{where}.strict")
        yield _Found(OfferedTool(name, namespace), function, where)
    elif kind == "custom":
        name = _name_of(tool, path)
        _check_text(tool, "description", path)
        function = {"description": _custom_description(tool, path), "parameters": _CUSTOM_PARAMETERS}
        yield _Found(OfferedTool(name, namespace, is_custom=True), function, path)
    elif kind == "namespace" and namespace is None:
        inner, name = tool.get("tools"), _name_of(tool, path)
        if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
            raise _refused("a namespace needs `tools`, a list of objects", f"{path}.tools")
        for position, one in enumerate(inner):
            yield from _read_tool(one, f"{path}.tools[{position}]", left_out, name)
    else:
        left_out.add(kind[:64])


def _name_of(tool: Mapping[str, Any], path: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name.strip():
        raise _refused("Function name cannot be empty", f"{path}.name")
    return name


def _check_text(tool: Mapping[str, Any], member: str, path: str) -> None:
    if not isinstance(tool.get(member) or "", str):
        raise _refused(f"`{member}` must be text", f"{path}.{member}")


def _custom_description(tool: JsonObject, path: str) -> str:
    parts = [tool.get("description") or f"The tool {tool['name']}."]
    form = tool.get("format")
    if form is not None and not isinstance(form, dict):
        raise _refused("`format` must be an object", f"{path}.format")
    if form and form.get("type") == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if not isinstance(definition, str):
            raise _refused("a grammar needs a `definition`", f"{path}.format.definition")
        parts.append(f"The input must match this grammar ({syntax or 'lark'}):\n{definition}")
    return "\n\n".join(parts)


def _read_choice(
    choice: str | JsonObject | None, by_name: Mapping[str, OfferedTool]
) -> tuple[Literal["none", "auto", "required"] | NamedToolChoice | None, frozenset[str] | None]:
    """Return the choice of a chat request, and the names of the tools it leaves; None: all of them."""
    if choice is None:
        return None, None
    if isinstance(choice, str):
        return _word(choice, "tool_choice"), None
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return NamedToolChoice(ChosenFunction(_chosen_name(choice, by_name, "tool_choice"))), None
    if kind == "allowed_tools":
        # The nested form is that of chat requests.
        given = choice.get("allowed_tools")
        given, path = (given, "tool_choice.allowed_tools") if isinstance(given, dict) else (choice, "tool_choice")
        listed = given.get("tools")
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise _refused("allowed_tools needs `tools`, a list of objects", f"{path}.tools")
        allowed = frozenset(
            _chosen_name(one, by_name, f"{path}.tools[{position}]")
            for position, one in enumerate(listed)
            if one.get("type") in ("function", "custom")
        )
        return _word(given.get("mode", "auto"), f"{path}.mode"), allowed
    if not isinstance(kind, str):
        raise _refused("`tool_choice` needs a `type`", "tool_choice.type")
    return "auto", None  # a tool that is not offered here


def _word(word: Any, path: str) -> Literal["none", "auto", "required"]:
    if word not in _CHOICE_WORDS:
        raise _refused(f"`{path}` must be one of {', '.join(_CHOICE_WORDS)}, or an object", path)
    found: Literal["none", "auto", "required"] = word
    return found


def _chosen_name(choice: Mapping[str, Any], by_name: Mapping[str, OfferedTool], path: str) -> str:
    nested = choice.get("function")
    given = nested if isinstance(nested, dict) else choice
    name, namespace = given.get("name"), given.get("namespace")
    if isinstance(name, str):
        for shown, tool in by_name.items():
            if name == shown or (name == tool.name and namespace in (None, tool.namespace)):
                return shown
    raise _refused(f'tool named "{str(name)[:128]}" in tool_choice is not present in tools', path)


def echoed_tools(tools: Sequence[JsonObject] | None) -> list[JsonObject]:
    """Return the tools as the response shows them: as they came, with the members that strict clients require."""
    return [_echoed(tool) for tool in tools or ()]


def _echoed(tool: JsonObject) -> JsonObject:
    if tool.get("type") != "function" or isinstance(tool.get("function"), dict):
        return tool
    strict = tool.get("strict")
    return {"description": None, "parameters": None, **tool, "strict": True if strict is None else strict}


def echoed_tool_choice(choice: str | JsonObject | None) -> str | JsonObject:
    """Return the choice as the response shows it."""
    if choice is None:
        return "auto"
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        return {"type": "function", "name": choice["function"].get("name")}
    return choice


def _refused(message: str, param: str) -> RequestRejected:
    return RequestRejected(400, f"Validation: {message}", param=param)


_BEGINNING: Final = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_PLAIN: Final = re.compile(r'[^"\\]+')
_HEXADECIMAL: Final = re.compile(r"[0-9a-fA-F]*")
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
_REPLACEMENT: Final = "\ufffd"  # of half a code point


class CustomInputReader:
    """Reads the input while the arguments are written. Its output does not depend on how they are cut.

    More is taken for an escape or a character of the text than JSON allows: models write line ends as they are.
    """

    __slots__ = ("_arguments", "_is_inside", "_is_over", "_raw", "_told")

    def __init__(self) -> None:
        self._arguments = ""  # until the input begins
        self._raw = ""  # of the input, not yet returned
        self._is_inside = self._is_over = False
        self._told: list[str] = []

    @property
    def text(self) -> str:
        """What was returned so far."""
        return "".join(self._told)

    def push(self, arguments: str) -> str:
        """Read the next piece of the arguments; return the next piece of the input."""
        if self._is_over:
            return ""
        if self._is_inside:
            self._raw += arguments
        else:
            self._arguments += arguments
            began = _BEGINNING.match(self._arguments)
            if began is None:
                return ""
            self._is_inside = True
            self._raw, self._arguments = self._arguments[began.end() :], ""
        return self._tell(self._read())

    def finish(self) -> str:
        """End the arguments; return the rest of the input."""
        return "" if self._is_inside else self._tell(_otherwise(self._arguments))

    def _tell(self, text: str) -> str:
        if text:
            self._told.append(text)
        return text

    def _read(self) -> str:
        """Return what is whole of the raw text, and keep the rest."""
        raw, at, found = self._raw, 0, []
        while at < len(raw):
            if (plain := _PLAIN.match(raw, at)) is not None:
                found.append(plain.group())
                at = plain.end()
            elif raw[at] == '"':
                self._is_over = True
                break
            else:
                text, length = _unescaped(raw[at : at + 12])
                if not length:
                    break
                found.append(text)
                at += length
        self._raw = raw[at:]
        return "".join(found)


def _unescaped(raw: str) -> tuple[str, int]:
    """Return the text of the escape at the beginning of `raw`, and its length; 0: more of it must come."""
    kind = raw[1:2]
    if kind != "u":
        return (_ESCAPED.get(kind, "\\" + kind), 2) if kind else ("", 0)
    digits = _hexadecimal(raw[2:6])
    if len(digits) < 4:
        return ("", 0) if 2 + len(digits) == len(raw) else ("\\u", 2)
    code = int(digits, 16)
    if not 0xD800 <= code < 0xE000:
        return chr(code), 6
    if code >= 0xDC00:
        return _REPLACEMENT, 6
    second = _hexadecimal(raw[8:12])
    if len(second) == 4 and raw[6:8] == "\\u" and 0xDC00 <= (low := int(second, 16)) < 0xE000:
        return chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00), 12
    may_follow = "\\u".startswith(raw[6:8]) and 8 + len(second) >= len(raw) and len(second) < 4
    return ("", 0) if may_follow else (_REPLACEMENT, 6)


def _hexadecimal(text: str) -> str:
    found = _HEXADECIMAL.match(text)
    return "" if found is None else found.group()


def _otherwise(arguments: str) -> str:
    """Return the input where it is not the first member."""
    if f'{{"{CUSTOM_INPUT}":"'.startswith("".join(arguments.split())):
        return ""  # cut off before it began
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    if isinstance(value, dict):
        if isinstance(found := value.get(CUSTOM_INPUT), str):
            return found
        if len(value) == 1 and isinstance(only := next(iter(value.values())), str):
            return only
    return value if isinstance(value, str) else arguments
