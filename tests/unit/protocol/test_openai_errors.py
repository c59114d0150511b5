"""The table of errors, unary and in a stream, and the two shapes of an error body."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import (
    RULES,
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    Overloaded,
    RequestKillsWorkers,
    ResponseTimeout,
    RouterQueueLimitExceeded,
    SelectionServiceError,
    StreamIncomplete,
    Unknown,
    WorkerUnavailable,
    describe,
    revive,
)
from dynamo.protocol.openai import (
    RequestRejected,
    error_body,
    model_not_found,
    model_not_ready,
    not_built,
    not_ready,
    overload_status,
    rejection_for,
    route_not_found,
)
from support.cases import each_case

QUEUE_TEXT = 'router policy class "gold" queue requests limit reached (current=5, limit=4)'
UNAVAILABLE = "Service temporarily unavailable"
TIMED_OUT = "Request deadline exceeded"
KILLED = "The request is refused because workers died while they served it"
BUSY = "Service temporarily overloaded"
FAILED = "Internal server error"
NOT_READY = (
    "Model `m` is not ready to serve requests yet. The deployment may still be starting up or is not fully provisioned. "
    "Please retry shortly."
)

# error -> status, message, type, details; then the stream frame's message, type, code
ROWS: list[tuple[BaseException, int, str, str, dict[str, Any] | None, str, str, int]] = [
    (InvalidArgument("bad top"), 400, "bad top", "Bad Request", None, "bad top", "invalid_request_error", 400),
    (
        Cancelled("x"),
        499,
        "Request cancelled",
        "Client Closed Request",
        None,
        "Request cancelled",
        "request_cancelled",
        499,
    ),
    (
        Unknown("secret"),
        500,
        FAILED,
        "Internal Server Error",
        {"backend_status": 500},
        FAILED,
        "internal_server_error",
        500,
    ),
    (
        DynamoException("secret"),
        500,
        FAILED,
        "Internal Server Error",
        {"backend_status": 500},
        FAILED,
        "internal_server_error",
        500,
    ),
    (RuntimeError("secret"), 500, FAILED, "Internal Server Error", None, FAILED, "internal_server_error", 500),
    (ValueError("secret"), 500, FAILED, "Internal Server Error", None, FAILED, "internal_server_error", 500),
    (
        SelectionServiceError("down", 502),
        500,
        FAILED,
        "Internal Server Error",
        None,
        FAILED,
        "internal_server_error",
        500,
    ),
    *[
        (kind("secret"), 503, UNAVAILABLE, "Service Unavailable", None, UNAVAILABLE, "service_unavailable", 503)
        for kind in (CannotConnect, Disconnected, EngineShutdown, StreamIncomplete, WorkerUnavailable)
    ],
    *[
        (kind("secret"), 504, TIMED_OUT, "Gateway Timeout", None, TIMED_OUT, "gateway_timeout", 504)
        for kind in (ConnectionTimeout, ResponseTimeout)
    ],
    (Overloaded("secret"), 529, BUSY, "Overloaded", None, BUSY, "overloaded", 529),
    (
        RequestKillsWorkers("secret"),  # a status that clients do not send again
        422,
        KILLED,
        "Unprocessable Entity",
        None,
        KILLED,
        "invalid_request_error",
        422,
    ),
    (
        RouterQueueLimitExceeded("gold", "requests", 5, 4),
        529,
        QUEUE_TEXT,
        "Overloaded",
        {"policy_class": "gold", "limit_kind": "requests", "current": 5, "limit": 4},
        QUEUE_TEXT,
        "overloaded",
        529,
    ),
    (
        HttpError(415, "no such media"),
        415,
        "no such media",
        "Unsupported Media Type",
        None,
        "no such media",
        "invalid_request_error",
        415,
    ),
    (HttpError(418, "tea"), 418, "tea", "I'm a Teapot", None, "tea", "invalid_request_error", 418),
    (
        HttpError(422, ""),
        422,
        "Unprocessable Entity",
        "Unprocessable Entity",
        None,
        "Unprocessable Entity",
        "invalid_request_error",
        422,
    ),
    (HttpError(429, "slow"), 429, "slow", "Too Many Requests", None, "slow", "rate_limit_error", 429),
    (
        HttpError(499, "x"),
        499,
        "Request cancelled",
        "Client Closed Request",
        None,
        "Request cancelled",
        "request_cancelled",
        499,
    ),
    (
        HttpError(500, "secret"),
        500,
        FAILED,
        "Internal Server Error",
        {"backend_status": 500},
        FAILED,
        "internal_server_error",
        500,
    ),
    (
        HttpError(502, "secret"),
        500,
        FAILED,
        "Internal Server Error",
        {"backend_status": 502},
        "Bad gateway",
        "internal_server_error",
        502,
    ),
    (HttpError(503, "secret"), 503, UNAVAILABLE, "Service Unavailable", None, UNAVAILABLE, "service_unavailable", 503),
    (HttpError(529, "secret"), 529, BUSY, "Overloaded", None, BUSY, "overloaded", 529),
    (
        HttpError(200, "secret"),
        500,
        FAILED,
        "Internal Server Error",
        {"backend_status": 200},
        FAILED,
        "internal_server_error",
        500,
    ),
    (RequestRejected(400, "mine", param="p"), 400, "mine", "Bad Request", None, "mine", "invalid_request_error", 400),
]


def name_of(value: Any) -> str | None:
    return f"{type(value).__name__}-{getattr(value, 'code', '')}" if isinstance(value, BaseException) else None


@each_case(
    ("error", "status", "message", "type_", "details", "stream_message", "stream_type", "stream_code"),
    ROWS,
    ids=name_of,
)
def test_every_row_unary_and_in_a_stream(
    error: BaseException,
    status: int,
    message: str,
    type_: str,
    details: dict[str, Any] | None,
    stream_message: str,
    stream_type: str,
    stream_code: int,
) -> None:
    rejection = rejection_for(error)
    body = json.loads(rejection.body())
    assert rejection.status == status
    assert (body["message"], body["type"], body["code"], body.get("details")) == (message, type_, status, details)
    assert body["error"]["message"] == message
    frame = rejection_for(error).frame()
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert json.loads(frame[6:]) == {"error": {"message": stream_message, "type": stream_type, "code": stream_code}}
    assert b"secret" not in rejection.body() + frame


def test_every_kind_of_the_error_table_has_a_row() -> None:
    assert set(RULES) <= {type(row[0]) for row in ROWS}


@each_case("row", [row for row in ROWS if isinstance(row[0], DynamoException)], ids=lambda row: name_of(row[0]))
def test_an_error_that_crossed_a_wire_gets_the_same_status_and_text(row: Any) -> None:
    there, here = rejection_for(revive(describe(row[0]))), rejection_for(row[0])
    assert (there.status, there.message, there.type) == (here.status, here.message, here.type)


@pytest.mark.parametrize("kind", [InvalidArgument, Unknown])
def test_an_http_assertion_that_crossed_a_wire_still_counts(kind: type[DynamoException]) -> None:
    assert rejection_for(kind('{"message":"tea","code":418}')).status == 418


def test_an_empty_invalid_argument_still_says_something() -> None:
    assert rejection_for(InvalidArgument("")).message == "Invalid request"


@each_case("error", [Overloaded(), HttpError(529, ""), HttpError(503, ""), RouterQueueLimitExceeded("a", "b", 1, 1)])
def test_what_passes_soon_says_when_to_come_back(error: BaseException) -> None:
    assert rejection_for(error).headers() == {"retry-after": "1"}
    assert rejection_for(Overloaded(retry_after_seconds=7)).headers() == {"retry-after": "7"}
    assert rejection_for(InvalidArgument("x")).headers() == {}


@pytest.mark.parametrize("error", [Overloaded(), HttpError(529, ""), RouterQueueLimitExceeded("a", "b", 1, 1)])
def test_the_overload_status_can_be_another(error: BaseException) -> None:
    rejection = rejection_for(error, overload_status=429)
    assert (rejection.status, rejection.type) == (429, "Overloaded")
    assert json.loads(rejection.body())["code"] == 429
    assert json.loads(rejection_for(error, overload_status=429).frame()[6:])["error"]["code"] == 429


@each_case(
    ("configured", "status"),
    [
        (None, 529),
        (503, 503),
        ("429", 429),
        (200, 200),
        (999, 999),
        (199, 529),
        (100, 529),
        (1000, 529),
        ("x", 529),
        ("", 529),
    ],
)
def test_an_unusable_overload_status_falls_back(configured: int | str | None, status: int) -> None:
    assert overload_status(configured) == status


def test_a_body_carries_both_shapes() -> None:
    assert json.loads(error_body(400, "m", details={"a": 1}, param="p", code="c")) == {
        "message": "m",
        "type": "Bad Request",
        "code": 400,
        "details": {"a": 1},
        "error": {"message": "m", "type": "invalid_request_error", "param": "p", "code": "c"},
    }
    assert list(json.loads(error_body(529, "m"))) == ["message", "type", "code", "error"]


@each_case(
    ("rejection", "status", "message", "type_", "nested"),
    [
        (model_not_found(), 404, "Model not found", "Not Found", "not_found_error"),
        (model_not_ready("m"), 503, NOT_READY, "Service Unavailable", "service_unavailable"),
        (not_ready(), 503, "Service is not ready", "Service Unavailable", "service_unavailable"),
        (route_not_found("GET", "/nope"), 404, "Route not found: GET /nope", "Not Found", "not_found_error"),
        (not_built("x"), 422, "x", "Unprocessable Entity", "not_implemented"),
        (RequestRejected(413, "x"), 413, "x", "Payload Too Large", "invalid_request_error"),
        (RequestRejected(415, "x"), 415, "x", "Unsupported Media Type", "invalid_request_error"),
    ],
)
def test_the_frontends_own_answers(
    rejection: RequestRejected, status: int, message: str, type_: str, nested: str
) -> None:
    body = json.loads(rejection.body())
    assert (rejection.status, body["message"], body["type"], body["error"]["type"]) == (status, message, type_, nested)


def test_what_is_not_built_has_a_status_that_no_client_retries() -> None:
    rejected = not_built("x", "field")
    assert rejected.status not in (408, 409, 429)
    assert rejected.status < 500
    assert json.loads(rejected.body())["error"] == {
        "message": "x",
        "type": "not_implemented",
        "param": "field",
        "code": "not_built",
    }


def test_a_missing_model_has_openais_code() -> None:
    assert json.loads(model_not_found().body())["error"]["code"] == "model_not_found"


def test_an_engines_endless_message_is_cut() -> None:
    assert len(rejection_for(InvalidArgument("x" * 100_000)).message) == 8192


@given(st.text() | st.just("\ud800"), st.sampled_from([InvalidArgument, HttpError]))
def test_any_message_is_one_valid_line_of_json(message: str, kind: Any) -> None:
    error = HttpError(400, message) if kind is HttpError else kind(message)
    frame = rejection_for(error).frame()
    assert len(frame.decode().splitlines()) == 2
    msgspec.json.decode(frame[6:])
    msgspec.json.decode(rejection_for(error).body())
