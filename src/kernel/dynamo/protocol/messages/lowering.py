"""A Messages request as the chat request that serves it."""

from __future__ import annotations

from typing import ClassVar, Final

from dynamo.protocol.messages.conversation import chat_messages, continues_last
from dynamo.protocol.messages.shapes import MessagesRequest
from dynamo.protocol.messages.tools import Toolset, chat_tool_choice, read_tools
from dynamo.protocol.openai.shapes import ChatRequest, JsonSchemaFormat, ResponseFormat, Thinking
from dynamo.protocol.openai.validation import MAX_OUTPUT_TOKENS

_NO_TOOLS: Final = Toolset((), frozenset(), frozenset())


class LoweredMessages(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """The chat request, and what of the Messages request shapes its answer.

    These are no fields of the struct, so that a worker that takes a chat's own body does not get them.
    """

    clamps_output: ClassVar[bool] = True  # `max_tokens` is required, and clients send more than a model has

    toolset = _NO_TOOLS
    shows_thinking = True


def lower(
    source: MessagesRequest, *, strips_billing_header: bool = True, ignore_unsupported: bool = False
) -> LoweredMessages:
    """Return the chat request; `ignore_unsupported`: tools that run elsewhere are left out. Raises RequestRejected (400, 422) that names the field."""
    messages = chat_messages(source.system, source.messages, strips_billing_header=strips_billing_header)
    toolset = read_tools(source.tools, leaves_out=ignore_unsupported) if source.tools else _NO_TOOLS
    choice, thinking, output = source.tool_choice, source.thinking, source.output_config
    form = source.output_format if output is None or output.format is None else output.format
    request = LoweredMessages(
        model=source.model,
        messages=messages,
        max_tokens=None if source.max_tokens is None else min(source.max_tokens, MAX_OUTPUT_TOKENS),
        stream=source.stream,
        temperature=source.temperature,
        top_p=source.top_p,
        top_k=source.top_k,
        stop=list(source.stop_sequences) if source.stop_sequences else None,
        tools=list(toolset.tools) or None,
        tool_choice=chat_tool_choice(choice, toolset),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        thinking=None if thinking is None else Thinking(thinking.type, _budget(source)),
        reasoning_effort=None if output is None else output.effort,
        response_format=None
        if form is None
        else ResponseFormat("json_schema", JsonSchemaFormat("output", form.schema)),
        chat_template_args=source.chat_template_args,
        chat_template_kwargs=source.chat_template_kwargs,
        nvext=source.nvext,
    )
    if continues_last(messages):
        request.continue_final_message, request.add_generation_prompt = True, False
    request.toolset = toolset
    last = source.messages[-1].content if source.messages else ""
    request.ends_with_result = not isinstance(last, str) and any(block.get("type") == "tool_result" for block in last)
    request.shows_thinking = thinking is None or thinking.display != "omitted"
    request.repaired = source.repaired
    return request


def _budget(source: MessagesRequest) -> int | None:
    thinking = source.thinking
    return thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None
