"""A Responses request as a chat request: everything that chat can do is used, and nothing of it is built again.

What has no member there (how the output is to be shown, what the response repeats) stays with the request as `asked`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final, NoReturn, Self

from dynamo.protocol.openai.body import DEFAULT_LIMITS, BodyLimits, check_messages
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.openai.requests import ChatRequest, validate_chat
from dynamo.protocol.openai.shapes import JsonObject, JsonSchemaFormat, ResponseFormat, StreamOptions
from dynamo.protocol.responses.items import ChatConversation
from dynamo.protocol.responses.output import OutputShape
from dynamo.protocol.responses.request import ENCRYPTED_REASONING, TEXT_LOGPROBS, ResponsesBody, decode_body
from dynamo.protocol.responses.tools import OfferedTools, offer_tools

__all__ = [
    "MAX_TOP_LOGPROBS",
    "ResponsesRequest",
    "count_old_turns",
    "decode_responses",
    "system_as_user",
    "validate_responses",
    "without_old_turns",
]

MAX_TOP_LOGPROBS: Final = 20  # more are cut, as in 1.6.1

_SAME: Final = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "metadata", "service_tier", "store"),
    *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "chat_template_args", "chat_template_kwargs"),
    *("nvext", "seed", "stop", "presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty"),
    *("min_tokens", "ignore_eos", "skip_special_tokens", "priority", "cache_salt"),
)
"""Members with the same name and meaning in a chat request."""

_OTHER_NAMES: Final = {"max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}
_MESSAGE: Final = re.compile(r"messages\[(\d+)\]")


class ResponsesRequest(ChatRequest, kw_only=True):
    """A chat request, and what its client asked for."""

    # In the instance's `__dict__`, as what decoding finds is: no member of the body is these, and no worker gets them.
    asked: ClassVar[ResponsesBody]
    offered: ClassVar[OfferedTools]
    paths: ClassVar[Sequence[str]]  # of the item that each message came from
    left_out: ClassVar[Sequence[str]]  # the types of items that became nothing

    @property
    def shape(self) -> OutputShape:
        """How the output is to be shown."""
        asked = self.asked
        return OutputShape(asked.summary is not None, asked.includes(ENCRYPTED_REASONING), asked.hides_reasoning)

    def with_history(self, items: Sequence[Any]) -> Self:
        """Put earlier items in front of the input's.

        Raises:
            RequestRejected: 400 for an item that cannot be read.
        """
        self._take_over(_conversation(self.asked, self.offered, items))
        return self

    def _take_over(self, conversation: ChatConversation) -> None:
        self.messages = conversation.messages
        self.__dict__["paths"] = conversation.paths
        self.__dict__["left_out"] = conversation.left_out

    def renamed(self, rejected: RequestRejected) -> RequestRejected:
        """Return a rejection of the chat request with the names that this API has for its members."""
        param = rejected.param
        if param is None:
            return rejected
        found = _MESSAGE.match(param)
        if found is not None:
            position = int(found[1])
            path = self.paths[position] if position < len(self.paths) else "input"
            rejected.param = path + param[found.end() :]
        elif param == "messages":
            rejected.param = "input"
        else:
            rejected.param = _OTHER_NAMES.get(param, param)
        return rejected


def decode_responses(body: bytes, *, limits: BodyLimits = DEFAULT_LIMITS) -> ResponsesRequest:
    """Decode a body into the chat request that serves it.

    Raises:
        RequestRejected: 400 naming the member, or 422 for what is not built.
    """
    asked, mended = decode_body(body, limits=limits)
    _check_built(asked)
    offered = offer_tools(asked.tools, asked.tool_choice)
    conversation = _conversation(asked, offered, ())
    reasoning, text = asked.reasoning, asked.text
    request = ResponsesRequest(messages=conversation.messages, **{name: getattr(asked, name) for name in _SAME})
    members = request.__dict__
    members["asked"], members["offered"] = asked, offered
    request._take_over(conversation)
    if mended:
        members["repaired"] = True
    check_messages(request.messages, limits.messages)
    request.tools = list(offered.functions) or None
    request.tool_choice = offered.choice
    request.max_completion_tokens = asked.max_output_tokens
    request.reasoning_effort = None if reasoning is None else reasoning.effort
    if request.is_streaming:
        request.stream_options = StreamOptions(include_usage=True)
    if text is not None:
        request.verbosity = text.verbosity
        request.response_format = _response_format(asked)
    if asked.includes(TEXT_LOGPROBS):
        request.logprobs, request.top_logprobs = True, min(asked.top_logprobs or 0, MAX_TOP_LOGPROBS)
    return request


def validate_responses(request: ResponsesRequest) -> None:
    """Refuse a request that breaks a rule.

    Raises:
        RequestRejected: 400 naming the member, or 422 for what is not built.
    """
    asked = request.asked
    if asked.input is None and asked.previous_response_id is None:
        raise _refused("`input` is missing: text, or a list of items", "input")
    if asked.top_logprobs is not None and asked.top_logprobs < 0:
        raise _refused(
            f"Top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {asked.top_logprobs}", "top_logprobs"
        )
    if not request.messages and asked.previous_response_id is None:
        left_out = (
            f" (items of these types are left out: {', '.join(request.left_out[:8])})" if request.left_out else ""
        )
        raise _refused(f"`input` holds nothing for the model to read{left_out}", "input")
    if not request.messages:
        return  # the rest is looked at together with what was said before
    try:
        validate_chat(request)
    except RequestRejected as error:
        raise request.renamed(error) from error


def _conversation(asked: ResponsesBody, offered: OfferedTools, history: Sequence[Any]) -> ChatConversation:
    conversation = ChatConversation(offered)
    conversation.add_instructions(asked.instructions)
    if history:
        conversation.add_items(history, "previous_response_id")
    conversation.add_input(asked.input)
    return conversation


def _response_format(asked: ResponsesBody) -> ResponseFormat | None:
    form = None if asked.text is None else asked.text.format
    if form is None:
        return None
    if form.type != "json_schema":
        return ResponseFormat(form.type)
    if form.name is None or not form.name.strip():
        raise _refused("text.format.name cannot be empty", "text.format.name")
    if not isinstance(form.schema, dict):
        raise _refused("text.format.schema must be a JSON object", "text.format.schema")
    return ResponseFormat("json_schema", JsonSchemaFormat(form.name, form.schema, form.description, form.strict))


def _check_built(asked: ResponsesBody) -> None:
    """Refuse what would silently be something else if it were ignored."""
    if asked.background is True:
        _not_built("`background`", "background")
    if asked.conversation is not None:
        _not_built("`conversation`", "conversation")
    if asked.prompt is not None:
        _not_built("`prompt`, a template that is stored at the server,", "prompt")


def _not_built(what: str, param: str) -> NoReturn:
    raise not_built(f"Validation: {what} is not supported: this version does not have it yet", param)


def _refused(message: str, param: str) -> RequestRejected:
    return RequestRejected(400, f"Validation: {message}", param=param)


def count_old_turns(messages: Sequence[JsonObject]) -> int:
    """Return how many turns stand before the last one. A turn is a message of the user and what follows it."""
    turns: int = sum(message["role"] == "user" for message in messages)
    return max(0, turns - 1)


def without_old_turns(messages: Sequence[JsonObject], count: int) -> list[JsonObject]:
    """Return the messages without the oldest `count` turns; what stands before the first turn stays."""
    if not count:
        return list(messages)
    begins = [place for place, message in enumerate(messages) if message["role"] == "user"]
    return [*messages[: begins[0]], *messages[begins[count] :]]


def system_as_user(messages: Sequence[JsonObject]) -> list[JsonObject] | None:
    """Return the messages with every later system message as one of the user, for a template that allows only the first;
    None when there is no later one."""
    if all(message["role"] != "system" for message in messages[1:]):
        return None
    return [
        {**message, "role": "user"} if number and message["role"] == "system" else message
        for number, message in enumerate(messages)
    ]
