"""The native module's names. Re-exports only; new code imports from where things live."""

from dynamo._core import backend
from dynamo.contract.parsers import get_reasoning_parser_names, get_tool_parser_names
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
from dynamo.protocol.media import MediaDecoder, MediaFetcher
from dynamo.protocol.model_types import ModelInput, ModelType, WorkerType
from dynamo.runtime import Client, DistributedRuntime, Endpoint
from dynamo.runtime.context import Context, ContextMetadata
from dynamo.runtime.log_message import log_message
from dynamo.runtime.tracing import SpanProxy
from dynamo.worker.kv_publishing.publisher import KvEventPublisher, WorkerMetricsPublisher

__all__ = [
    "Cancelled",
    "CannotConnect",
    "Client",
    "ConnectionTimeout",
    "Context",
    "ContextMetadata",
    "Disconnected",
    "DistributedRuntime",
    "DynamoException",
    "Endpoint",
    "EngineShutdown",
    "HttpError",
    "InvalidArgument",
    "KvEventPublisher",
    "MediaDecoder",
    "MediaFetcher",
    "ModelInput",
    "ModelType",
    "Overloaded",
    "ResponseTimeout",
    "RouterQueueLimitExceeded",
    "SelectionServiceError",
    "SpanProxy",
    "StreamIncomplete",
    "Unknown",
    "WorkerMetricsPublisher",
    "WorkerType",
    "WorkerUnavailable",
    "backend",
    "get_reasoning_parser_names",
    "get_tool_parser_names",
    "log_message",
]
