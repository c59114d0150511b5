"""Errors as the Messages API writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from dynamo.protocol.dialect import Dialect, RateStatus
from dynamo.protocol.openai.errors import ABORTED_CODE, MAX_NAME, RequestRejected, served_here
from dynamo.protocol.openai.escaping import json_text

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
VERSION_HEADER: Final = b"anthropic-version"  # of every request of Anthropic's clients
TOO_LONG: Final = "prompt is too long: "
"""Agents that find this in the text of a 400 shorten their conversation and try again."""

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "request_cancelled",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_type_of(status: int) -> str:
    """Return `error.type` of a status."""
    return _TYPES.get(status) or ("invalid_request_error" if 400 <= status < 500 else "api_error")


def prompt_too_long(found: str, limit: int) -> RequestRejected:
    """Return the rejection of a prompt of `found` tokens, worded as agents expect it."""
    text = f"{TOO_LONG}{found} tokens > {limit} maximum"
    return RequestRejected(400, text, param="messages", code="context_length_exceeded")


class MessagesDialect(Dialect):
    """Anthropic's shapes."""

    keep_alive = PING
    id_headers = (b"x-request-id", b"request-id")

    def error_body(self, rejected: RequestRejected, request_id: str) -> bytes:
        message = rejected.message.removeprefix("Validation: ")
        if rejected.code == "context_length_exceeded" and not message.startswith(TOO_LONG):
            message = TOO_LONG + message
        return _error(_type_of(rejected, rejected.status), message, request_id)

    def stream_failure(self, rejected: RequestRejected, request_id: str) -> bytes:
        found = _error(_type_of(rejected, rejected.stream_status), rejected.stream_message, request_id)
        return b"event: error\ndata: %b\n\n" % found

    def rate_headers(self, status: RateStatus) -> tuple[tuple[bytes, bytes], ...]:
        base = b"anthropic-ratelimit-%b-" % status.kind.encode()
        reset = datetime.fromtimestamp(math.ceil(status.reset_at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return (
            (base + b"limit", b"%d" % status.limit),
            (base + b"remaining", b"%d" % status.remaining),
            (base + b"reset", reset.encode()),
        )

    def unknown_model(self, model: str, served: Sequence[str] = ()) -> RequestRejected:
        text = f"Model '{model[:MAX_NAME]}' not found{served_here(served)}"
        return RequestRejected(404, text, param="model", code="model_not_found")


MESSAGES: Final = MessagesDialect()


def _type_of(rejected: RequestRejected, status: int) -> str:
    return ABORTED_CODE if rejected.code == ABORTED_CODE else error_type_of(status)


def _error(type_: str, message: str, request_id: str) -> bytes:
    return b'{"type":"error","error":{"type":%b,"message":%b},"request_id":%b}' % (
        json_text(type_),
        json_text(message),
        json_text(request_id),
    )
