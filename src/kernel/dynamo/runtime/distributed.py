"""One process's place in the cluster: its planes, its endpoints, its end."""

from __future__ import annotations

import asyncio
import logging
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Protocol

from dynamo.errors import CannotConnect
from dynamo.runtime.base.settings import RuntimeSettings, discovery_store
from dynamo.runtime.base.tasks import AttemptCancelled, Background, SingleFlight
from dynamo.runtime.calls.event_plane.base import EventPlane
from dynamo.runtime.calls.health import HealthState
from dynamo.runtime.calls.progress import ServingProgress
from dynamo.runtime.calls.request_plane.base import RequestPlaneServer
from dynamo.runtime.calls.request_plane.core import ServerCore
from dynamo.runtime.calls.request_plane.memory import MemoryPlane, shared_plane
from dynamo.runtime.calls.request_plane.metrics import CallerMetrics
from dynamo.runtime.client import Client
from dynamo.runtime.discovery.base import Discovery
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.discovery.memory import MemoryDiscovery
from dynamo.runtime.endpoint import Endpoint
from dynamo.runtime.http.status_server import EngineRoute, StatusServer
from dynamo.runtime.lifecycle import RuntimeEvent, RuntimeLife
from dynamo.runtime.observability import Observability
from dynamo.runtime.observe.metrics import MetricsRegistry
from dynamo.runtime.planes import (
    REQUEST_PLANES,
    PlaneParts,
    Planes,
    choose_planes,
    make_discovery,
)
from dynamo.runtime.served_endpoint import ServedEndpoint

logger = logging.getLogger(__name__)

__all__ = [
    "REQUEST_PLANES",
    "Client",
    "DistributedRuntime",
    "Endpoint",
    "ServedEndpoint",
    "create_runtime",
]


class RuntimeClient(Protocol):
    """What ends with a runtime: clients, and what is made of them."""

    async def close(self) -> None: ...

    def count_quarantined(self) -> int:
        """Return how many instances get no requests for now."""
        ...


