"""The roles of workers (`dynamo.contract.modes`), and the keys of a model card by which workers offer blocks to each other."""

from dynamo.contract.modes import DisaggregationMode, EmbeddingTransferMode
from dynamo.protocol.records import FETCH_ENDPOINTS as KV_HINT_TRANSFER_SOURCE_CONTROL_ENDPOINTS_RUNTIME_KEY
from dynamo.protocol.records import FETCH_WORKER_TYPE as KV_HINT_TRANSFER_WORKER_TYPE_RUNTIME_KEY
from dynamo.protocol.records import TAKES_FETCH_HINTS as KV_HINT_TRANSFER_CAPABILITY_KEY

__all__ = [
    "KV_HINT_TRANSFER_CAPABILITY_KEY", "KV_HINT_TRANSFER_SOURCE_CONTROL_ENDPOINTS_RUNTIME_KEY",
    "KV_HINT_TRANSFER_WORKER_TYPE_RUNTIME_KEY", "DisaggregationMode", "EmbeddingTransferMode",
]  # fmt: skip
