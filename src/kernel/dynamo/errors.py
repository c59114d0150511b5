"""Every error of the system, sorted by what the catcher does next, and the one table of statuses.

    DynamoException                    anything; on its own it means "unknown, do not retry"
    ├── InvalidArgument                the caller's fault: do not retry          400
    ├── Cancelled                      a client or operator cancelled it         499
    ├── Unknown                        the engine's fault: do not retry          500
    ├── RequestKillsWorkers            workers died on the request: refuse it    422
    ├── CannotConnect                  nothing was sent: try another worker      503
    ├── Disconnected                   the peer was lost mid-way: migrate        503
    ├── EngineShutdown                 this worker is going away: migrate        503
    ├── StreamIncomplete               the stream ended without an end: migrate  503
    ├── WorkerUnavailable              this worker is not serving: try another   503
    ├── ConnectionTimeout              the peer did not answer in time           504
    ├── ResponseTimeout                the answer did not come in time           504
    ├── Overloaded                     alive, but full: try another, or later    529
    ├── RouterQueueLimitExceeded       a policy class is full: later             529
    └── SelectionServiceError          the external selector failed              500
    HttpError                          an engine asserts a status itself

This module imports nothing of ours. `describe` and `revive` are the wire form: an error crosses processes as a
record with its causes, so `raise X from e` arrives as X caused by e.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final


class DynamoException(Exception):
    """Root of every typed error. Raised bare it is treated as `Unknown`."""

    is_reported: bool = False
    """Whether a peer sent it: `revive` sets this. Then the way to that peer is well, whatever the error is about."""


class Unknown(DynamoException):
    """An engine failed in a way the framework has no name for. Not retried; the client sees a 500."""


class RequestKillsWorkers(DynamoException):
    """Two workers in a row died while they served the request, so no further one is tried. Not retried."""


class InvalidArgument(DynamoException):
    """The request cannot be served as it is; the message reaches the client verbatim (400).

    With `public` False the message was not written for clients (such as a builtin ValueError): HTTP shows a generic text.
    """

    public: bool = True


class CannotConnect(DynamoException):
    """A service or worker could not be reached; nothing was sent, so another one may be tried."""


class Disconnected(DynamoException):
    """The connection to a peer ended before the answer did."""


class ConnectionTimeout(DynamoException):
    """A peer did not answer in time (504)."""


class ResponseTimeout(DynamoException):
    """The answer did not arrive before the request's deadline (504)."""


class Cancelled(DynamoException):
    """The request was cancelled by its sender (499)."""


class EngineShutdown(DynamoException):
    """The engine is going away or was never up; another worker may continue the request."""


class StreamIncomplete(DynamoException):
    """An engine's stream ended without a terminal chunk."""


class WorkerUnavailable(DynamoException):
    """A worker declined because it is not serving."""


class NoReplacement(WorkerUnavailable):
    """The model has lost its last worker, and no other one came in time."""

    def __init__(self, model: str) -> None:
        super().__init__(f"No replacement came for the last worker of model {model}")
        self.model = model


