"""The guide's names for models and their registration. Re-exports only."""

from typing import NoReturn

from dynamo._core.absent import raise_absent
from dynamo.errors import HttpError, RouterQueueLimitExceeded
from dynamo.kv.native_bindings import OverlapScores, RadixTree, compute_block_hash_for_seq
from dynamo.protocol.lora import lora_name_to_id
from dynamo.protocol.media import MediaDecoder, MediaFetcher
from dynamo.protocol.model_types import ModelInput, ModelType, WorkerType
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime.instances import RouterMode
from dynamo.worker.kv_publishing.publisher import KvEventPublisher, WorkerMetricsPublisher
from dynamo.worker.registration import fetch_model, register_model, unregister_model, update_model_taints

register_llm = register_model
unregister_llm = unregister_model
fetch_llm = fetch_model


def __getattr__(name: str) -> NoReturn:
    raise_absent(__name__, name)


__all__ = [
    "HttpError",
    "KvEventPublisher",
    "MediaDecoder",
    "MediaFetcher",
    "ModelInput",
    "ModelRuntimeConfig",
    "ModelType",
    "OverlapScores",
    "RadixTree",
    "RouterMode",
    "RouterQueueLimitExceeded",
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
]
