"""The optional hooks of an engine, in groups. Every group has defaults that mean "nothing to add".

`BaseEngine` and `LLMEngine` inherit them all. An engine that is typed by what it does can name a group of them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from dynamo.contract.kv_events import KvEventSource


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
