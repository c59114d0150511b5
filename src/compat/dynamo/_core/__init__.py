"""The native module's names. Re-exports only; new code imports from where things live."""

from typing import TYPE_CHECKING, Any

from dynamo._core import backend
from dynamo.common.absent import load_name
from dynamo.contract.parsers import get_reasoning_parser_names, get_tool_parser_names
from dynamo.contract.request_fields import with_engine_data
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
from dynamo.kv.native_bindings import OverlapScores, RadixTree, compute_block_hash_for_seq
from dynamo.protocol.lora import lora_name_to_id
from dynamo.protocol.media import MediaDecoder, MediaFetcher
from dynamo.protocol.model_types import ModelInput, ModelType, WorkerType
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime import Client, DistributedRuntime, Endpoint, PyAsyncRequestStream
from dynamo.runtime.calls.context import Context, ContextMetadata
from dynamo.runtime.calls.instances import RouterMode
from dynamo.runtime.observe.log_message import log_message
from dynamo.runtime.observe.tracing import SpanProxy
from dynamo.worker.kv_publishing.publisher import KvEventPublisher, WorkerMetricsPublisher
from dynamo.worker.registration import fetch_model, register_model, unregister_model, update_model_taints

if TYPE_CHECKING:
    from dynamo.bindings import (
        ApproxKvIndexer,
        KvIndexer,
        KvRouter,
        KvRouterConfig,
        LoadThresholdConfig,
        RouterConfig,
        RoutingConstraints,
    )

__version__ = "1.6.1+unified"
"""The version of the native system whose names these are."""


def __getattr__(name: str) -> Any:
    return load_name(__name__, name)


__all__ = [
    "ApproxKvIndexer",
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
    "KvIndexer",
    "KvRouter",
    "KvRouterConfig",
    "LoadThresholdConfig",
    "MediaDecoder",
    "MediaFetcher",
    "ModelInput",
    "ModelRuntimeConfig",
    "ModelType",
    "OverlapScores",
    "Overloaded",
    "PyAsyncRequestStream",
    "RadixTree",
    "ResponseTimeout",
    "RouterConfig",
    "RouterMode",
    "RouterQueueLimitExceeded",
    "RoutingConstraints",
    "SelectionServiceError",
    "SpanProxy",
    "StreamIncomplete",
    "Unknown",
    "WorkerMetricsPublisher",
    "WorkerType",
    "WorkerUnavailable",
    "backend",
    "compute_block_hash_for_seq",
    "fetch_model",
    "get_reasoning_parser_names",
    "get_tool_parser_names",
    "log_message",
    "lora_name_to_id",
    "register_model",
    "unregister_model",
    "update_model_taints",
    "with_engine_data",
]
