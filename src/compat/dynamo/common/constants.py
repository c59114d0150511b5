"""The roles of workers (`dynamo.contract.modes`), and the keys of a model card by which workers offer blocks to each other."""

from typing import Final

from dynamo.contract.modes import DisaggregationMode, EmbeddingTransferMode

__all__ = [
    "KV_HINT_TRANSFER_CAPABILITY_KEY", "KV_HINT_TRANSFER_SOURCE_CONTROL_ENDPOINTS_RUNTIME_KEY",
    "KV_HINT_TRANSFER_WORKER_TYPE_RUNTIME_KEY", "DisaggregationMode", "EmbeddingTransferMode",
]  # fmt: skip

KV_HINT_TRANSFER_CAPABILITY_KEY: Final = "router_hint"
KV_HINT_TRANSFER_WORKER_TYPE_RUNTIME_KEY: Final = "router_hint_worker_type"
KV_HINT_TRANSFER_SOURCE_CONTROL_ENDPOINTS_RUNTIME_KEY: Final = "router_hint_source_control_endpoints"