class Overloaded(DynamoException):
    """Alive, but full. `retry_after_seconds` is a hint for the caller."""

    def __init__(self, message: str = "Service temporarily overloaded", *, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RouterQueueLimitExceeded(DynamoException):
    """A router policy class reached one of its queue limits."""

    def __init__(
        self, policy_class: str, limit_kind: str, current: int, limit: int, *, retry_after_seconds: int = 1
    ) -> None:
        super().__init__(
            f'router policy class "{policy_class}" queue {limit_kind} limit reached (current={current}, limit={limit})'
        )
        self.policy_class, self.limit_kind, self.current, self.limit = policy_class, limit_kind, current, limit
        self.retry_after_seconds = retry_after_seconds


class SelectionServiceError(DynamoException):
    """The external selection service failed; `status_code` is what it answered, if it did."""

    def __init__(self, kind: str, status_code: int | None = None) -> None:
        super().__init__(f"selection service: {kind}" + (f" ({status_code})" if status_code is not None else ""))
        self.kind, self.status_code = kind, status_code


HTTP_ERROR_MESSAGE_LIMIT: Final = 8192  # characters; a longer message is cut and ends in "..."


class HttpError(Exception):
    """An engine asserts an HTTP status. 4xx reaches the client; 5xx is sanitised."""

    def __init__(self, code: int, message: str) -> None:
        if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code < 600:
            raise ValueError(f"HttpError code must be an int in 0..599, got {code!r}")
        if not isinstance(message, str):
            raise ValueError(f"HttpError message must be a str, got {type(message).__name__}")
        if len(message) > HTTP_ERROR_MESSAGE_LIMIT:
            message = message[: HTTP_ERROR_MESSAGE_LIMIT - 3] + "..."
        super().__init__(f"HTTP {code}: {message}")
        self.code, self.message = code, message


@dataclass(frozen=True, slots=True)
class Rule:
    """What a kind of error means to each reader."""

    status: int  # HTTP status of a unary answer
    phrase: str  # `type` of the flat body
    stream_type: str  # `type` of the error frame inside a stream
    public: str | None  # the text a client sees; None: the engine's own message, verbatim
    wire_class: str  # `class` of the native error record
    retryable: bool = False  # another worker may try (subject to the migration limit)
    inhibits: bool = False  # the instance is locally quarantined for a while


_UNAVAILABLE_TEXT: Final = "Service temporarily unavailable"


def _unavailable(*, inhibits: bool = True, retryable: bool = True) -> Rule:
    return Rule(
        503,
        "Service Unavailable",
        "service_unavailable",
        _UNAVAILABLE_TEXT,
        "Unavailable",
        retryable=retryable,
        inhibits=inhibits,
    )


def _timeout() -> Rule:
    return Rule(
        504,
        "Gateway Timeout",
        "gateway_timeout",
        "Request deadline exceeded",
        "DeadlineExceeded",
        retryable=True,
        inhibits=True,
    )


def _overload() -> Rule:
    return Rule(529, "Overloaded", "overloaded", "Service temporarily overloaded", "CapacityExhausted", retryable=True)


RULES: Final[dict[type[BaseException], Rule]] = {
    InvalidArgument: Rule(400, "Bad Request", "invalid_request_error", None, "InvalidRequest"),
    Cancelled: Rule(499, "Client Closed Request", "request_cancelled", "Request cancelled", "Cancelled"),
    Unknown: Rule(500, "Internal Server Error", "internal_server_error", "Internal server error", "Internal"),
    # Not a 5xx: official clients send a request again after each of those, and this one would end more workers.
    RequestKillsWorkers: Rule(
        422,
        "Unprocessable Entity",
        "invalid_request_error",
        "The request is refused because workers died while they served it",
        "Internal",
    ),
    CannotConnect: _unavailable(),
    Disconnected: _unavailable(),
    EngineShutdown: _unavailable(),
    StreamIncomplete: _unavailable(),
    WorkerUnavailable: _unavailable(inhibits=False),
    ConnectionTimeout: _timeout(),
    ResponseTimeout: _timeout(),
    Overloaded: _overload(),
    RouterQueueLimitExceeded: Rule(529, "Overloaded", "overloaded", None, "CapacityExhausted"),
    SelectionServiceError: Rule(
        500, "Internal Server Error", "internal_server_error", "Internal server error", "Internal"
    ),
}

# Names on the native wire that differ from our class names. Reading accepts both spellings.
_BACKEND_SCOPED: Final = frozenset(
    {
        "Unknown",
        "InvalidArgument",
        "CannotConnect",
        "Disconnected",
        "ConnectionTimeout",
        "ResponseTimeout",
        "Cancelled",
        "EngineShutdown",
        "StreamIncomplete",
    }
)
_BY_NAME: Final[dict[str, type[DynamoException]]] = {
    **{cls.__name__: cls for cls in RULES if issubclass(cls, DynamoException)},
    "WorkerOverloaded": Overloaded,
    "ResourceExhausted": Overloaded,
    "Unavailable": WorkerUnavailable,
    "Internal": Unknown,
    "InvalidRequest": InvalidArgument,
}
_WIRE_NAME: Final[dict[type[BaseException], str]] = {Overloaded: "WorkerOverloaded"}


def kind_of(error: BaseException) -> type[DynamoException]:
    """Return the table row an error belongs to: its own class or the nearest base that has one."""
    for cls in type(error).__mro__:
        if cls in RULES and issubclass(cls, DynamoException):
            return cls
    return Unknown


def rule_of(error: BaseException) -> Rule:
    """Return how an HTTP client, a router and the native wire see `error`."""
    return RULES[kind_of(error)]


_LEAVING: Final = (EngineShutdown, StreamIncomplete)  # what a worker reports when it accepts no further requests


def inhibits(error: BaseException) -> bool:
    """Return whether the error opens the instance's circuit. A worker that reports a lost connection lost one of its own."""
    if not rule_of(error).inhibits:
        return False
    return not (isinstance(error, DynamoException) and error.is_reported) or isinstance(error, _LEAVING)


def is_answer(error: BaseException) -> bool:
    """Return whether the error shows that the peer is reachable and serves."""
    if not (isinstance(error, DynamoException) and error.is_reported):
        return False
    return not isinstance(error, (*_LEAVING, WorkerUnavailable))


def text_of(error: BaseException) -> str:
    """Format an error as `"{Kind}: {message}"`, the form operators see."""
    return f"{kind_of(error).__name__}: {error}"


MAX_CAUSES: Final = 16  # a longer chain is cut: a record must not grow without bound


def describe(error: BaseException, *, _depth: int = 0) -> dict[str, Any]:
    """Return the wire record of an error and its causes, in the native shape (1.6.1 and 1.5.0 keys together)."""
    kind = kind_of(error)
    rule = RULES[kind]
    name = _WIRE_NAME.get(kind, kind.__name__)
    message = str(error).encode(errors="backslashreplace").decode()  # a lone surrogate could not be encoded later
    record: dict[str, object] = {
        "error_type": {"Backend": name} if name in _BACKEND_SCOPED else name,
        "message": message,
        "class": rule.wire_class,
        "reason": "backend." + _snake(name),
    }
    if isinstance(error, InvalidArgument) and error.public:
        record["public"] = {"type": "message", "message": message}
    if not isinstance(error, DynamoException) and _depth > 0:
        # A cause that is no error of ours keeps its class name, so the chain stays readable.
        record["message"] = f"{type(error).__name__}: {message}"
    cause = error.__cause__
    if cause is not None and _depth < MAX_CAUSES:
        record["caused_by"] = describe(cause, _depth=_depth + 1)
    return record


def revive(record: object, *, _depth: int = 0) -> DynamoException:
    """Return the exception a wire record stands for; unknown kinds become `Unknown`, unknown keys are ignored."""
    if not isinstance(record, dict):
        unknown = Unknown(str(record))
        unknown.is_reported = True
        return unknown
    kind = record.get("error_type")
    if isinstance(kind, dict):
        kind = next(iter(kind.values()), None)
    cls = _BY_NAME.get(kind, Unknown) if isinstance(kind, str) else Unknown
    message = record.get("message")
    message = message if isinstance(message, str) else str(message)
    error: DynamoException
    if cls in (RouterQueueLimitExceeded, SelectionServiceError):
        error = cls.__new__(cls, message)  # the leaf's data did not travel; its text did
        error.args = (message,)
    else:
        error = cls(message)
    error.is_reported = True
    if isinstance(error, InvalidArgument):
        error.public = record.get("public") is not None
    cause = record.get("caused_by")
    if cause is not None and _depth < MAX_CAUSES:
        error.__cause__ = revive(cause, _depth=_depth + 1)
    return error


def http_assertion(error: BaseException) -> tuple[int, str] | None:
    """Return the (status, message) an engine asserted through `HttpError`, also after crossing a wire; else None."""
    if isinstance(error, HttpError):
        return error.code, error.message
    text = str(error)
    if not (text.startswith("{") and isinstance(error, InvalidArgument | Unknown)):
        return None
    try:
        body = json.loads(text)
    except ValueError:
        return None
    match body:
        case {"message": str(message), "code": int(code)} if not isinstance(code, bool):
            return code, message
    return None


def chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, outermost first."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and len(found) <= MAX_CAUSES:
        found.append(current)
        current = current.__cause__
    return found


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")
