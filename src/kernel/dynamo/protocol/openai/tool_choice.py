"""`tool_choice` as an object: one function, or those of the tools that may be called."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from dynamo.protocol.openai.body import deserialisation_error
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.shapes import ChatRequest, NamedToolChoice


def narrow_tools(request: ChatRequest) -> None:
    """Leave only the tools that `allowed_tools` names, and the choice among them; a named function stays as it is.

    Raises:
        RequestRejected: 400, the object has not the member of its type, or names a tool that is not there.
    """
    choice = request.tool_choice
    if not isinstance(choice, NamedToolChoice):
        return
    if choice.type == "function":
        if choice.function is UNSET:
            missing = "Object missing required field `function` - at `$.tool_choice`"
            raise deserialisation_error(msgspec.ValidationError(missing))
        return
    allowed = choice.allowed_tools
    if allowed is UNSET or not allowed.tools:
        raise _refused(
            "`tool_choice` of type allowed_tools needs `allowed_tools` with `tools`", "tool_choice.allowed_tools"
        )
    by_name: dict[str, dict[str, object]] = {}
    for tool in request.tools or ():
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            by_name[name] = tool
    names = {one.function.name for one in allowed.tools}
    for position, one in enumerate(allowed.tools):
        if one.function.name not in by_name:
            text = f'tool named "{one.function.name[:128]}" in tool_choice is not present in tools'
            raise _refused(text, f"tool_choice.allowed_tools.tools[{position}]")
    request.tools = [tool for name, tool in by_name.items() if name in names]
    request.tool_choice = allowed.mode


def _refused(message: str, param: str) -> RequestRejected:
    return RequestRejected(400, f"Validation: {message}", param=param)
