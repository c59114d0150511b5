# ruff: noqa: F405
"""The exceptions an engine raises, under the name the guide uses. See `dynamo.errors` for what each means."""

from dynamo.errors import *  # noqa: F403

__all__ = [
    "Cancelled", "CannotConnect", "ConnectionTimeout", "Disconnected", "DynamoException", "EngineShutdown", "HttpError",
    "InvalidArgument", "Overloaded", "ResponseTimeout", "RouterQueueLimitExceeded", "SelectionServiceError",
    "StreamIncomplete", "Unknown", "WorkerUnavailable",
]  # fmt: skip
