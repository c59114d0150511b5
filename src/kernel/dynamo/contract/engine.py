"""The contract: what an engine promises to the worker that drives it.

Subclass `LLMEngine`, write `from_args`, `start`, `generate` and `cleanup`, and call `run(MyEngine)`. Everything else
has a default that means "nothing to add". All coroutines run on the event loop that called `Worker.run()`.
"""

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
from dynamo.contract.embedding import Embedding, EmbedRequest, Embeds, embedding
from dynamo.contract.engine_config import EngineConfig, LlmRegistration
from dynamo.contract.hooks import (
    Controllable,
    Drains,
    HasProcesses,
    PublishesKvEvents,
    PublishesLoad,
    ReportsFailure,
)
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
from dynamo.runtime.calls.context import Context

if TYPE_CHECKING:
    from dynamo.contract.config import WorkerConfig
    from dynamo.runtime.endpoint import Endpoint

__all__ = [
    "BaseEngine",
    "CompletionUsage",
    "DiffusionEngine",
    "EmbedRequest",
    "Embedding",
    "EngineConfig",
    "ForcedTokenSequenceSpec",
    "GenerateChunk",
    "GenerateRequest",
    "LLMEngine",
    "LlmRegistration",
    "LogitsProcessorEntry",
    "LogitsProcessorSpec",
    "MetricsHandle",
    "PythonProcessorSpec",
    "RawEngine",
    "RawRequest",
    "RawResponseChunk",
    "chunk",
    "deserialize_logits_processor_entries",
    "embedding",
    "final_chunk",
    "is_generation_stage",
    "logits_processors_for_request",
    "serialize_logits_processor_entries",
    "usage",
]


class MetricsHandle(Protocol):
    """What `register_prometheus` receives. Do not keep it beyond that call."""

    @property
    def auto_labels(self) -> Mapping[str, str]:
        """Return the labels that identify this worker; add them to every sample of your own registry."""

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        """Append `callback()`, Prometheus exposition text, at every scrape."""


class BaseEngine(Controllable, PublishesLoad, Drains, ReportsFailure, HasProcesses, ABC):
    """What every engine has, whatever it produces. The optional hooks are grouped in `dynamo.contract.hooks`."""

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

        Called at most once by the worker, after the streams had time to end; end here what still runs. An exception is
        logged, never retried.
        """

    async def register_prometheus(self, metrics: MetricsHandle) -> None:
        """Connect the engine's own metrics; once, after `start`. Raising fails the start-up."""

    async def on_endpoint_ready(self, endpoint: Endpoint) -> None:
        """Use the serving endpoint before the model is registered. Raising fails the start-up."""

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return a tiny request that proves the engine alive, or None for no canary. See `health_check`."""
        return None

    async def abort(self, context: Context) -> None:
        """Stop a request that was cancelled. Called at most once per request, concurrently with its generator.

        Never called for a stream that ended by itself. Needed only where `generate` cannot see the cancellation
        itself; exceptions are logged at debug level.
        """


class LLMEngine(PublishesKvEvents, Embeds, BaseEngine):
    """An engine that turns token ids into token ids, and into vectors where it overrides `embed`."""

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

    async def logits_processor_spec(self) -> LogitsProcessorSpec | None:
        """Return the logits processors of every request; read by the engine integration itself."""
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
