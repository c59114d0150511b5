"""What an engine author implements and may call: the engine classes, chunks, configuration, arguments, and the conformance kit.

The names of the guide's front door (`dynamo.common.backend`) but the worker, which drives an engine and is not part of
its contract. `run(MyEngine)` is in `dynamo.common.backend.run`.
"""

from pkgutil import extend_path

from dynamo.contract import telemetry
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import (
    BaseEngine,
    DiffusionEngine,
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    LLMEngine,
    LlmRegistration,
    RawEngine,
    RawRequest,
    RawResponseChunk,
)

__path__ = extend_path(__path__, __name__)  # the conformance kit is in `src/lab`, native helpers are in `src/compat`

__all__ = [
    "BaseEngine",
    "DiffusionEngine",
    "EngineConfig",
    "GenerateChunk",
    "GenerateRequest",
    "LLMEngine",
    "LlmRegistration",
    "RawEngine",
    "RawRequest",
    "RawResponseChunk",
    "WorkerConfig",
    "telemetry",
]
