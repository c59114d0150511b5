"""The items of a conversation as messages of a chat request.

One turn of the assistant is all that stands between two items of another role: its reasoning, its texts and its calls are
one message. The system messages at the beginning are one message. No item is refused for its type: items of tools that run
elsewhere are left out.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from dynamo.protocol.openai.body import deserialisation_error
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.openai.media_parts import PlacedPart
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.protocol.responses.tools import CUSTOM_INPUT, OfferedTools

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=Struct)

UNSEEN_IMAGE: Final = "[an image, which this model cannot see]"
"""Stands for an image in the output of a tool: the agent goes on, and the model can report what it lacks."""

_PACKED: Final = "plain1."  # of reasoning that travels with the client; anything else is another server's


# -- what an item may hold ------------------------------------------------------------------------------------------------


class ItemMessage(Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[JsonObject] | None = None


class ItemFunctionCall(Struct):
    call_id: str
    name: str
    arguments: Any = ""  # histories hold what models wrote: also cut or empty texts
    namespace: str | None = None
    status: str | None = None


class ItemCustomCall(Struct):
    call_id: str
    name: str
    input: str = ""
    namespace: str | None = None


class ItemCallOutput(Struct):
    call_id: str
    output: str | list[JsonObject] | JsonObject | None = None


class ItemReasoning(Struct):
    summary: list[JsonObject] | None = None
    content: list[JsonObject] | None = None
    encrypted_content: str | None = None


class ItemAction(Struct):
    """A call of a tool that is no function: what it does is an object."""

    call_id: str | None = None
    id: str | None = None
    action: JsonObject | None = None
    operation: JsonObject | None = None


class ItemLocalShellOutput(Struct):
    output: str | list[JsonObject] | JsonObject | None = None
    call_id: str | None = None
    id: str | None = None


def pack_reasoning(text: str) -> str:
    """Return reasoning as `encrypted_content`. It is the client's own conversation: packed, not hidden."""
    return _PACKED + base64.b64encode(text.encode(errors="replace")).decode()


