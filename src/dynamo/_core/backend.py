"""The native module's names for the worker and its configuration. Re-exports only."""

from dynamo.common.backend.config import RuntimeConfig, WorkerConfig
from dynamo.common.backend.engine_config import EngineConfig, LlmRegistration
from dynamo.common.backend.health_check import HEALTH_CHECK_KEY
from dynamo.common.backend.metrics import EngineMetrics
from dynamo.common.backend.publisher import SnapshotPublisher
from dynamo.common.backend.worker import Worker
from dynamo.common.constants import NativeDisaggregationMode as DisaggregationMode

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
