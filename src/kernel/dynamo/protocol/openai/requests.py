"""From an HTTP body to a request that may be served, and onward to the worker and the template.

`parse_*` = `decode_*` (is it JSON of the right shape?) then `validate_*` (does it keep the rules?). A frontend calls the
two halves itself where its own checks, service and model ready, stand between them.
"""

from __future__ import annotations

import copy
import json
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET

from dynamo.protocol.openai.body import DEFAULT_LIMITS, BodyLimits, check_messages, deserialisation_error
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.reader import RequestReader
from dynamo.protocol.openai.shapes import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    JsonObject,
    NamedToolChoice,
    NvExt,
    Request,
)
from dynamo.protocol.openai.validation import validate_chat, validate_completion
from dynamo.protocol.openai.worker_fields import input_trigger, to_worker_fields

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "NvExt",
    "Request",
    "decode_chat",
    "decode_completion",
    "fresh_copy",
    "input_trigger",
    "parse_chat",
    "parse_completion",
    "raw_prompt",
    "template_messages",
    "template_tools",
    "to_worker_fields",
    "validate_chat",
    "validate_completion",
]

# `tool_choice` as an object: one function, or those of the tools that may be called.


def narrow_tools(request: ChatRequest, choice: NamedToolChoice) -> None:
    """Leave only the tools that `allowed_tools` names, and the choice among them; a named function stays as it is.

    Raises:
        RequestRejected: 400, the object has not the member of its type, or names a tool that is not there.
    """
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


R = TypeVar("R", bound=CommonRequest)


class _AnyChat(ChatRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


class _AnyCompletion(CompletionRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


_CHAT: Final = RequestReader(ChatRequest, _AnyChat)
_COMPLETION: Final = RequestReader(CompletionRequest, _AnyCompletion)


def decode_chat(body: bytes, *, ignore_unsupported: bool = False, limits: BodyLimits = DEFAULT_LIMITS) -> ChatRequest:
    """Decode the typed request, not yet validated; unknown top-level keys are listed in `.unsupported`.

    Raises:
        RequestRejected: 400, the body is not JSON of the right shape.
    """
    request: ChatRequest = _CHAT.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
    if len(request.messages) > limits.messages:
        check_messages(request.messages, limits.messages)
    if request.tool_choice is not None and isinstance(request.tool_choice, NamedToolChoice):
        narrow_tools(request, request.tool_choice)
    return request


def decode_completion(
    body: bytes, *, ignore_unsupported: bool = False, limits: BodyLimits = DEFAULT_LIMITS
) -> CompletionRequest:
    """Decode and validate a text completion request, as `decode_chat` does for chats."""
    request: CompletionRequest = _COMPLETION.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
    return request


def parse_chat(body: bytes, *, ignore_unsupported: bool = False) -> ChatRequest:
    """Decode and validate a chat request.

    Raises:
        RequestRejected: 400 naming the field, or 422 for what is deprecated or not built.
    """
    request = decode_chat(body, ignore_unsupported=ignore_unsupported)
    validate_chat(request)
    return request


def parse_completion(body: bytes, *, ignore_unsupported: bool = False) -> CompletionRequest:
    """Decode and validate a text completion request.

    Raises:
        RequestRejected: 400 naming the field.
    """
    request = decode_completion(body, ignore_unsupported=ignore_unsupported)
    validate_completion(request)
    return request


# -- for the template ---------------------------------------------------------------------------------------------------


def template_tools(request: ChatRequest, *, exclude_when_none: bool = True) -> list[JsonObject] | None:
    """Return the tools to render; no tools when `tool_choice` is "none" and `exclude_when_none`."""
    if not request.tools or (exclude_when_none and request.tool_choice == "none"):
        return None
    return request.tools


def template_messages(
    request: ChatRequest, *, as_objects: bool = False, takes_raw_text: bool = True
) -> list[JsonObject]:
    """Return the messages to render, the arguments of earlier calls in one form, however the client wrote them.

    That form is an object or its JSON text. Empty arguments are those of a call without any. Arguments that are not
    an object, as of a call that was cut off, are rendered as they were sent; a template that cannot (not
    `takes_raw_text`) gets an empty object.
    """
    if not any(message.get("tool_calls") for message in request.messages):
        return request.messages
    return [_with_arguments(message, as_objects, takes_raw_text) for message in request.messages]


def _with_arguments(message: JsonObject, as_objects: bool, takes_raw_text: bool) -> JsonObject:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = _rendered_arguments(function.get("arguments"), as_objects, takes_raw_text)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _rendered_arguments(arguments: Any, as_objects: bool, takes_raw_text: bool) -> JsonObject | str:
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        return {} if as_objects else "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)  # as models write it
    value = _object_of(text) if isinstance(arguments, str) else arguments
    if isinstance(value, dict):
        return value if as_objects else text
    if takes_raw_text:
        return text
    return {} if as_objects else "{}"


def _object_of(text: str) -> Any:
    """Return the value of a JSON text; None for a text that is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def raw_prompt(request: ChatRequest) -> str | None:
    """Return the text to use instead of a rendered template when `nvext.use_raw_prompt` is set: the messages' texts, one a line."""
    if request.nvext is None or request.nvext.use_raw_prompt is not True:
        return None
    return "\n".join(text for message in request.messages for text in _texts(message.get("content")))


def _texts(content: Any) -> list[str]:
    """Return the texts of a text content; none for a content that holds anything else."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return [part["text"] for part in content]
    return []


def fresh_copy(request: Request, model: str | None = None) -> Request:
    """Return a request to plan anew, for `model` where given: what is planned for one model writes its tokens into a request."""
    found = copy.copy(request)
    vars(found).update(vars(request))  # what decoding found, which the copy of a struct has not
    found.model = model or request.model
    return found
