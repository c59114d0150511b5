"""What an engine author imports: the contract, its types, and the worker that drives an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo.common.backend.config import WorkerConfig
from dynamo.common.backend.engine import (
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

if TYPE_CHECKING:
    from dynamo.common.backend import telemetry
    from dynamo.common.backend.worker import Worker

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
    "Worker",
    "WorkerConfig",
    "telemetry",
]


def __getattr__(name: str) -> Any:
    # These two pull in the whole runtime; an engine's unit tests need neither, so they load on first use.
    if name == "Worker":
        from dynamo.common.backend.worker import Worker

        return Worker
    if name == "telemetry":
        import importlib

        return importlib.import_module("dynamo.common.backend.telemetry")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
