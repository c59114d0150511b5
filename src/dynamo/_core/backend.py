"""The native module's names for the worker and its configuration. Re-exports only."""

from dynamo.contract.config import RuntimeConfig, WorkerConfig
from dynamo.contract.engine_config import EngineConfig, LlmRegistration
from dynamo.contract.health_check import HEALTH_CHECK_KEY
from dynamo.contract.metrics import EngineMetrics
from dynamo.contract.modes import NativeDisaggregationMode as DisaggregationMode
from dynamo.worker.kv_publishing.publisher import SnapshotPublisher
from dynamo.worker.worker import Worker

__all__ = [
    "HEALTH_CHECK_KEY",
    "DisaggregationMode",
    "EngineConfig",
    "EngineMetrics",
    "LlmRegistration",
    "RuntimeConfig",
    "SnapshotPublisher",
    "Worker",
    "WorkerConfig",
]
