"""The response object: what every answer of the Responses API, and many of its events, have in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

from dynamo.protocol.openai.errors import ABORTED_CODE, RequestRejected
from dynamo.protocol.openai.escaping import json_line, json_text
from dynamo.protocol.responses.request import OutputTextFormat, ResponsesBody
from dynamo.protocol.responses.tools import echoed_tool_choice, echoed_tools

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
