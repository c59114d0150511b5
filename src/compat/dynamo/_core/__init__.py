"""The native module's names. Re-exports only; new code imports from where things live."""

from functools import partial
from typing import TYPE_CHECKING

from dynamo._core import backend
from dynamo.common._version import __version__ as __version__
from dynamo.common.absent import LATE, load_name
from dynamo.common.lora import LoRADownloader
from dynamo.contract.parsers import get_reasoning_parser_names, get_tool_parser_names
from dynamo.contract.request_fields import with_engine_data
from dynamo.kv.native_bindings import OverlapScores, RadixTree, compute_block_hash_for_seq
from dynamo.llm import exceptions
from dynamo.llm.exceptions import *  # noqa: F403
from dynamo.protocol.frontend_routes import FrontendExtensionContext, FrontendResponse, FrontendRoute
from dynamo.protocol.lora import lora_name_to_id
from dynamo.protocol.media import MediaDecoder, MediaFetcher
from dynamo.protocol.model_types import ModelInput, ModelType, WorkerType
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime import Client, DistributedRuntime, Endpoint, PyAsyncRequestStream
from dynamo.runtime.calls.context import Context, ContextMetadata
from dynamo.runtime.calls.instances import RouterMode
from dynamo.runtime.observe.log_records import log_message
from dynamo.runtime.observe.tracing import SpanProxy
from dynamo.worker.kv_publishing.publisher import KvEventPublisher, WorkerMetricsPublisher
from dynamo.worker.registration import fetch_model, register_model, unregister_model, update_model_taints

if TYPE_CHECKING:
    from dynamo.bindings import *  # noqa: F403


__getattr__ = partial(load_name, __name__)

__all__ = [
    "Client", "Context", "ContextMetadata", "DistributedRuntime", "Endpoint", "FrontendExtensionContext",
    "FrontendResponse", "FrontendRoute", "KvEventPublisher", "LoRADownloader",
    "MediaDecoder", "MediaFetcher", "ModelInput", "ModelRuntimeConfig", "ModelType", "OverlapScores",
    "PyAsyncRequestStream", "RadixTree", "RouterMode", "SpanProxy", "WorkerMetricsPublisher", "WorkerType", "backend",
    "compute_block_hash_for_seq", "fetch_model", "get_reasoning_parser_names", "get_tool_parser_names", "log_message",
    "lora_name_to_id", "register_model", "unregister_model", "update_model_taints", "with_engine_data",
]  # fmt: skip
__all__ += [*exceptions.__all__, *LATE]
