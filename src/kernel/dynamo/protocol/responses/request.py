"""The body of `POST /v1/responses`, as narrow as the wire needs. Unknown members are ignored: clients add some in every release.

What the items and tools in it mean is in `items` and `tools`; how it becomes a chat request is in `lowering`.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from dynamo.protocol.openai.body import DEFAULT_LIMITS, BodyLimits, check_depth, deserialisation_error, read_json
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.reader import decoder_of
from dynamo.protocol.openai.shapes import I32, I64, U32, JsonObject, NvExt

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
