"""The contract: what an engine promises to the worker that drives it.

Subclass `LLMEngine`, write `from_args`, `start`, `generate` and `cleanup`, and call `run(MyEngine)`. Everything else
has a default that means "nothing to add". All coroutines run on the event loop that called `Worker.run()`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

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
    from dynamo.contract.kv_events import KvEventSource
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


class Controllable(Protocol):
    """Is administered while it serves, over the worker's status server."""

    def supported_controls(self) -> set[str]:
        """Return the names served as `POST /engine/control/<name>`."""
        return set()

    def supported_updates(self) -> set[str]:
        """Return the names served as `POST /engine/update/<name>`. `model_taints` is the framework's own."""
        return set()

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """Serve one control. A failure that the caller should read is a body with `"status": "error"`."""
        return {"status": "error", "message": f"unsupported engine control: {control}"}

    async def engine_update(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        """Serve one update; as `engine_control`."""
        return {"status": "error", "message": f"unsupported engine update: {update}"}


class PublishesLoad(Protocol):
    """Reports how full its cache is."""

    def component_metrics_dp_ranks(self) -> list[int]:
        """Return the data-parallel ranks that will publish snapshots; the same list at every call. []: none."""
        return []

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Receive the `SnapshotPublisher` (`dynamo._core.backend`) for the ranks above; once.

        Its `publish(dp_rank, ComponentSnapshot(...))` may be called from any thread until `cleanup` returns.
        """
        return  # a body, else type checkers take the method of a Protocol for an abstract one


class PublishesKvEvents(Protocol):
    """Reports which blocks its KV cache holds."""

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return where the KV events come from, one source per data-parallel rank; the same ranks at every call."""
        return []


class Drains(Protocol):
    """Has work at shutdown that must not be cut."""

    async def drain(self) -> None:
        """Finish what must not be cut, such as transfers to peers. Once, at shutdown, after new requests have stopped."""
        return

    async def is_quiescent(self) -> bool | None:
        """Return whether no peer still needs this worker's memory. None: not known.

        Polled at the shutdown of a prefill worker, if overridden.
        """
        return None


class ReportsFailure(Protocol):
    """Reports what went wrong in its own terms: its own end, and the kinds of its exceptions."""

    async def wait_dead(self) -> str:
        """Return the reason once this engine can never serve again, such as a core process that died. Default: never.

        Awaited once, from the moment the worker serves; cancelled at shutdown. The worker then leaves discovery
        at once, ends running streams with `EngineShutdown` (routers move them to another worker), calls `cleanup()` but
        not `drain()`, and ends with status 1. Raising an exception means the same as returning.
        """
        return str(await asyncio.get_running_loop().create_future())

    def map_error(self, error: Exception) -> Exception | None:
        """Return the exception to report in place of one that left `start` or `generate`; None: `error` itself.

        For exceptions of the engine's own kinds: `InvalidArgument` is the caller's fault, `EngineShutdown` has the
        request served elsewhere (with `Disconnected` as its cause it counts as a death that the request may have caused),
        an `HttpError` carries a status. `dynamo.errors` never get here. Fast and without I/O.
        """
        return None


class HasProcesses(Protocol):
    """Declares what the engine's libraries do to the process of the worker."""

    has_child_processes: ClassVar[bool] = False
    """The engine starts processes. They are killed when the worker's process is gone, however that ended."""

    skips_teardown: ClassVar[bool] = False
    """The process may end without the teardown of the interpreter, once `cleanup()` has returned, exit callbacks have run
    and everything buffered is written. Large libraries take seconds for a teardown that has no effect."""


class MetricsHandle(Protocol):
    """What `register_prometheus` receives. Do not keep it beyond that call."""

    @property
    def auto_labels(self) -> Mapping[str, str]:
        """Return the labels that identify this worker; add them to every sample of your own registry."""

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        """Append `callback()`, Prometheus exposition text, at every scrape."""


class BaseEngine(Controllable, PublishesLoad, Drains, ReportsFailure, HasProcesses, ABC):
    """What every engine has, whatever it produces. The optional hooks are grouped above."""

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
