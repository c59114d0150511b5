"""Content blocks as the messages of a chat: what templates and engines know.

user       text, images, documents -> one user message; tool results -> tool messages, the text around them in place
assistant  text and calls -> one assistant message; thinking -> its `reasoning_content`
system     joins the system text where it comes first, and else stays where it is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from msgspec import Struct, to_builtins

from dynamo.protocol.messages.shapes import ContentBlocks, InputMessage, invalid, read_as
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.media_parts import PlacedPart
from dynamo.protocol.openai.shapes import JsonObject

BILLING_HEADER: Final = "x-anthropic-billing-header:"
"""Claude Code puts a line that begins so in front of its system text, and it differs in every request."""


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None  # never checked


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any = None  # histories hold what models wrote: also texts, or nothing


class ImageSource(Struct):
    type: str  # "base64", "url", "file"
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ImageBlock(Struct, tag_field="type", tag="image"):
    source: ImageSource


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: ContentBlocks | None = None
    is_error: bool | None = None  # the text shows it to the model


class DocumentSource(Struct):
    type: str  # "text", "content"; others have no text
    data: str | None = None
    content: ContentBlocks | None = None


class DocumentBlock(Struct, tag_field="type", tag="document"):
    source: DocumentSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Struct, tag_field="type", tag="search_result"):
    content: list[TextBlock]
    source: str | None = None
    title: str | None = None


class ToolReferenceBlock(Struct, tag_field="type", tag="tool_reference"):
    tool_name: str


# What an assistant's turn of Anthropic's own servers may hold: calls that they ran, and what these gave.
_RUN_ELSEWHERE: Final = frozenset({"server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload"})


def chat_messages(
    system: ContentBlocks | None, messages: Sequence[InputMessage], *, strips_billing_header: bool = True
) -> list[JsonObject]:
    """Return the conversation as chat messages. Raises RequestRejected (400, 422) that names the block."""
    texts = [] if system is None else [_system_text(system, "system", strips=strips_billing_header)]
    first = 0
    while first < len(messages) and messages[first].role == "system":
        where = f"messages[{first}].content"
        texts.append(_system_text(messages[first].content, where, strips=strips_billing_header))
        first += 1
    whole = "\n\n".join(filter(None, texts))
    found: list[JsonObject] = [{"role": "system", "content": whole}] if whole else []
    for position in range(first, len(messages)):
        message, where = messages[position], f"messages[{position}].content"
        if message.role == "user":
            found += _user(message.content, where)
        elif message.role == "assistant":
            found.append(_assistant(message.content, where))
        elif text := _system_text(message.content, where, strips=strips_billing_header):
            found.append({"role": "system", "content": text})
    if not any(message["role"] != "system" for message in found):
        invalid("messages", "at least one message of a user or an assistant is required")
    return found


def continues_last(messages: Sequence[JsonObject]) -> bool:
    """Return whether the answer goes on from the text of the last message, which the client has begun for the assistant."""
    last = messages[-1]
    return last["role"] == "assistant" and not last.get("tool_calls") and bool((last["content"] or "").strip())


# -- one message --------------------------------------------------------------------------------------------------------


def _system_text(content: ContentBlocks, where: str, *, strips: bool) -> str:
    if isinstance(content, str):
        return _without_billing(content) if strips else content
    texts = []
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        if block.get("type") != "text":
            raise _unsupported(block, place)
        text = read_as(TextBlock, block, place).text
        texts.append(_without_billing(text) if strips else text)
    return "\n".join(filter(None, texts))


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text


def _user(content: ContentBlocks, where: str) -> list[JsonObject]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if not content:
        invalid(where, "must contain at least one content block")
    found: list[JsonObject] = []
    gathered = _Gathered()
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        if block.get("type") == "tool_result":
            if said := gathered.content():
                found.append({"role": "user", "content": said})
            gathered = _Gathered()
            result = read_as(ToolResultBlock, block, place)
            told = _result(result.content, f"{place}.content")
            found.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": told})
        else:
            gathered.add(block, place)
    if (said := gathered.content()) or not found:
        found.append({"role": "user", "content": said})
    return found


class _Gathered:
    """Blocks as the content of a chat message: one text, or parts where there are images."""

    def __init__(self) -> None:
        self._parts: list[JsonObject] = []
        self._texts: list[str] = []

    def add(self, block: JsonObject, where: str) -> None:
        """Add a block. Raises RequestRejected that names it."""
        if block.get("type") == "image":
            self._end_text()
            self._parts.append(_image(block, where))
        else:
            self._texts.append(_text_of(block, where))

    def content(self) -> str | list[JsonObject]:
        """Return what was gathered; "" for nothing."""
        if not self._parts:
            return "".join(self._texts)
        self._end_text()
        return self._parts

    def _end_text(self) -> None:
        if any(self._texts):
            self._parts.append({"type": "text", "text": "".join(self._texts)})
        self._texts = []


def _result(content: ContentBlocks | None, where: str) -> str | list[JsonObject]:
    if content is None or isinstance(content, str):
        return content or ""
    gathered = _Gathered()
    for number, block in enumerate(content):
        gathered.add(block, f"{where}[{number}]")
    return gathered.content()


def _result_text(content: ContentBlocks | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join([_text_of(block, f"{where}[{number}]") for number, block in enumerate(content)])


def _assistant(content: ContentBlocks, where: str) -> JsonObject:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[JsonObject] = []
    for number, block in enumerate(content):
        place, kind = f"{where}[{number}]", block.get("type")
        if kind == "tool_use":
            use = read_as(ToolUseBlock, block, place)
            # `to_builtins` of an empty input is an object, too: templates loop over it.
            function = {"name": use.name, "arguments": to_builtins(use.input)}
            calls.append({"id": use.id, "type": "function", "function": function})
        elif kind == "thinking":
            reasoning.append(read_as(ThinkingBlock, block, place).thinking)
        elif kind == "redacted_thinking" or kind in _RUN_ELSEWHERE or str(kind).endswith("_tool_result"):
            continue  # nothing of it can be shown to this model
        else:
            texts.append(_text_of(block, place))
    text = "".join(texts)
    message: JsonObject = {"role": "assistant", "content": text if text or not calls else None}
    if any(reasoning):
        message["reasoning_content"] = "\n\n".join(filter(None, reasoning))
    if calls:
        message["tool_calls"] = calls
    return message


# -- one block ----------------------------------------------------------------------------------------------------------


def _text_of(block: JsonObject, where: str) -> str:
    """Return the text of a block that is one, or holds one."""
    kind = block.get("type")
    if not isinstance(kind, str) or (read := _READERS.get(kind)) is None:
        raise _unsupported(block, where)
    return read(block, where)


def _plain(block: JsonObject, where: str) -> str:
    return read_as(TextBlock, block, where).text


def _document(block: JsonObject, where: str) -> str:
    document = read_as(DocumentBlock, block, where)
    source, place = document.source, f"{where}.source"
    if source.type == "text" and source.data is not None:
        text = source.data
    elif source.type == "content" and source.content is not None:
        text = _result_text(source.content, f"{place}.content")
    else:
        invalid(place, f'document source type "{source.type[:64]}" is not supported: send the text of the document')
    return "\n".join([*filter(None, (document.title, document.context)), text])


def _search_result(block: JsonObject, where: str) -> str:
    result = read_as(SearchResultBlock, block, where)
    return "\n".join([*filter(None, (result.title, result.source)), *[part.text for part in result.content]])


def _tool_reference(block: JsonObject, where: str) -> str:
    return read_as(ToolReferenceBlock, block, where).tool_name


def _image(block: JsonObject, where: str) -> PlacedPart:
    source = read_as(ImageBlock, block, where).source
    if source.type == "url" and source.url:
        url = source.url
    elif source.type == "base64" and source.data and source.media_type:
        url = f"data:{source.media_type};base64,{source.data}"
    elif source.type == "file" and source.file_id:
        return PlacedPart(where, {"type": "image_url", "image_url": {"file_id": source.file_id}})
    elif source.type == "file":
        invalid(f"{where}.source", "an image source of type file needs `file_id`")
    elif source.type in ("url", "base64"):
        needed = "`url`" if source.type == "url" else "`media_type` and `data`"
        invalid(f"{where}.source", f"an image source of type {source.type} needs {needed}")
    else:
        invalid(
            f"{where}.source", f'image source type "{source.type[:64]}" is not supported: send base64, a URL or a file'
        )
    return PlacedPart(where, {"type": "image_url", "image_url": {"url": url}})


def _misplaced_image(block: JsonObject, where: str) -> NoReturn:
    raise RequestRejected(400, f"{where}: an image is not supported here, only in messages of the user", param=where)


def _unsupported(block: JsonObject, where: str) -> RequestRejected:
    kind = block.get("type")
    if not isinstance(kind, str):
        return RequestRejected(400, f"{where}.type: field required", param=f"{where}.type")
    return RequestRejected(400, f'{where}: content block type "{kind[:64]}" is not supported', param=where)


_READERS: Final[dict[str, Callable[[JsonObject, str], str]]] = {
    "text": _plain,
    "document": _document,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
    "image": _misplaced_image,
}
