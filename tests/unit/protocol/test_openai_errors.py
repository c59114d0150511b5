"""The table of errors, unary and in a stream, and the two shapes of an error body."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

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
from dynamo.protocol.messages.errors import MESSAGES
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
from dynamo.protocol.openai.errors import ABORTED_CODE, aborted
from dynamo.protocol.responses.request import error_code
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

# status -> the type of a body, the type of a stream's frame
TYPES = {
    400: ("Bad Request", "invalid_request_error"),
    415: ("Unsupported Media Type", "invalid_request_error"),
    418: ("I'm a Teapot", "invalid_request_error"),
    422: ("Unprocessable Entity", "invalid_request_error"),
    429: ("Too Many Requests", "rate_limit_error"),
    499: ("Client Closed Request", "request_cancelled"),
    500: ("Internal Server Error", "internal_server_error"),
    503: ("Service Unavailable", "service_unavailable"),
    504: ("Gateway Timeout", "gateway_timeout"),
    529: ("Overloaded", "overloaded"),
}


class Row(NamedTuple):
    """How an error is answered."""

    error: BaseException
    status: int
    message: str
    details: dict[str, Any] | None = None
    in_stream: tuple[str, int] | None = None  # message and code of the stream's frame, where they are others


def of_backend(status: int) -> dict[str, Any]:
    return {"backend_status": status}


ROWS = [
    Row(InvalidArgument("bad top"), 400, "bad top"),
    Row(Cancelled("x"), 499, "Request cancelled"),
    Row(Unknown("secret"), 500, FAILED, of_backend(500)),
    Row(DynamoException("secret"), 500, FAILED, of_backend(500)),
    Row(RuntimeError("secret"), 500, FAILED),
    Row(ValueError("secret"), 500, FAILED),
    Row(SelectionServiceError("down", 502), 500, FAILED),
    Row(CannotConnect("secret"), 503, UNAVAILABLE),
    Row(Disconnected("secret"), 503, UNAVAILABLE),
    Row(EngineShutdown("secret"), 503, UNAVAILABLE),
    Row(StreamIncomplete("secret"), 503, UNAVAILABLE),
    Row(WorkerUnavailable("secret"), 503, UNAVAILABLE),
    Row(ConnectionTimeout("secret"), 504, TIMED_OUT),
    Row(ResponseTimeout("secret"), 504, TIMED_OUT),
    Row(Overloaded("secret"), 529, BUSY),
    Row(RequestKillsWorkers("secret"), 422, KILLED),  # a status that clients do not send again
    Row(
        RouterQueueLimitExceeded("gold", "requests", 5, 4),
        529,
        QUEUE_TEXT,
        {"policy_class": "gold", "limit_kind": "requests", "current": 5, "limit": 4},
    ),
    Row(HttpError(415, "no such media"), 415, "no such media"),
    Row(HttpError(418, "tea"), 418, "tea"),
    Row(HttpError(422, ""), 422, "Unprocessable Entity"),
    Row(HttpError(429, "slow"), 429, "slow"),
    Row(HttpError(499, "x"), 499, "Request cancelled"),
    Row(HttpError(500, "secret"), 500, FAILED, of_backend(500)),
    Row(HttpError(502, "secret"), 500, FAILED, of_backend(502), in_stream=("Bad gateway", 502)),
    Row(HttpError(503, "secret"), 503, UNAVAILABLE),
    Row(HttpError(529, "secret"), 529, BUSY),
    Row(HttpError(200, "secret"), 500, FAILED, of_backend(200)),
    Row(RequestRejected(400, "mine", param="p"), 400, "mine"),
]


def name_of(value: Any) -> str | None:
    return f"{type(value).__name__}-{getattr(value, 'code', '')}" if isinstance(value, BaseException) else None


@each_case("row", ROWS, ids=lambda row: name_of(row.error))
def test_every_row_unary_and_in_a_stream(row: Row) -> None:
    type_, stream_type = TYPES[row.status]
    rejection = rejection_for(row.error)
    body = json.loads(rejection.body())
    assert rejection.status == row.status
    assert (body["message"], body["type"], body["code"]) == (row.message, type_, row.status)
    assert body.get("details") == row.details
    assert body["error"]["message"] == row.message
    frame = rejection_for(row.error).frame()
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    message, code = row.in_stream or (row.message, row.status)
    assert json.loads(frame[6:]) == {"error": {"message": message, "type": stream_type, "code": code}}
    assert b"secret" not in rejection.body() + frame


def test_an_aborted_request_has_its_name_as_the_code_of_every_shape() -> None:
    rejection = aborted("why")
    assert (rejection.status, json.loads(rejection.body())["code"]) == (499, 499)
    assert json.loads(rejection.body())["error"]["code"] == ABORTED_CODE
    assert json.loads(rejection.frame()[6:])["error"] == {"message": "why", "type": ABORTED_CODE, "code": ABORTED_CODE}
    assert json.loads(MESSAGES.error_body(rejection, "id"))["error"] == {"type": ABORTED_CODE, "message": "why"}
    assert ABORTED_CODE.encode() in MESSAGES.stream_failure(rejection, "id")
    assert error_code(rejection) == ABORTED_CODE


def test_every_kind_of_the_error_table_has_a_row() -> None:
    assert set(RULES) <= {type(row.error) for row in ROWS}


@each_case("error", [row.error for row in ROWS if isinstance(row.error, DynamoException)], ids=name_of)
def test_an_error_that_crossed_a_wire_gets_the_same_status_and_text(error: DynamoException) -> None:
    there, here = rejection_for(revive(describe(error))), rejection_for(error)
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
