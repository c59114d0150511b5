"""A Responses request as a chat request: everything that chat can do is used, and nothing of it is built again.

What has no member there (how the output is to be shown, what the response repeats) stays with the request as `asked`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NoReturn, cast

import msgspec

from dynamo.protocol.openai.body import DEFAULT_LIMITS, BodyLimits, check_messages
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.openai.requests import ChatRequest, validate_chat
from dynamo.protocol.openai.shapes import JsonObject, JsonSchemaFormat, ResponseFormat, StreamOptions
from dynamo.protocol.openai.validation import LET_PASS
from dynamo.protocol.responses.items import ChatConversation
from dynamo.protocol.responses.output import ItemIds, OutputShape
from dynamo.protocol.responses.request import ENCRYPTED_REASONING, TEXT_LOGPROBS, ResponsesBody, decode_body
from dynamo.protocol.responses.tools import OfferedTools, offer_tools

MAX_TOP_LOGPROBS: Final = 20  # more are cut, as in 1.6.1

_SAME: Final = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "metadata", "service_tier"),
    *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "chat_template_args", "chat_template_kwargs"),
    *("nvext", "seed", "stop", "presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty"),
    *("min_tokens", "ignore_eos", "skip_special_tokens", "priority", "cache_salt"),
)
"""Members with the same name and meaning in a chat request."""

FIRST_INPUT_NUMBER: Final = 16**ItemIds.NUMBER_DIGITS // 2  # of the ids of input items; those of the output are below
_PREFIXES: Final = {"message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}
_OTHER_NAMES: Final = {"max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}
_NEEDLESS: Final = frozenset({"tool_search"})  # it finds tools that are loaded late, and all are offered at once
_MESSAGE: Final = re.compile(r"messages\[(\d+)\]")


class ResponsesRequest(ChatRequest, kw_only=True):
    """A chat request, and what its client requested."""

    # No fields of the struct, as what decoding finds is: no member of the body is these, and no worker gets them.
    asked = cast("ResponsesBody", None)  # decoding sets it, and the next one
    offered = cast("OfferedTools", None)
    paths = cast("Sequence[str]", ())  # of the item that each message came from
    left_out = cast("Sequence[str]", ())  # the types of items that became nothing
    limits = DEFAULT_LIMITS

    @property
    def shape(self) -> OutputShape:
        """How the output is to be shown."""
        asked = self.asked
        return OutputShape(asked.summary is not None, asked.includes(ENCRYPTED_REASONING), asked.hides_reasoning)

    @property
    def references(self) -> dict[str, str]:
        """The ids of items that are only named, each with its place in the input."""
        given = self.asked.input
        found: dict[str, str] = {}
        for position, item in enumerate(given if isinstance(given, list) else ()):
            if isinstance(item, dict) and item.get("type") == "item_reference" and isinstance(item.get("id"), str):
                found[item["id"]] = f"input[{position}]"
        return found

    @property
    def needs_history(self) -> bool:
        """Whether items that are kept elsewhere belong to its conversation."""
        return self.asked.previous_response_id is not None or bool(self.references)

    def with_history(self, items: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Put earlier items in front of the input's, and the named ones where they are named.

        An item that the conversation has already is not put there again.

        Raises:
            RequestRejected: 400 for an item that cannot be read, or a conversation that breaks a rule.
        """
        known = {item.get("id") for item in items if isinstance(item, dict)}
        asked = self.asked
        if named and isinstance(asked.input, list):
            filled = [_filled(item, named, known) for item in asked.input]
            asked = self.asked = msgspec.structs.replace(asked, input=[item for item in filled if item])
        self._take_over(_conversation(asked, self.offered, items))
        check_messages(self.messages, self.limits.messages)
        _check_some(self)
        _validate_as_chat(self)

    def _take_over(self, conversation: ChatConversation) -> None:
        self.messages = conversation.messages
        self.paths = conversation.paths
        self.left_out = conversation.left_out

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


def decode_responses(
    body: bytes, *, limits: BodyLimits = DEFAULT_LIMITS, ignore_unsupported: bool = False
) -> ResponsesRequest:
    """Decode a body into the chat request that serves it. `ignore_unsupported`: tools that run elsewhere are left out.

    Raises:
        RequestRejected: 400 naming the member, or 422 for what is not built.
    """
    asked, mended = decode_body(body, limits=limits)
    _check_built(asked)
    offered = offer_tools(asked.tools, asked.tool_choice)
    if offered.left_out - _NEEDLESS and not ignore_unsupported:
        raise _hosted(asked, sorted(offered.left_out - _NEEDLESS))
    conversation = _conversation(asked, offered, ())
    reasoning, text = asked.reasoning, asked.text
    request = ResponsesRequest(messages=conversation.messages, **{name: getattr(asked, name) for name in _SAME})
    request.asked, request.offered, request.limits = asked, offered, limits
    request._take_over(conversation)
    request.repaired = mended
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
    if request.needs_history and not request.messages:
        return  # the rest is checked together with the earlier turns
    _check_some(request)
    _validate_as_chat(request)


def listed_items(asked: ResponsesBody, response_id: str) -> list[JsonObject]:
    """Return the items of the input as a store lists them: each has an id, which names the response."""
    given = asked.input
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    ids = ItemIds(response_id, first=FIRST_INPUT_NUMBER)
    listed = []
    for item in given or ():
        kind = item.get("type") or "message"
        listed.append({**item, "type": kind, "id": item.get("id") or ids.new(_PREFIXES.get(kind, "item"))})
    return listed


def _filled(item: Any, named: Mapping[str, Any], known: AbstractSet[Any]) -> Any:
    """Return the item that a reference names; None where the conversation has it already."""
    if not isinstance(item, dict) or item.get("type") != "item_reference":
        return item
    id = item.get("id")
    return None if id in known else named.get(str(id), item)


def _check_some(request: ResponsesRequest) -> None:
    if not request.messages:
        types = ", ".join(request.left_out[:8])
        left_out = f" (items of these types are left out: {types})" if types else ""
        raise _refused(f"`input` holds nothing for the model to read{left_out}", "input")


def _validate_as_chat(request: ResponsesRequest) -> None:
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
    if form.type == "json_object" and isinstance(form.schema or form.value, dict):
        return ResponseFormat(form.type, schema=form.schema or form.value)
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


def _hosted(asked: ResponsesBody, kinds: Sequence[str]) -> RequestRejected:
    """Return the rejection of a tool that OpenAI's servers run: without it the model would make up what the tool finds."""
    named = ", ".join(f"`{kind}`" for kind in kinds[:8])
    tools = asked.tools or ()
    place = next((at for at, tool in enumerate(tools) if tool.get("type") in kinds), 0)
    return _refused(
        f"tools of type {named} are not served: nothing here runs them. Leave them out, or offer a function{LET_PASS}",
        f"tools[{place}].type",
    )


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
