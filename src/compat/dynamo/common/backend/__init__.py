"""What an engine author imports: the contract, its types, and the worker that drives an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from dynamo.contract import telemetry
    from dynamo.worker.worker import Worker

__all__ = [
    "BaseEngine", "DiffusionEngine", "EngineConfig", "GenerateChunk", "GenerateRequest", "LLMEngine", "LlmRegistration",
    "RawEngine", "RawRequest", "RawResponseChunk", "Worker", "WorkerConfig", "telemetry",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # These two pull in the whole runtime; an engine's unit tests need neither, so they load on first use.
    if name == "Worker":
        from dynamo.worker.worker import Worker

        return Worker
    if name == "telemetry":
        import importlib

        return importlib.import_module("dynamo.contract.telemetry")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