class DistributedRuntime:
    """Made cheaply, connected by `start` or by the first thing that needs it. Several may share a process.

    All of it belongs to one event loop; only `shutdown` may be called from another thread.
    """

    def __init__(
        self,
        event_loop: asyncio.AbstractEventLoop | None,
        discovery_backend: str | None,
        request_plane: str | None,
        enable_nats: bool | None = None,
        *,
        event_plane: str | None = None,
        response_plane: str | None = None,
        settings: RuntimeSettings | None = None,
        discovery: Discovery | None = None,
        memory_plane: MemoryPlane | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Backends: auto (etcd when ETCD_ENDPOINTS is set, else file), file, mem, etcd, kubernetes; planes: tcp, mem, nats.
        None: as configured.

        Event planes: zmq (the default), nats, mem (the default where the request plane is mem).

        `discovery`, `memory_plane` and `rng` replace what this process would share or draw: tests and simulation.
        Raises ValueError for an unknown name and `CannotConnect` for one that this version cannot reach.
        """
        if enable_nats is not None:
            warnings.warn(
                "enable_nats is ignored; choose request_plane and event_plane", DeprecationWarning, stacklevel=2
            )
        self.settings = settings or RuntimeSettings.from_env()
        loop = event_loop or asyncio.get_running_loop()
        backend = discovery_backend or self.settings.discovery_backend
        names = choose_planes(
            _store_of(discovery) or discovery_store(backend, self.settings.etcd.endpoints),
            request_plane or self.settings.request_plane,
            response_plane or self.settings.response_plane,
            event_plane or self.settings.event_plane,
        )
        store = discovery or make_discovery(backend, self.settings, loop)
        self.observability = Observability(names.store, self.settings, watches_loop=memory_plane is None)
        memory, rng = memory_plane or shared_plane(loop), rng or random.Random()
        self.planes = Planes(PlaneParts(names, store, memory, self.metrics, self.settings, loop=loop, rng=rng))
        self.caller_metrics.quarantined_instances.read_from(self._count_quarantined)
        self._life = RuntimeLife()
        self._starts: SingleFlight[str, None] = SingleFlight()
        self._work = Background()
        self._shutting_down: asyncio.Task[None] | None = None
        self._served: dict[str, ServedEndpoint] = {}
        self._clients: set[RuntimeClient] = set()
        _open.add(self)

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Reach discovery, and start the status server where one is configured. Idempotent. Raises `CannotConnect`."""
        if self._life.is_ending:
            raise CannotConnect("the runtime is closed")
        if self._life.is_connected:
            return
        try:
            await self._starts.run("start", self._start, "runtime start")
        except AttemptCancelled:
            raise CannotConnect("the runtime is closed") from None

    async def _start(self) -> None:
        await self.planes.start()
        await self.observability.start(self.connection_id())
        self._life.is_connected = True

    def shutdown(self) -> None:
        """Request a graceful end: leave discovery, let streams end, disconnect. Returns at once; any thread; idempotent.

        `serve_endpoint` returns when its endpoint has drained; `aclose` waits for all of it.
        """
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self.event_loop():
            self._begin_shutdown()
        else:
            self.event_loop().call_soon_threadsafe(self._begin_shutdown)

    def _begin_shutdown(self) -> None:
        if self._life.apply(RuntimeEvent.SHUTDOWN):
            self._shutting_down = self._work.start(self._shut_down(), "runtime shutdown", is_awaited=True)

    async def _shut_down(self) -> None:
        self.health.begin_shutdown()
        await self.status_server.close()
        served = list(self._served.values())
        logger.info("shutting down: leaving discovery, %d streams in flight", sum(each.inflight for each in served))
        await asyncio.gather(*(each.drain(self.settings.shutdown_seconds) for each in served))
        await self._life.wait_released(self.settings.shutdown_seconds)
        await self._disconnect()

    def hold(self) -> Callable[[], None]:
        """Keep a shutdown from disconnecting until the returned function is called, once: a worker's clean-up may still
        need discovery and the planes. `aclose` does not wait for it."""
        return self._life.hold()

    async def aclose(self) -> None:
        """Leave: wait for a shutdown that was begun, or cut everything at once. Idempotent."""
        if self._shutting_down is not None:
            if self._shutting_down is not asyncio.current_task():
                await asyncio.shield(self._shutting_down)
            return
        self.health.begin_shutdown()
        await self._disconnect()

    async def _disconnect(self) -> None:
        if not self._life.apply(RuntimeEvent.DISCONNECT):
            await self._life.wait_closed()
            return
        self.planes.begin_close()
        try:
            for client in list(self._clients):
                await client.close()
            for served in list(self._served.values()):
                await served.close()
            await self.planes.close_requests()
            await self.observability.close()
            await self._starts.close()  # a store that does not answer must not delay the end
            await self.planes.close()
        finally:
            self._life.apply(RuntimeEvent.DISCONNECTED)
            _open.discard(self)

    async def __aenter__(self) -> DistributedRuntime:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # -- the public surface ------------------------------------------------------------------------------------------

    def endpoint(self, path: str) -> Endpoint:
        """Return the endpoint "ns.comp.ep" (or "dyn://ns.comp.ep"). Raises ValueError for anything but three parts."""
        return Endpoint(self, path)

    def connection_id(self) -> int:
        """Return the id (u64) of every instance of this runtime; keys and labels hold it in hex."""
        return self.discovery.lease_id

    @property
    def discovery(self) -> Discovery:
        """Where instances, model cards and event channels are registered."""
        return self.planes.parts.discovery

    @property
    def rng(self) -> random.Random:
        """What its choices are drawn from."""
        return self.planes.parts.rng

    def event_loop(self) -> asyncio.AbstractEventLoop:
        return self.planes.parts.loop

    def set_health_status(self, ready: bool) -> None:
        """Report the readiness of the whole process."""
        self.health.set_health_status(ready)

    def system_status_server_url(self) -> str | None:
        """Return `http://host:port` of the status server; None while there is none."""
        return self.status_server.url

    def register_engine_route(self, name: str, callback: EngineRoute) -> None:
        """Serve `/engine/{name}` on the status server: `await callback(dict) -> dict`."""
        self.status_server.register_route(name, callback)

    @staticmethod
    def detached() -> DistributedRuntime:
        """Return the runtime this process has open. Raises RuntimeError unless there is exactly one."""
        found = list(_open)
        if len(found) != 1:
            raise RuntimeError(f"this process has {len(found)} runtimes open; pass the one you mean along")
        return found[0]

    # -- its parts ---------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> MetricsRegistry:
        return self.observability.metrics

    @property
    def health(self) -> HealthState:
        return self.observability.health

    @property
    def progress(self) -> ServingProgress:
        return self.observability.progress

    @property
    def status_server(self) -> StatusServer:
        return self.observability.status_server

    @property
    def caller_metrics(self) -> CallerMetrics:
        return self.planes.parts.caller_metrics

    @property
    def event_plane(self) -> str:
        """The name of the event plane."""
        return self.planes.names.events

    @property
    def events(self) -> EventPlane:
        """How events travel; made at the first use, so that a process without events pays nothing."""
        return self.planes.events

    # -- for endpoints and clients -----------------------------------------------------------------------------------

    async def plane_server(self) -> RequestPlaneServer:
        """Return the one listener of this runtime, started. Raises `CannotConnect`, also once a shutdown has begun."""
        if not self._life.is_open:
            raise CannotConnect("the runtime is shutting down")
        await self.start()
        return await self.planes.server(self._watch_requests)

    def _watch_requests(self, core: ServerCore) -> None:
        self.observability.watch_requests(core, self.planes.parts.requests)

    def adopt(self, served: ServedEndpoint) -> None:
        """Add a served endpoint, which ends with this runtime."""
        self._served[served.endpoint.path] = served

    def release(self, served: ServedEndpoint) -> None:
        """Forget a served endpoint that has ended."""
        if self._served.get(served.endpoint.path) is served:
            del self._served[served.endpoint.path]

    def served(self, path: str) -> ServedEndpoint | None:
        """Return the endpoint "ns.comp.ep" if this runtime serves it."""
        return self._served.get(path)

    def remember_client(self, client: RuntimeClient) -> None:
        """Add a client, which is closed with this runtime."""
        self._clients.add(client)

    def forget_client(self, client: RuntimeClient) -> None:
        """Forget a client that was closed."""
        self._clients.discard(client)

    def _count_quarantined(self) -> int:
        """Count the quarantined instances for a scrape, which may run in a thread."""
        return sum(client.count_quarantined() for client in list(self._clients))


_open: weakref.WeakSet[DistributedRuntime] = weakref.WeakSet()


def _store_of(discovery: Discovery | None) -> str | None:
    """Return the name of a store that was given; None where it has to be chosen."""
    if isinstance(discovery, FileDiscovery):
        return "file"
    return "mem" if isinstance(discovery, MemoryDiscovery) else None


def create_runtime(
    settings: RuntimeSettings | None = None, *, loop: asyncio.AbstractEventLoop | None = None
) -> DistributedRuntime:
    """Create a runtime from the environment (or `settings`), on the running loop."""
    return DistributedRuntime(loop or asyncio.get_running_loop(), None, None, settings=settings)
