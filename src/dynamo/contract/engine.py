"""The contract: what an engine promises to the worker that drives it.

Subclass `LLMEngine`, write `from_args`, `start`, `generate` and `cleanup`, and call `run(MyEngine)`. Everything else
has a default that means "nothing to add". All coroutines run on the event loop that called `Worker.run()`.
"""

# ruff: noqa: B027 - the empty hooks are defaults an engine may override, not forgotten abstract methods
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

from dynamo.contract.chunks import (
    CompletionUsage,
    GenerateChunk,
    GenerateRequest,
    RawRequest,
    RawResponseChunk,
    chunk,
    final_chunk,
    usage,
)
from dynamo.contract.engine_config import EngineConfig, LlmRegistration
from dynamo.contract.requests.logits import (
    ForcedTokenSequenceSpec,
    LogitsProcessorEntry,
    LogitsProcessorSpec,
    PythonProcessorSpec,
    deserialize_logits_processor_entries,
    is_generation_stage,
    logits_processors_for_request,
    serialize_logits_processor_entries,
)
from dynamo.runtime.context import Context

if TYPE_CHECKING:
    from dynamo.contract.config import WorkerConfig
    from dynamo.runtime.endpoint import Endpoint
    from dynamo.worker.kv_publishing.publisher import KvEventSource, SnapshotPublisher

__all__ = [
    "BaseEngine",
    "CompletionUsage",
    "DiffusionEngine",
    "EngineConfig",
    "EngineMetrics",
    "ForcedTokenSequenceSpec",
    "GenerateChunk",
    "GenerateRequest",
    "LLMEngine",
    "LlmRegistration",
    "LogitsProcessorEntry",
    "LogitsProcessorSpec",
    "PythonProcessorSpec",
    "RawEngine",
    "RawRequest",
    "RawResponseChunk",
    "chunk",
    "deserialize_logits_processor_entries",
    "final_chunk",
    "is_generation_stage",
    "logits_processors_for_request",
    "serialize_logits_processor_entries",
    "usage",
]


class EngineMetrics(Protocol):
    """What `register_prometheus` is given. Do not keep it beyond that call."""

    @property
    def auto_labels(self) -> Mapping[str, str]:
        """Labels that identify this worker; add them to every sample of your own registry."""

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        """Append `callback()`, Prometheus exposition text, at every scrape."""


class BaseEngine(ABC):
    """What every engine has, whatever it produces."""

    @classmethod
    @abstractmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        """Read the command line into an engine that is not started, and the worker's configuration.

        `argv=None` means `sys.argv[1:]`. Load nothing heavy here: a bad flag should fail in a moment.
        """

    @abstractmethod
    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model and become able to serve. Called once; a signal meanwhile does not cancel it.

        `worker_id` is an opaque unsigned 64-bit number, unique per replica and stable for its life. Raise
        `EngineShutdown` when the engine cannot come up; `cleanup()` then runs once on whatever exists.
        """

    @abstractmethod
    async def cleanup(self) -> None:
        """Release everything. Must be safe twice, and on an engine whose `start` failed or never ran.

        Called at most once by the worker, after the streams were given time to end; what still runs should be told
        to end here. An exception is logged, never retried.
        """

    async def register_prometheus(self, metrics: EngineMetrics) -> None:
        """Connect the engine's own metrics; once, after `start`. Raising fails the start-up."""

    def component_metrics_dp_ranks(self) -> list[int]:
        """The data-parallel ranks that will publish snapshots; the same list at every call. []: none."""
        return []

    def attach_snapshot_publisher(self, publisher: SnapshotPublisher) -> None:
        """Receive the publisher for the ranks above; once. Usable from any thread until `cleanup` returns."""

    async def on_endpoint_ready(self, endpoint: Endpoint) -> None:
        """The serving endpoint exists and the model is not registered yet. Raising fails the start-up."""

    async def health_check_payload(self) -> dict[str, Any] | None:
        """A tiny request that proves the engine alive, or None for no canary. See `health_check`."""
        return None

    async def abort(self, context: Context) -> None:
        """The request was cancelled: tell the engine. At most once per request, concurrently with its generator.

        Never called for a stream that ended by itself. Needed only where `generate` cannot see the cancellation
        itself; exceptions are logged at debug level.
        """

    async def drain(self) -> None:
        """Finish what must not be cut (transfers to peers, say). Once, at shutdown, after new requests have stopped."""

    async def is_quiescent(self) -> bool | None:
        """Whether no peer still needs this worker's memory; polled at the shutdown of a prefill worker if overridden.

        None: not known.
        """
        return None


class LLMEngine(BaseEngine):
    """An engine that turns token ids into token ids."""

    @abstractmethod
    def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        """Stream one completion; implement it as `async def` with `yield`. Calls run concurrently.

        Each chunk holds only new token ids. The last one, and no other, has `finish_reason`; if it has
        `completion_usage`, that counts every token yielded. The engine enforces `max_tokens` itself. Once
        `context.is_stopped()`, yield a last chunk with reason "cancelled" within one step and return. The generator is
        closed promptly on every path, so `try/finally` is the place to release a request's resources.

        Raises:
            InvalidArgument: the request cannot be served; the message reaches the client.
            EngineShutdown: this engine is gone; another worker may continue the request.
        """

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Where this engine's KV-cache events come from, one per data-parallel rank; the same ranks at every call."""
        return []

    def supported_controls(self) -> set[str]:
        """Names served as `POST /engine/control/<name>`."""
        return set()

    def supported_updates(self) -> set[str]:
        """Names served as `POST /engine/update/<name>`. `model_taints` is the framework's own."""
        return set()

    async def engine_control(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Serve one control. A failure the caller should read is a body with `"status": "error"`."""
        return {"status": "error", "message": f"unsupported engine control: {name}"}

    async def engine_update(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Serve one update; as `engine_control`."""
        return {"status": "error", "message": f"unsupported engine update: {name}"}

    async def logits_processor_spec(self) -> LogitsProcessorSpec | None:
        """The logits processors every request gets; read by the engine integration itself."""
        return None


class RawEngine(BaseEngine):
    """An engine that takes the OpenAI-shaped body and yields JSON objects; the end of the generator is the end."""

    @abstractmethod
    def generate(self, request: RawRequest, context: Context) -> AsyncGenerator[RawResponseChunk, None]:
        """Stream one answer; every object reaches the client verbatim. Calls run concurrently.

        There is no terminal chunk and no usage. Watch `context.is_stopped()` and return when it is.
        """


class DiffusionEngine(RawEngine):
    """A raw engine that makes images, video or audio; a name for readers, it adds nothing."""