def unpack_reasoning(packed: str) -> str | None:
    """Return the reasoning of `encrypted_content`; None for another server's."""
    if not packed.startswith(_PACKED):
        return None
    try:
        return base64.b64decode(packed[len(_PACKED) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


# -- a conversation -----------------------------------------------------------------------------------------------------


class ChatConversation:
    """Gathers messages from items, in their order."""

    def __init__(self, tools: OfferedTools) -> None:
        self.messages: list[JsonObject] = []
        self.paths: list[str] = []  # of the item that each message came from, or that began it
        self._tools = tools
        self._turn: JsonObject | None = None  # of the assistant, while it goes on
        self._left_out: list[str] = []

    @property
    def left_out(self) -> list[str]:
        """The types of the items that became nothing."""
        return self._left_out

    def add_instructions(self, instructions: str | list[Any] | None) -> None:
        """Add what stands before all items."""
        if isinstance(instructions, str):
            if instructions:
                self._add_system(instructions, "instructions")
        elif instructions:
            self.add_items(instructions, "instructions")

    def add_input(self, given: str | list[Any] | None) -> None:
        """Add the input of a request."""
        if isinstance(given, str):
            self._add({"role": "user", "content": given}, "input")
        elif given:
            self.add_items(given, "input")

    def add_items(self, items: Iterable[Any], path: str) -> None:
        """Add items.

        Raises:
            RequestRejected: 400 naming the member of an item, or 422 for what no model here can read.
        """
        for position, item in enumerate(items):
            self._add_item(item, f"{path}[{position}]")

    def _add_item(self, item: Any, path: str) -> None:
        if not isinstance(item, dict):
            raise _refused("an item must be an object", path)
        kind = item.get("type", "message")
        add = _ADDERS.get(kind) if isinstance(kind, str) else None
        if add is None:
            self._left_out.append(str(kind)[:64])
            logger.debug("an item of type %r was left out of a conversation", str(kind)[:64])
            return
        add(self, item, path)

    def _add_message(self, item: JsonObject, path: str) -> None:
        message = _read(item, ItemMessage, path)
        content = _content(message.content, f"{path}.content", is_input=message.role == "user")
        match message.role:
            case "assistant":
                turn = self._assistant(path)
                text = _text_of(content)
                turn["content"] = text if turn["content"] is None else turn["content"] + text
            case "user":
                self._add({"role": "user", "content": content}, path)
            case _:
                self._add_system(_text_of(content), path)

    def _add_function_call(self, item: JsonObject, path: str) -> None:
        call = _read(item, ItemFunctionCall, path)
        arguments = _arguments(call)
        if arguments is not None:
            self._add_call(call.call_id, self._tools.shown_name(call.name, call.namespace), arguments, path)

    def _add_custom_call(self, item: JsonObject, path: str) -> None:
        call = _read(item, ItemCustomCall, path)
        name = self._tools.shown_name(call.name, call.namespace)
        self._add_call(call.call_id, name, _json({CUSTOM_INPUT: call.input}), path)

    def _add_action(self, item: JsonObject, path: str) -> None:
        call = _read(item, ItemAction, path)
        call_id = call.call_id or call.id
        if call_id is None:
            raise _refused("a call needs a `call_id`", f"{path}.call_id")
        name = str(item["type"]).removesuffix("_call")
        self._add_call(call_id, name, _json(call.action or call.operation or {}), path)

    def _add_output(self, item: JsonObject, path: str) -> None:
        found = _read(item, ItemCallOutput, path)
        self._add_result(found.call_id, found.output, path)

    def _add_local_output(self, item: JsonObject, path: str) -> None:
        found = _read(item, ItemLocalShellOutput, path)
        call_id = found.call_id or found.id
        if call_id is None:
            raise _refused("an output needs a `call_id`", f"{path}.call_id")
        self._add_result(call_id, found.output, path)

    def _add_reasoning(self, item: JsonObject, path: str) -> None:
        found = _read(item, ItemReasoning, path)
        text = _joined_texts(found.content) or _joined_texts(found.summary)
        if not text and found.encrypted_content:
            text = unpack_reasoning(found.encrypted_content) or ""
        turn = self._assistant(path)
        if text:
            earlier = turn.get("reasoning_content")
            turn["reasoning_content"] = text if earlier is None else f"{earlier}\n{text}"

    def _add_result(self, call_id: str, output: Any, path: str) -> None:
        text = _output_text(output, f"{path}.output")
        self._add({"role": "tool", "tool_call_id": call_id, "content": text}, path)

    def _add_call(self, call_id: str, name: str, arguments: str, path: str) -> None:
        turn = self._assistant(path)
        calls = turn.setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _add_system(self, text: str, path: str) -> None:
        if self.messages and all(message["role"] == "system" for message in self.messages):
            first = self.messages[-1]
            first["content"] = "\n\n".join(part for part in (first["content"], text) if part)
            return
        self._add({"role": "system", "content": text}, path)

    def _assistant(self, path: str) -> JsonObject:
        """Return the turn that is open; a new one where the last item is of another role."""
        if self._turn is None:
            turn: JsonObject = {"role": "assistant", "content": None}
            self._add(turn, path)
            self._turn = turn
        return self._turn

    def _add(self, message: JsonObject, path: str) -> None:
        self._turn = None
        self.messages.append(message)
        self.paths.append(path)


_ADDERS: Final[Mapping[str, Callable[[ChatConversation, JsonObject, str], None]]] = {
    "message": ChatConversation._add_message,
    "function_call": ChatConversation._add_function_call,
    "custom_tool_call": ChatConversation._add_custom_call,
    "local_shell_call": ChatConversation._add_action,
    "shell_call": ChatConversation._add_action,
    "apply_patch_call": ChatConversation._add_action,
    "function_call_output": ChatConversation._add_output,
    "custom_tool_call_output": ChatConversation._add_output,
    "shell_call_output": ChatConversation._add_output,
    "apply_patch_call_output": ChatConversation._add_output,
    "local_shell_call_output": ChatConversation._add_local_output,
    "reasoning": ChatConversation._add_reasoning,
}


def _content(content: str | list[JsonObject] | None, path: str, *, is_input: bool) -> str | list[JsonObject]:
    """Return a content as a chat message has it: text where it is nothing else."""
    if not isinstance(content, list):
        return content or ""
    parts = [_part(part, f"{path}[{position}]", is_input=is_input) for position, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return parts if is_input and len(parts) > 1 else "".join(part["text"] for part in parts)
    return parts


def _part(part: JsonObject, path: str, *, is_input: bool) -> JsonObject:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
        return {"type": "text", "text": _text(part, "text", path)}
    if kind == "refusal":
        return {"type": "text", "text": _text(part, "refusal", path)}
    if kind == "input_image" and is_input:
        return _image(part, path)
    if kind == "input_file" and is_input:
        return {"type": "text", "text": _file_text(part, path)}
    raise _refused(f'content of type "{str(kind)[:64]}" is not supported here', f"{path}.type")


def _image(part: JsonObject, path: str) -> JsonObject:
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str) or not url:
        if isinstance(file_id := part.get("file_id"), str):
            return PlacedPart(path, {"type": "image_url", "image_url": {"file_id": file_id}})
        raise _refused("an image needs an `image_url`, or the `file_id` of one that was uploaded", f"{path}.image_url")
    detail = part.get("detail")
    image = {"url": url, **({"detail": detail} if isinstance(detail, str) else {})}
    return PlacedPart(path, {"type": "image_url", "image_url": image})


def _file_text(part: JsonObject, path: str) -> str:
    """Return the text of a file that came with the request, behind its name."""
    data = part.get("file_data")
    if not isinstance(data, str):
        raise _refused(
            "a text file must be given by its `file_data`: none is fetched, and uploaded ones are taken as images only",
            path,
        )
    if data.startswith("data:"):
        data = data.partition(",")[2]
    try:
        text = base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        message = "Validation: a file must be base64 of UTF-8 text; this version reads no other files"
        raise not_built(message, f"{path}.file_data") from error
    name = part.get("filename")
    return f"{name}:\n{text}" if isinstance(name, str) else text


def _output_text(output: Any, path: str) -> str:
    """Return the output of a tool as text: parts without a separator, anything else as JSON."""
    if output is None:
        return ""
    if isinstance(output, str):
        return output
    is_content = isinstance(output, list) and all(
        str(part.get("type", "")).startswith("input_") or part.get("type") in ("text", "output_text") for part in output
    )
    if not is_content:
        return _json(output)
    texts = []
    for position, part in enumerate(output):
        if part["type"] == "input_image":
            texts.append(UNSEEN_IMAGE)
        else:
            texts.append(_part(part, f"{path}[{position}]", is_input=True)["text"])
    return "".join(texts)


def _arguments(call: ItemFunctionCall) -> str | None:
    """Return the arguments as text; None for a call that was cut off, and so was never made."""
    arguments = call.arguments
    if arguments is None:
        return "{}"
    if not isinstance(arguments, str):
        return _json(arguments)
    if not arguments.strip():
        return "{}"
    if call.status != "incomplete":
        return arguments
    try:
        is_object = isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        is_object = False
    return arguments if is_object else None


def _joined_texts(parts: list[JsonObject] | None) -> str:
    return "\n".join(text for part in parts or () if isinstance(text := part.get("text"), str) and text)


def _text(part: JsonObject, member: str, path: str) -> str:
    text = part.get(member)
    if not isinstance(text, str):
        raise _refused(f"`{member}` must be text", f"{path}.{member}")
    return text


def _text_of(content: str | list[JsonObject]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # spaced as models write it


def _read(item: JsonObject, shape: type[S], path: str) -> S:
    try:
        return msgspec.convert(item, shape)
    except msgspec.ValidationError as error:
        rejected = deserialisation_error(error)
        rejected.param = f"{path}.{rejected.param}" if rejected.param else path
        raise rejected from error


def _refused(message: str, param: str) -> RequestRejected:
    return RequestRejected(400, f"Validation: {param}: {message}", param=param)
