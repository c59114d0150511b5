"""The answer to a client when a request fails: one rejection value, its two JSON shapes, and the way from exceptions.

The statuses and texts themselves are the table in `dynamo.errors`; nothing here invents one for an engine's error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

from dynamo.errors import (
    Cancelled,
    DynamoException,
    InvalidArgument,
    Overloaded,
    RouterQueueLimitExceeded,
    Unknown,
    http_assertion,
    kind_of,
    rule_of,
)
from dynamo.protocol.openai.escaping import json_text

DEFAULT_OVERLOAD_STATUS: Final = 529
NOT_BUILT_STATUS: Final = 422
"""Of a request that is understood and cannot be served by this version. Not 501, which 1.6.1 answers: OpenAI's and Anthropic's
clients send a request again after 408, 409, 429 and every 5xx, and what is not built is not built the second time either."""

NOT_BUILT_CODE: Final = "not_built"
ABORTED_CODE: Final = "request_aborted"  # of a request that an operator ended
RETRY_AFTER_SECONDS: Final = 1  # on a 503 or an overload; short, because both usually pass with the next step
MESSAGE_LIMIT: Final = 8192  # characters; an engine's message may quote a whole prompt

_PHRASES: Final = {
    **{status.value: status.phrase for status in HTTPStatus},
    413: "Payload Too Large",  # the standard library renamed these two between Python versions
    422: "Unprocessable Entity",
    499: "Client Closed Request",
    529: "Overloaded",
}

_STREAM_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    501: "not_implemented",
    503: "service_unavailable",
    504: "gateway_timeout",
    529: "overloaded",
}


def phrase_of(status: int) -> str:
    """Return the flat body's `type`: the reason phrase, in words a standard client knows."""
    return _PHRASES.get(status) or ("Bad Request" if 400 <= status < 500 else "Internal Server Error")


def stream_type_of(status: int) -> str:
    """Return the nested object's `type`: snake case, as inside a stream."""
    known = _STREAM_TYPES.get(status)
    if known is not None:
        return known
    return "invalid_request_error" if 400 <= status < 500 else "internal_server_error"


def overload_status(configured: int | str | None) -> int:
    """Return the status of an overload: `configured` when it is a usable 200..999, else 529."""
    try:
        status = int(configured) if configured is not None else DEFAULT_OVERLOAD_STATUS
    except ValueError:
        return DEFAULT_OVERLOAD_STATUS
    return status if 200 <= status <= 999 else DEFAULT_OVERLOAD_STATUS


