"""The lines of a batch: what an input line must be, and the result lines that are written for it."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from dynamo.protocol.batches.objects import BatchErrorEntry, BatchUsage, InputTokensDetails, OutputTokensDetails
from dynamo.protocol.openai.escaping import json_text

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_CUSTOM_ID: Final = 512  # characters, as at OpenAI

_NUMBER_DIGITS: Final = 8  # hexadecimal, at the end of a line's request id


class BatchLine(Struct):
    """One input line that keeps every rule."""

    custom_id: str
    body: Raw


class _Line(Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: Raw = Raw()


class _Body(Struct):
    """What is read of a line's body before it is executed; the rest is judged by its API then."""

    model: Any = None
    stream: Any = None


class _Inputs(Struct):
    input: Any = None


_decode_inputs: Final = msgspec.json.Decoder(_Inputs).decode
_decode_line: Final = msgspec.json.Decoder(_Line).decode
_decode_body: Final = msgspec.json.Decoder(_Body).decode


def check_line(data: bytes, number: int, endpoint: str) -> tuple[BatchLine, str | None] | BatchErrorEntry:
    """Check one input line; return it with the model that it names, or the rule that it breaks. `number` counts from 1."""
    try:
        line = _decode_line(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BatchErrorEntry("invalid_json_line", f"This line is not a JSON object: {str(error)[:200]}", number)
    for name in ("custom_id", "method", "url"):
        if getattr(line, name) is None:
            return BatchErrorEntry("missing_required_parameter", f"Missing required parameter: '{name}'.", number, name)
    if not bytes(line.body):
        return BatchErrorEntry("missing_required_parameter", "Missing required parameter: 'body'.", number, "body")
    custom_id = line.custom_id
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        text = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters."
        return BatchErrorEntry("invalid_value", text, number, "custom_id")
    if line.method != "POST":
        return BatchErrorEntry("invalid_method", "The method of every line must be POST.", number, "method")
    if line.url != endpoint:
        text = f"The URL of every line must be the endpoint of the batch, {endpoint}."
        return BatchErrorEntry("mismatched_endpoint", text, number, "url")
    try:
        body = _decode_body(bytes(line.body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BatchErrorEntry("invalid_json_line", "body must be a JSON object.", number, "body")
    if body.stream:
        text = "A line of a batch is not streamed: leave out stream, or send false."
        return BatchErrorEntry("unsupported_value", text, number, "body.stream")
    return BatchLine(custom_id, line.body), body.model if isinstance(body.model, str) else None


def count_inputs(body: bytes) -> int:
    """Return how many inputs an embedding line has."""
    given = _decode_inputs(body).input
    return len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1


def decode_line(data: bytes) -> BatchLine:
    """Read a line that was checked before. Raises msgspec.DecodeError when the file was changed since."""
    return msgspec.json.decode(data, type=BatchLine)


def model_of(body: bytes) -> str:
    """Return the model that a checked body names; empty where it names none."""
    model = _decode_body(body).model
    return model if isinstance(model, str) else ""


def line_request_id(batch_id: str, number: int) -> str:
    """Return the id of a line's request, from which its number can be read again."""
    return f"batch_req_{batch_id.removeprefix('batch_')}{number:0{_NUMBER_DIGITS}x}"


def line_number_of(request_id: str) -> int:
    """Return the number of a line from its request id. Raises ValueError for an id that is not of a line."""
    return int(request_id[-_NUMBER_DIGITS:], 16)


def result_line(request_id: str, custom_id: str, status: int, answer_id: str, body: bytes) -> bytes:
    """Return the result of an executed line; `body` is its answer, which must be JSON on one line."""
    return b'{"id":%b,"custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}\n' % (
        json_text(request_id),
        json_text(custom_id),
        status,
        json_text(answer_id),
        body,
    )


def unexecuted_line(request_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the result of a line that was not executed."""
    return b'{"id":%b,"custom_id":%b,"response":null,"error":{"code":%b,"message":%b}}\n' % (
        json_text(request_id),
        json_text(custom_id),
        json_text(code),
        json_text(message),
    )


class _Details(Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(Struct):
    """Usage in the words of any of the APIs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(Struct):
    usage: _Usage | None = None


_decode_answer: Final = msgspec.json.Decoder(_Answer).decode
_NO_DETAILS: Final = _Details()


def add_usage(total: BatchUsage, body: bytes) -> None:
    """Add the tokens that an answer reports to `total`; an answer without usage adds nothing."""
    try:
        usage = _decode_answer(body).usage
    except msgspec.DecodeError:
        return  # an API whose answers report usage otherwise: its tokens are not known
    if usage is None:
        return
    total.input_tokens += usage.prompt_tokens or usage.input_tokens
    total.output_tokens += usage.completion_tokens or usage.output_tokens
    total.total_tokens = total.input_tokens + total.output_tokens
    inputs = usage.prompt_tokens_details or usage.input_tokens_details or _NO_DETAILS
    outputs = usage.completion_tokens_details or usage.output_tokens_details or _NO_DETAILS
    cached, reasoning = total.input_tokens_details, total.output_tokens_details
    total.input_tokens_details = InputTokensDetails(cached.cached_tokens + (inputs.cached_tokens or 0))
    total.output_tokens_details = OutputTokensDetails(reasoning.reasoning_tokens + (outputs.reasoning_tokens or 0))
