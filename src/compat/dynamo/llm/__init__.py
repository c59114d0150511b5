"""The guide's names for models and their registration. Re-exports only."""

from typing import TYPE_CHECKING, Any

from dynamo.common.absent import load_name
from dynamo.contract.request_fields import with_engine_data
from dynamo.errors import HttpError, RouterQueueLimitExceeded
from dynamo.kv.native_bindings import OverlapScores, RadixTree, compute_block_hash_for_seq
from dynamo.protocol.lora import lora_name_to_id
from dynamo.protocol.media import MediaDecoder, MediaFetcher
from dynamo.protocol.model_types import ModelInput, ModelType, WorkerType
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime.calls.instances import RouterMode
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

register_llm = register_model
unregister_llm = unregister_model
fetch_llm = fetch_model


def __getattr__(name: str) -> Any:
    return load_name(__name__, name)


__all__ = [
    "ApproxKvIndexer",
    "HttpError",
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
    "RadixTree",
    "RouterConfig",
    "RouterMode",
    "RouterQueueLimitExceeded",
    "RoutingConstraints",
    "WorkerMetricsPublisher",
    "WorkerType",
    "compute_block_hash_for_seq",
    "fetch_llm",
    "fetch_model",
    "lora_name_to_id",
    "register_llm",
    "register_model",
    "unregister_llm",
    "unregister_model",
    "update_model_taints",
    "with_engine_data",
]