class RequestRejected(Exception):
    """The whole answer to a request that is not served: status, text, and where the fault is.

    `param` names the field; `details` is a small JSON object of the flat body; `code` is OpenAI's machine-readable
    string (`model_not_found`); `retry_after_seconds` becomes a `Retry-After` header. `stream_status` differs from
    `status` only where an engine asserted a 5xx that a unary answer must hide. `limit`: the metric label of the
    listener's limit that was hit. `more_headers`: what the answer carries besides.
    """

    def __init__(
        self,
        status: int,
        message: str,
        details: dict[str, Any] | None = None,
        param: str | None = None,
        *,
        type_: str | None = None,
        stream_type: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
        stream_status: int | None = None,
        stream_message: str | None = None,
        limit: str | None = None,
        more_headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > MESSAGE_LIMIT:
            message = message[: MESSAGE_LIMIT - 3] + "..."
        super().__init__(message)
        self.status, self.message, self.details, self.param = status, message, details, param
        self.type = type_ or phrase_of(status)
        self.stream_type = stream_type or stream_type_of(status)
        self.code = code
        self.limit = limit
        self.more_headers = more_headers or {}
        self.retry_after_seconds = retry_after_seconds
        self.stream_status = status if stream_status is None else stream_status
        self.stream_message = message if stream_message is None else stream_message

    def body(self) -> bytes:
        """Return the JSON body of a unary answer, both shapes in one object."""
        return error_body(
            self.status,
            self.message,
            self.type,
            self.details,
            self.param,
            nested_type=self.stream_type,
            code=self.code,
        )

    def headers(self) -> dict[str, str]:
        """Response headers this answer carries besides its content type."""
        found = {} if self.retry_after_seconds is None else {"retry-after": str(self.retry_after_seconds)}
        return {**found, **self.more_headers} if self.more_headers else found

    def frame(self) -> bytes:
        """Return the SSE frame that ends a stream with this answer (the caller sends `[DONE]` after it).

        Its `code` is the number of the status, as 1.6.1 writes it, but for an error that 1.6.1 does not know.
        """
        return b'data: {"error":{"message":%b,"type":%b,"code":%b}}\n\n' % (
            json_text(self.stream_message),
            json_text(self.stream_type),
            json_text(self.code) if self.code == ABORTED_CODE else b"%d" % self.stream_status,
        )


def error_body(
    status: int,
    message: str,
    type_: str | None = None,
    details: dict[str, Any] | None = None,
    param: str | None = None,
    *,
    nested_type: str | None = None,
    code: str | None = None,
) -> bytes:
    """Return `{"message","type","code"[,"details"],"error":{"message","type","param","code"}}`.

    The flat keys are what 1.6.1 answers, the nested object what OpenAI's own clients read.
    """
    text = json_text(message)
    return b'{"message":%b,"type":%b,"code":%d%b,"error":{"message":%b,"type":%b,"param":%b,"code":%b}}' % (
        text,
        json_text(type_ or phrase_of(status)),
        status,
        b"" if details is None else b',"details":' + msgspec.json.encode(details),
        text,
        json_text(nested_type or stream_type_of(status)),
        b"null" if param is None else json_text(param),
        b"null" if code is None else json_text(code),
    )


MAX_NAMED_MODELS: Final = 8  # in one message; the rest is a count
MAX_NAME: Final = 128  # characters of a model's name in a message


def model_not_found(model: str = "", served: Sequence[str] = ()) -> RequestRejected:
    """Return the 404 for a model that is not served to this client; `served` are those that are."""
    named = f": '{model[:MAX_NAME]}'{served_here(served)}" if model else ""
    return RequestRejected(404, f"Model not found{named}", param="model", code="model_not_found")


def served_here(served: Sequence[str]) -> str:
    """Return the end of a sentence about a model that is not there: what there is instead."""
    if not served:
        return "; no model is served here"
    named = ", ".join(f"'{name[:MAX_NAME]}'" for name in served[:MAX_NAMED_MODELS])
    more = f" and {len(served) - MAX_NAMED_MODELS} more" if len(served) > MAX_NAMED_MODELS else ""
    return f"; served here: {named}{more}"


def model_not_ready(model: str) -> RequestRejected:
    """Return the 503 for a model that is registered but has no worker that can serve it yet (or any more)."""
    return RequestRejected(
        503,
        f"Model `{model}` is not ready to serve requests yet. The deployment may still be starting up or is not fully "
        "provisioned. Please retry shortly.",
        retry_after_seconds=RETRY_AFTER_SECONDS,
    )


def not_built(message: str, param: str | None = None) -> RequestRejected:
    """Return the answer to a request for what this version does not have. `error.code` distinguishes it from a broken
    rule.
    """
    return RequestRejected(NOT_BUILT_STATUS, message, param=param, stream_type=stream_type_of(501), code=NOT_BUILT_CODE)


def aborted(message: str) -> RequestRejected:
    """Return the answer to a request that an operator ended: `request_aborted` in every dialect, streamed or not."""
    return RequestRejected(499, message, code=ABORTED_CODE, stream_type=ABORTED_CODE)


def not_ready() -> RequestRejected:
    """Return the 503 of a frontend that is draining or stopping."""
    return RequestRejected(503, "Service is not ready", retry_after_seconds=RETRY_AFTER_SECONDS)


def route_not_found(method: str, path: str) -> RequestRejected:
    return RequestRejected(404, f"Route not found: {method} {path}")


def rejection_for(error: BaseException, *, overload_status: int = DEFAULT_OVERLOAD_STATUS) -> RequestRejected:
    """Return the rejection for an error that came out of the pipeline or from an engine.

    `overload_status` is the status of every "full" answer; see `overload_status()` for how a setting becomes one.
    """
    if isinstance(error, RequestRejected):
        return error
    asserted = http_assertion(error)
    if asserted is not None:
        return _asserted(*asserted, overload_status)
    rule = rule_of(error)
    status = overload_status if rule.status == DEFAULT_OVERLOAD_STATUS else rule.status
    details: dict[str, Any] | None = None
    if isinstance(error, RouterQueueLimitExceeded):
        details = _queue_details(error)
    elif kind_of(error) is Unknown and isinstance(error, DynamoException):
        details = {"backend_status": 500}  # reported by an engine; a fault of our own has no backend
    retry_after = None
    if isinstance(error, Overloaded | RouterQueueLimitExceeded):
        retry_after = getattr(error, "retry_after_seconds", RETRY_AFTER_SECONDS)
    elif rule.status in (503, DEFAULT_OVERLOAD_STATUS):
        retry_after = RETRY_AFTER_SECONDS
    message = rule.public if rule.public is not None else str(error) or "Invalid request"
    if isinstance(error, InvalidArgument) and not error.public:
        message = "Invalid request"  # the text of a bare handler's ValueError is meant for the log
    return RequestRejected(
        status, message, details, type_=rule.phrase, stream_type=rule.stream_type, retry_after_seconds=retry_after
    )


def _asserted(code: int, message: str, overload_status: int) -> RequestRejected:
    """Return the rejection with an engine's status: a 4xx keeps the engine's text, a 5xx does not."""
    if code == 499:
        return rejection_for(Cancelled())
    if 400 <= code < 500:
        return RequestRejected(code, message or phrase_of(code))
    if code in (DEFAULT_OVERLOAD_STATUS, overload_status):
        return rejection_for(Overloaded(), overload_status=overload_status)
    if code == 503:
        return RequestRejected(503, "Service temporarily unavailable", retry_after_seconds=RETRY_AFTER_SECONDS)
    sane = code if 500 <= code < 600 else 500
    return RequestRejected(
        500,
        "Internal server error",
        {"backend_status": code},
        stream_status=sane,
        stream_message=phrase_of(sane).capitalize(),
    )


def _queue_details(error: RouterQueueLimitExceeded) -> dict[str, Any] | None:
    """Return the numbers of the limit; None when the error crossed a wire, which carries only its text."""
    names = ("policy_class", "limit_kind", "current", "limit")
    if not all(hasattr(error, name) for name in names):
        return None
    return {name: getattr(error, name) for name in names}


def response_not_found(id: str) -> RequestRejected:
    """Return the 404 for a response that is not kept (any more)."""
    return RequestRejected(404, f"Response with id '{id[:64]}' not found.", code="response_not_found")
