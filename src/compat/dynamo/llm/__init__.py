"""The guide's names for models and their registration. Re-exports only."""

from functools import partial
from typing import TYPE_CHECKING

from dynamo.common.absent import LATE, load_name
from dynamo.common.lora import LoRADownloader
from dynamo.contract.request_fields import with_engine_data
from dynamo.errors import HttpError, RouterQueueLimitExceeded, SelectionServiceError
from dynamo.kv.native_bindings import OverlapScores, RadixTree, compute_block_hash_for_seq
from dynamo.protocol.frontend_routes import FrontendExtensionContext, FrontendResponse, FrontendRoute
from dynamo.protocol.lora import lora_name_to_id
from dynamo.protocol.media import MediaDecoder, MediaFetcher
from dynamo.protocol.model_types import ModelInput, ModelType, WorkerType
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime.calls.instances import RouterMode
from dynamo.worker.kv_publishing.publisher import KvEventPublisher, WorkerMetricsPublisher
from dynamo.worker.registration import fetch_model, register_model, unregister_model, update_model_taints

if TYPE_CHECKING:
    from dynamo.bindings import *  # noqa: F403

register_llm = register_model
unregister_llm = unregister_model
fetch_llm = fetch_model


__getattr__ = partial(load_name, __name__)

__all__ = [
    "FrontendExtensionContext", "FrontendResponse", "FrontendRoute",
    "HttpError", "KvEventPublisher", "LoRADownloader", "MediaDecoder", "MediaFetcher", "ModelInput",
    "ModelRuntimeConfig", "ModelType", "OverlapScores", "RadixTree", "RouterMode", "RouterQueueLimitExceeded",
    "SelectionServiceError", "WorkerMetricsPublisher", "WorkerType", "compute_block_hash_for_seq", "fetch_llm", "fetch_model", "lora_name_to_id",
    "register_llm", "register_model", "unregister_llm", "unregister_model", "update_model_taints", "with_engine_data",
]  # fmt: skip
__all__ += LATE
