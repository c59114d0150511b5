"""The exceptions an engine raises, under the name the guide uses. See `dynamo.errors` for what each means."""

from dynamo.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    Overloaded,
    ResponseTimeout,
    RouterQueueLimitExceeded,
    SelectionServiceError,
    StreamIncomplete,
    Unknown,
    WorkerUnavailable,
)

__all__ = [
    "Cancelled",
    "CannotConnect",
    "ConnectionTimeout",
    "Disconnected",
    "DynamoException",
    "EngineShutdown",
    "HttpError",
    "InvalidArgument",
    "Overloaded",
    "ResponseTimeout",
    "RouterQueueLimitExceeded",
    "SelectionServiceError",
    "StreamIncomplete",
    "Unknown",
    "WorkerUnavailable",
]
