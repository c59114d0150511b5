"""The body of `POST /v1/responses`, as narrow as the wire needs. Unknown members are ignored: clients add some in every release.

What the items and tools in it mean is in `items` and `tools`; how it becomes a chat request is in `lowering`.
The response object, which every answer and many of its events have in them, repeats members of the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct

from dynamo.protocol.openai.body import DEFAULT_LIMITS, BodyLimits, check_depth, deserialisation_error, read_json
from dynamo.protocol.openai.errors import ABORTED_CODE, RequestRejected
from dynamo.protocol.openai.escaping import json_line, json_text
from dynamo.protocol.openai.reader import decoder_of
from dynamo.protocol.openai.shapes import I32, I64, U32, JsonObject, NvExt
from dynamo.protocol.responses.tools import echoed_tool_choice, echoed_tools

ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"
TEXT_LOGPROBS: Final = "message.output_text.logprobs"
"""The members of `include` that change the answer; any other value is ignored."""


class ReasoningControls(Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # the older name of `summary`


class OutputTextFormat(Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: Any = None
    value: Any = None  # another name of the schema, with json_object
    description: str | None = None
    strict: bool | None = None


class TextControls(Struct):
    format: OutputTextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(Struct, kw_only=True):
    """`POST /v1/responses`."""

    model: str
    input: str | list[Any] | None = None
    instructions: str | list[Any] | None = None
    stream: bool | None = None
    max_output_tokens: I64 | None = None
    max_tool_calls: I64 | None = None  # of built-in tools, of which there are none here
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: I64 | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextControls | None = None
    reasoning: ReasoningControls | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    # Of chat requests, with the same meaning.
    chat_template_args: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    nvext: NvExt | None = None
    seed: I64 | None = None
    stop: str | list[str | U32] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: I64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: I32 | None = None
    cache_salt: str | None = None

    def free_form(self) -> tuple[Any, ...]:
        """Return the members that may hold any JSON value, and so may nest."""
        form = None if self.text is None else self.text.format
        return (
            self.input,
            self.instructions,
            self.tools,
            self.tool_choice,
            self.conversation,
            self.prompt,
            self.chat_template_args,
            self.chat_template_kwargs,
            *(() if form is None else (form.schema, form.value)),
        )

    def includes(self, name: str) -> bool:
        return self.include is not None and name in self.include

    @property
    def summary(self) -> str | None:
        """The kind of summary that is requested; None: none."""
        reasoning = self.reasoning
        return None if reasoning is None else reasoning.summary or reasoning.generate_summary

    @property
    def hides_reasoning(self) -> bool:
        """Whether reasoning that comes all the same is left out of the answer."""
        return self.reasoning is not None and self.reasoning.effort == "none"


_decode: Final = decoder_of(ResponsesBody)


def decode_body(body: bytes, *, limits: BodyLimits = DEFAULT_LIMITS) -> tuple[ResponsesBody, bool]:
    """Decode a body; return it, and whether it had to be repaired first.

    Raises:
        RequestRejected: 400, the body is not JSON of the right shape.
    """
    try:
        decoded, mended = read_json(body, _decode, limits)
    except msgspec.ValidationError as error:
        raise deserialisation_error(error) from error
    check_depth(decoded.free_form(), limits.depth)
    if isinstance(decoded.input, list) and len(decoded.input) > limits.messages:
        text = f"Maximum of {limits.messages} items are supported (DYN_HTTP_MESSAGES_LIMIT), got {len(decoded.input)}"
        raise RequestRejected(400, text, param="input", limit="messages")
    return decoded, mended


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponseObject:
    """One response, from its first event to the last. Its echo of the request is encoded once."""

    __slots__ = ("_created", "_echo", "id")

    def __init__(self, id: str, created: int, body: ResponsesBody, *, is_stored: bool) -> None:
        """`created`: seconds since the epoch."""
        self.id, self._created = id, created
        self._echo = json_line(_echo(body, is_stored=is_stored))[1:-1]

    def json(
        self,
        status: ResponseStatus,
        *,
        output: Sequence[Raw] = (),
        usage: bytes | None = None,
        completed_at: int | None = None,
        finish_reason: str | None = None,
        error: RequestRejected | None = None,
        nvext: bytes | None = None,
    ) -> bytes:
        """Return the object. `usage` and `nvext` are ready JSON; `finish_reason` gives why an incomplete one ended."""
        failure = None if error is None else {"code": error_code(error), "message": error.stream_message}
        details = {"reason": _INCOMPLETE.get(finish_reason or "", finish_reason)} if status == "incomplete" else None
        return b"".join(
            (
                b'{"id":%b,"object":"response","created_at":%d' % (json_text(self.id), self._created),
                b',"status":"%b","completed_at":%b' % (status.encode(), json_line(completed_at)),
                b',"error":%b,"incomplete_details":%b' % (json_line(failure), json_line(details)),
                b',"output":[%b],' % b",".join([bytes(item) for item in output]),
                self._echo,
                b',"usage":',
                usage or b"null",
                b"" if nvext is None else b',"nvext":' + nvext,
                b"}",
            )
        )


def response_usage(
    input_tokens: int, output_tokens: int, *, cached_tokens: int | None, reasoning_tokens: int | None
) -> bytes:
    """Return the `usage` of a response; what nothing counts is 0."""
    return (
        b'{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d,"cache_write_tokens":0},"output_tokens":%d,'
        b'"output_tokens_details":{"reasoning_tokens":%d},"total_tokens":%d}'
        % (input_tokens, cached_tokens or 0, output_tokens, reasoning_tokens or 0, input_tokens + output_tokens)
    )


def error_code(rejected: RequestRejected) -> str:
    """Return the code that clients know for a failure."""
    if rejected.code == ABORTED_CODE:
        return ABORTED_CODE
    if rejected.stream_status in (429, 529):
        return "rate_limit_exceeded"
    return "invalid_prompt" if 400 <= rejected.stream_status < 500 else "server_error"


def _echo(body: ResponsesBody, *, is_stored: bool) -> dict[str, Any]:
    """Return the members that record how the response came about. Strict clients require all of them, also for those that
    are null."""
    text = body.text
    reasoning = body.reasoning
    return {
        "model": body.model,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "tool_choice": echoed_tool_choice(body.tool_choice),
        "tools": echoed_tools(body.tools),
        "text": {
            "format": _echoed_format(None if text is None else text.format),
            **({} if text is None or text.verbosity is None else {"verbosity": text.verbosity}),
        },
        "reasoning": None if reasoning is None else {"effort": reasoning.effort, "summary": body.summary},
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt": None,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "auto",
        "truncation": body.truncation or "disabled",
        "top_logprobs": body.top_logprobs or 0,
        "background": False,
        "conversation": None,
        "billing": None,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "store": is_stored,
    }


def _echoed_format(form: OutputTextFormat | None) -> dict[str, Any]:
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    return {name: value for name, value in msgspec.structs.asdict(form).items() if value is not None}
