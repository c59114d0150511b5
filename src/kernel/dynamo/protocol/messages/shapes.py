"""A request to the Messages API as it is sent. Fields that are not named here are ignored, as clients add some with every release.

Content blocks, and tools, stay the dicts that were sent until `conversation` and `tools` read them by their types.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, NoReturn, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from dynamo.protocol.openai.body import (
    DEFAULT_LIMITS,
    BodyLimits,
    check_depth,
    check_messages,
    read_json,
)
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.reader import decoder_of
from dynamo.protocol.openai.shapes import I64, JsonObject, NvExt

ContentBlocks: TypeAlias = str | list[JsonObject]

T = TypeVar("T")

_PATH: Final = re.compile(r" - at `([^`]*)`$")
_MISSING: Final = re.compile(r"^Object missing required field `([^`]*)`")
_MAX_DETAIL: Final = 512  # characters of a decoder's message that are passed on: it may quote the client's own value


class InputMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: ContentBlocks


class ThinkingConfig(Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None  # of reasoning, with "enabled"
    display: str | None = None  # "omitted": the reasoning itself is not shown


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # with "tool"
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: JsonObject


class OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesRequest(Struct, kw_only=True, dict=True):
    """The body of `POST /v1/messages`; `max_tokens` may only be missing where the prompt's tokens are counted."""

    repaired = False  # the body was not strict JSON and was mended; no field, so that no JSON key can set it

    model: str
    messages: list[InputMessage]
    max_tokens: I64 | None = None
    system: ContentBlocks | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: I64 | None = None
    stop_sequences: list[str] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # an older name of `output_config.format`
    chat_template_args: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    nvext: NvExt | None = None

    def free_form(self) -> tuple[Any, ...]:
        """Return the members that may hold any JSON value, and so may nest."""
        forms = (self.output_format, None if self.output_config is None else self.output_config.format)
        return (
            [message.content for message in self.messages],
            self.system,
            self.tools,
            *[form.schema for form in forms if form is not None],
            self.chat_template_args,
            self.chat_template_kwargs,
        )


_decode: Final = decoder_of(MessagesRequest)


def decode_messages(body: bytes, *, limits: BodyLimits = DEFAULT_LIMITS, counts_only: bool = False) -> MessagesRequest:
    """Decode a request and check what every request must have. `counts_only`: no answer is made, so it needs no length.

    Raises RequestRejected (400) that names the field.
    """
    try:
        request, mended = read_json(body, _decode, limits)
    except msgspec.ValidationError as error:
        raise _misshapen(error, "") from error
    if mended:
        request.repaired = True
    check_depth(request.free_form(), limits.depth)
    if not request.model or request.model.isspace():
        invalid("model", "field required")
    if not request.messages:
        invalid("messages", "field required")
    check_messages(request.messages, limits.messages)
    if request.max_tokens is None:
        if not counts_only:
            invalid("max_tokens", "field required")
    elif request.max_tokens <= 0:
        invalid("max_tokens", "must be greater than 0")
    return request


def read_as(type_: type[T], value: Any, where: str) -> T:
    """Return a part of the request as a value of `type_`. Raises RequestRejected (400) that names the place."""
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise _misshapen(error, where) from error


def invalid(where: str, text: str) -> NoReturn:
    """Refuse the request. Raises RequestRejected (400)."""
    raise RequestRejected(400, f"{where}: {text}", param=where)


def _misshapen(error: msgspec.ValidationError, where: str) -> RequestRejected:
    detail = str(error)
    if (found := _PATH.search(detail)) is not None:
        detail, path = detail[: found.start()], found[1].removeprefix("$")
        where = f"{where}{path}" if where else path.removeprefix(".")
    if (missing := _MISSING.match(detail)) is not None:
        where = f"{where}.{missing[1]}" if where else missing[1]
        detail = "field required"
    where = where[:_MAX_DETAIL] or "body"
    return RequestRejected(400, f"{where}: {detail[:_MAX_DETAIL]}", param=where)
