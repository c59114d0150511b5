"""One process's place in the cluster: its planes, its endpoints, its end."""

from __future__ import annotations

import asyncio
import logging
import random
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from dynamo.errors import CannotConnect, DynamoException
from dynamo.runtime.addresses import LOCAL_STORES, LOOPBACK, bind_host
from dynamo.runtime.client import Client
from dynamo.runtime.discovery.base import Discovery
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.discovery.memory import MemoryDiscovery, shared_hub
from dynamo.runtime.endpoint import Endpoint, ServedEndpoint
from dynamo.runtime.event_plane.base import EventPlane
from dynamo.runtime.event_plane.memory import shared_event_plane
from dynamo.runtime.event_plane.metrics import EventPlaneMetrics
from dynamo.runtime.health import HealthState
from dynamo.runtime.loop_watchdog import LoopWatchdog
from dynamo.runtime.metrics import MetricsRegistry
from dynamo.runtime.nats_metrics import NatsMetrics
from dynamo.runtime.process_metrics import register_process, register_uptime
from dynamo.runtime.progress import Progress
from dynamo.runtime.request_plane.base import Instance, RequestPlaneClient, RequestPlaneServer
from dynamo.runtime.request_plane.core import ServerCore
from dynamo.runtime.request_plane.memory import TRANSPORT, MemoryPlane, shared_plane
from dynamo.runtime.request_plane.metrics import REFUSALS, CallerMetrics, RefusalMetrics, WorkHandlerMetrics
from dynamo.runtime.request_plane.security import PlaneSecurity
from dynamo.runtime.settings import (
    DISCOVERY_BACKENDS,
    RequestPlaneSettings,
    RuntimeSettings,
    discovery_store,
)
from dynamo.runtime.status_server import EngineRoute, StatusServer

if TYPE_CHECKING:
    from dynamo.runtime.nats_connection import NatsConnection
    from dynamo.runtime.request_plane.native.call_home import CallHomeListener

logger = logging.getLogger(__name__)

__all__ = ["Client", "DistributedRuntime", "Endpoint", "ServedEndpoint", "create_runtime"]

REQUEST_PLANES: Final = ("tcp", "mem", "nats")
NATS_REQUESTS: Final = "--request-plane nats (DYN_REQUEST_PLANE)"
EVENT_PLANES: Final = ("zmq", "nats", "mem")


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
        """Backends: auto (etcd when ETCD_ENDPOINTS is set, else file), file, mem, etcd, kubernetes; planes: tcp, mem.
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
        self.rng = rng or random.Random()
        self._loop = event_loop or asyncio.get_running_loop()
        self._request_plane = _check_planes(
            request_plane or self.settings.request_plane,
            response_plane or self.settings.response_plane,
        )
        self.event_plane = _event_plane(event_plane or self.settings.event_plane, self._request_plane)
        self._memory_plane = memory_plane or shared_plane(self._loop)
        backend = discovery_backend or self.settings.discovery_backend
        self._store = discovery_store(backend, self.settings.etcd.endpoints)
        self.discovery: Discovery = discovery or self._choose_discovery(backend)
        if isinstance(discovery, FileDiscovery | MemoryDiscovery):
            self._store = "file" if isinstance(discovery, FileDiscovery) else "mem"
        self._plane_settings = self.settings.requests
        self._plane_security: PlaneSecurity | None = None
        system = self.settings.system
        self._system = system
        self.metrics = MetricsRegistry()
        self.caller_metrics = CallerMetrics(self.metrics)
        self.canary_settings = self.settings.canary
        self.health = HealthState(starting_ready=system.starting_ready, canary_enabled=self.canary_settings.enabled)
        self.progress = Progress(self.settings.progress.limit_seconds)
        self.status_server = StatusServer(
            self.health, self.metrics, settings=system, default_host=bind_host(self._store, None, "0.0.0.0")
        )
        # Under a memory plane of its own (a simulation) time does not pass as it does for a thread.
        self._watchdog = None if memory_plane is not None else self._make_watchdog()
        self.health.add_trouble(self.progress.trouble)
        self.health.add_detail("load", self._load)
        self._starting: asyncio.Task[None] | None = None
        self._server: RequestPlaneServer | None = None
        self._core: ServerCore | None = None
        self._server_lock = asyncio.Lock()
        self._plane_clients: dict[str, RequestPlaneClient] = {}
        self.plane_client_stand_in: Callable[[RequestPlaneClient], RequestPlaneClient] | None = None  # fault injection
        events = self.settings.events
        self._event_settings = replace(events, host=bind_host(self._store, events.host, "") or None)
        self._events: EventPlane | None = None
        self._nats: NatsConnection | None = None
        self._call_home: CallHomeListener | None = None  # made for the first worker that answers by calling home
        self._served: dict[str, ServedEndpoint] = {}
        self._clients: set[Client] = set()
        self.caller_metrics.quarantined_instances.read_from(self._count_quarantined)
        self._shutting_down: asyncio.Task[None] | None = None
        self._closing: asyncio.Future[None] | None = None
        self._holders = 0
        self._released = asyncio.Event()
        self._released.set()
        _latest.add(self)

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Reach discovery, and start the status server where one is configured. Idempotent. Raises `CannotConnect`."""
        if self._closing is not None:
            raise CannotConnect("the runtime is closed")
        if self._starting is None:
            # Awaited right here by every caller that comes meanwhile.
            self._starting = self._loop.create_task(self._start(), name="runtime start")
        try:
            await asyncio.shield(self._starting)
        except (DynamoException, OSError):
            self._starting = None  # the next caller tries again
            raise

    @property
    def plane_security(self) -> PlaneSecurity:
        """TLS and the secret of the request plane. Raises InvalidArgument naming the variable of an unusable file."""
        if self._plane_security is None:
            self._plane_security = PlaneSecurity.of(self._plane_settings)
        return self._plane_security

    async def _start(self) -> None:
        if self._request_plane != TRANSPORT:
            _ = self.plane_security  # what cannot be used should be said now, and not by the first request
        await self.discovery.start()
        if self._request_plane == "nats":
            await self.nats(NATS_REQUESTS).start()
        if self.event_plane == "nats" or self._event_settings.broker_enabled:
            await self.events.start()  # what was chosen by name is reachable from the beginning, or the start fails
        register_uptime(self.metrics, f"{self.connection_id():x}")
        register_process(self.metrics)
        if self._system.enabled:
            await self.status_server.start()

    def shutdown(self) -> None:
        """Ask for a graceful end: leave discovery, let streams end, disconnect. Returns at once; any thread; idempotent.

        `serve_endpoint` returns when its endpoint has drained; `aclose` waits for all of it.
        """
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            self._begin_shutdown()
        else:
            self._loop.call_soon_threadsafe(self._begin_shutdown)

    def _begin_shutdown(self) -> None:
        if self._shutting_down is None and self._closing is None:
            # Held here and awaited by aclose().
            self._shutting_down = self._loop.create_task(self._shut_down(), name="runtime shutdown")

    async def _shut_down(self) -> None:
        self.health.begin_shutdown()
        await self.status_server.close()
        served = list(self._served.values())
        logger.info("shutting down: leaving discovery, %d streams in flight", sum(each.inflight for each in served))
        await asyncio.gather(*(each.drain(self.settings.shutdown_seconds) for each in served))
        try:
            async with asyncio.timeout(self.settings.shutdown_seconds):
                await self._released.wait()
        except TimeoutError:
            logger.warning("%d workers still hold the runtime; disconnecting all the same", self._holders)
        await self._disconnect()

    def hold(self) -> Callable[[], None]:
        """Keep a shutdown from disconnecting until the returned function is called, once: a worker's clean-up may still
        need discovery and the planes. `aclose` does not wait for it."""
        self._holders += 1
        self._released.clear()

        def release() -> None:
            self._holders -= 1
            if self._holders == 0:
                self._released.set()

        return release

    async def aclose(self) -> None:
        """Leave: wait for a shutdown that was begun, or cut everything at once. Idempotent."""
        if self._shutting_down is not None:
            if self._shutting_down is not asyncio.current_task():
                await asyncio.shield(self._shutting_down)
            return
        self.health.begin_shutdown()
        await self._disconnect()

    async def _disconnect(self) -> None:
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        self._closing = self._loop.create_future()
        try:
            for client in list(self._clients):
                await client.close()
            for served in list(self._served.values()):
                await served.close()
            for plane in self._plane_clients.values():
                await plane.close()
            if self._server is not None:
                await self._server.close()
            self.progress.close()
            if self._watchdog is not None:
                self._watchdog.close()
            await self.status_server.close()
            if self._starting is not None:
                self._starting.cancel()  # a store that does not answer must not delay the end
                await asyncio.wait({self._starting})
            if self._events is not None and self.event_plane != "mem":  # that one is every runtime's on this loop
                await self._events.close()
            if self._nats is not None:
                await self._nats.close()
            await self.discovery.close()
        finally:
            self._closing.set_result(None)
            _latest.discard(self)

    async def __aenter__(self) -> DistributedRuntime:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # -- the public surface --------------------------------------------------------------------------------------

    def endpoint(self, path: str) -> Endpoint:
        """Return the endpoint "ns.comp.ep" (or "dyn://ns.comp.ep"). Raises ValueError for anything but three parts."""
        return Endpoint(self, path)

    def connection_id(self) -> int:
        """Return the id (u64) of every instance of this runtime; keys and labels hold it in hex."""
        return self.discovery.lease_id

    def event_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

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
        found = list(_latest)
        if len(found) != 1:
            raise RuntimeError(f"this process has {len(found)} runtimes open; pass the one you mean along")
        return found[0]

    # -- for endpoints and clients -------------------------------------------------------------------------------

    async def plane_server(self) -> RequestPlaneServer:
        """Return the one listener of this runtime, started. Raises `CannotConnect`, also once a shutdown has begun."""
        if self._shutting_down is not None:
            raise CannotConnect("the runtime is shutting down")
        await self.start()
        async with self._server_lock:
            if self._server is None:
                server, core = self._make_server()
                await server.start()
                self._server, self._core = server, core
                if self._watchdog is not None:
                    self._watchdog.start()
                _expose(core, self.metrics, self._plane_settings, self.progress)
            return self._server

    def _make_server(self) -> tuple[RequestPlaneServer, ServerCore]:
        if self._request_plane == "mem":
            memory = self._memory_plane.server(self._plane_settings)
            return memory, memory.core
        # Imported here: a frontend or a simulation never listens.
        from dynamo.runtime.request_plane.listener import LIMITS, Listener

        refusals = RefusalMetrics(self.metrics, REFUSALS["tcp"], LIMITS)
        if self._request_plane == "nats":
            from dynamo.runtime.request_plane.native.nats_server import NatsServer

            server = NatsServer(
                self.nats(NATS_REQUESTS), self._plane_settings, refused=refusals.count, security=self.plane_security
            )
            return server, server.core
        settings, security = self._plane_settings, self.plane_security
        host = bind_host(self._store, settings.rpc_host, "")
        listener = Listener(host, settings=settings, refused=refusals.count, security=security)
        if settings.rpc_host is None and host == LOOPBACK:
            text = "requests are taken at %s only, as discovery (%s) is of one machine; DYN_TCP_RPC_HOST=0.0.0.0 opens them to the network"
            logger.info(text, LOOPBACK, self._store)
        elif self._store not in LOCAL_STORES and security.server is None and security.secret is None:
            logger.warning(
                "anybody who reaches this worker can send it requests: neither DYN_TCP_TLS_CERT_PATH nor DYN_TCP_SECRET_PATH "
                "is set (docs/security.md)"
            )
        return listener, listener.core

    def _make_watchdog(self) -> LoopWatchdog:
        watchdog = LoopWatchdog(
            self.metrics,
            self.settings.watchdog.threshold_seconds,
            answer_probes=self.status_server.answer_while_blocked,
        )
        self.health.add_trouble(watchdog.trouble)
        self.health.add_detail("last_block", watchdog.describe_last_block)
        return watchdog

    def _load(self) -> dict[str, float]:
        """Return what `/health` shows of the work under way; empty where there is none."""
        progress, core = self.progress, self._core
        queued = 0 if core is None else core.queued
        if not progress.running and not queued:
            return {}
        return {
            "running": progress.running,
            "queued": queued,
            "queue_age_seconds": round(core.queue_age_seconds, 3) if core is not None else 0.0,
            "silent_seconds": progress.silent_seconds,
            "longest_silence_seconds": progress.longest_silence_seconds,
            "loop_lag_seconds": round(progress.loop_lag_seconds, 3),
        }

    def plane_client(self, instance: Instance) -> RequestPlaneClient:
        """Return the client of the plane that reaches an instance."""
        kind = _kind_of(instance)
        client = self._plane_clients.get(kind)
        if client is None:
            if self._closing is not None:
                raise CannotConnect("the runtime is closed")
            client = self._make_client(kind)
            if self.plane_client_stand_in is not None:
                client = self.plane_client_stand_in(client)
            self._plane_clients[kind] = client
        return client

    def _make_client(self, kind: str) -> RequestPlaneClient:
        if kind == TRANSPORT:
            return self._memory_plane.client()
        waited = self.caller_metrics.queue_seconds.observe
        if kind == "mux":
            from dynamo.runtime.request_plane.mux.client import MuxClient

            return MuxClient(
                connect_timeout=self._plane_settings.connect_timeout_seconds,
                waited=waited,
                security=self.plane_security,
            )
        # Imported here: where every worker is ours, no worker calls home.
        from dynamo.runtime.request_plane.native.call_home import CallHomeListener
        from dynamo.runtime.request_plane.native.client import NativeClient

        if self._call_home is None:
            host = bind_host(self._store, self._plane_settings.response_host, "") or None
            self._call_home = CallHomeListener(
                replace(self._plane_settings, response_host=host), self.plane_security.server
            )
        if kind == "native":
            return NativeClient(self._plane_settings, self._call_home, waited=waited, security=self.plane_security)
        from dynamo.runtime.request_plane.native.nats_client import NatsClient

        return NatsClient(
            self.nats(f"the workers reached by it, or run them with {NATS_REQUESTS.replace('nats', 'tcp')}"),
            self._call_home,
            request_timeout_seconds=self._plane_settings.nats_timeout_seconds,
            waited=waited,
        )

    @property
    def events(self) -> EventPlane:
        """How events travel; made at the first use, so that a process without events pays nothing."""
        if self._events is None:
            if self._closing is not None:
                raise CannotConnect("the runtime is closed")
            self._events = self._make_event_plane()
        return self._events

    def _make_event_plane(self) -> EventPlane:
        if self.event_plane == "mem":
            return shared_event_plane(self._loop)
        # Imported here: neither library is needed by a process that only serves requests.
        if self.event_plane == "nats":
            from dynamo.runtime.event_plane.nats import NatsEventPlane

            return NatsEventPlane(
                self.discovery,
                self.nats("--event-plane nats (DYN_EVENT_PLANE)"),
                counts=EventPlaneMetrics(self.metrics),
                rng=self.rng,
                capacity=self._event_settings.subscriber_capacity,
            )
        from dynamo.runtime.event_plane.zmq import ZmqEventPlane

        return ZmqEventPlane(self.discovery, self._event_settings, counts=EventPlaneMetrics(self.metrics), rng=self.rng)

    def nats(self, wanted_by: str) -> NatsConnection:
        """Return the one NATS connection of this runtime, not started yet; `wanted_by` is the flag that needs the
        connection.
        """
        if self._nats is None:
            from dynamo.runtime.nats_connection import NatsConnection

            metrics = NatsMetrics(self.metrics)
            self._nats = NatsConnection(self.settings.nats, wanted_by=wanted_by, count_error=metrics.failed)
        return self._nats

    @property
    def queued_requests(self) -> int:
        """Requests that were admitted and wait for a place."""
        return self._core.queued if self._core is not None else 0

    def adopt(self, served: ServedEndpoint) -> None:
        """Add a served endpoint, which ends with this runtime."""
        self._served[served.endpoint.path] = served

    def release(self, served: ServedEndpoint) -> None:
        if self._served.get(served.endpoint.path) is served:
            del self._served[served.endpoint.path]

    def served(self, path: str) -> ServedEndpoint | None:
        """Return the endpoint "ns.comp.ep" if this runtime serves it."""
        return self._served.get(path)

    def take_streams(self, route: str) -> None:
        """Let native callers send a stream of requests to a routing path that is served."""
        if self._core is not None:
            self._core.stream_paths.add(route)

    def decline(self, route: str) -> None:
        """Decline new requests for a routing path."""
        if self._server is not None:
            self._server.unregister(route)

    def remember_client(self, client: Client) -> None:
        self._clients.add(client)

    def forget_client(self, client: Client) -> None:
        self._clients.discard(client)

    def _count_quarantined(self) -> int:
        """Count the quarantined instances for a scrape, which may run in a thread."""
        return sum(client.count_quarantined() for client in list(self._clients))

    # -- choosing ------------------------------------------------------------------------------------------------

    def _choose_discovery(self, backend: str) -> Discovery:
        backend = backend.lower()
        match discovery_store(backend, self.settings.etcd.endpoints):
            case "file":
                if backend == "etcd":
                    logger.warning(
                        "discovery: etcd was asked for, but ETCD_ENDPOINTS is not set; using files in %s, which serve "
                        "one machine. Say --discovery-backend file (or DYN_DISCOVERY_BACKEND=file) to choose them",
                        self.settings.file_root,
                    )
                if backend == "auto":
                    logger.info(
                        "discovery: files in %s, because ETCD_ENDPOINTS is not set; choose another store with "
                        "--discovery-backend or DYN_DISCOVERY_BACKEND, another directory with DYN_FILE_KV",
                        self.settings.file_root,
                    )
                return FileDiscovery(self.settings.file_root)
            case "mem":
                return MemoryDiscovery(shared_hub(self._loop))
            case "etcd":
                # Imported here, as its client is an extra.
                from dynamo.runtime.discovery.etcd import EtcdDiscovery

                logger.info("discovery: etcd at %s (ETCD_ENDPOINTS)", self.settings.etcd.endpoints)
                return EtcdDiscovery(self.settings.etcd)
            case "kubernetes":
                from dynamo.runtime.discovery.kubernetes import KubernetesDiscovery

                return KubernetesDiscovery(self.settings.kubernetes)
        raise ValueError(f"unknown discovery backend {backend!r}; use one of {', '.join(DISCOVERY_BACKENDS)}")


_latest: weakref.WeakSet[DistributedRuntime] = weakref.WeakSet()


def create_runtime(
    settings: RuntimeSettings | None = None, *, loop: asyncio.AbstractEventLoop | None = None
) -> DistributedRuntime:
    """Create a runtime from the environment (or `settings`), on the running loop."""
    return DistributedRuntime(loop or asyncio.get_running_loop(), None, None, settings=settings)


def _event_plane(asked: str | None, request_plane: str) -> str:
    """Choose the event plane: zmq by default, memory where requests stay in memory. Raises ValueError."""
    chosen = (asked or ("mem" if request_plane == "mem" else "zmq")).lower()
    if chosen not in EVENT_PLANES:
        raise ValueError(f"unknown event plane {chosen!r}; use one of {', '.join(EVENT_PLANES)}")
    return chosen


def _check_planes(request_plane: str, response_plane: str | None) -> str:
    """Return the request plane's name. Raises for unknown names, and for planes that are not built."""
    request_plane = request_plane.lower()
    if request_plane not in REQUEST_PLANES:
        raise ValueError(f"unknown request plane {request_plane!r}; use one of {', '.join(REQUEST_PLANES)}")
    if response_plane == "quic":
        raise CannotConnect(
            "the quic response plane is not built in this version; use --response-plane tcp (or DYN_RESPONSE_PLANE=tcp)"
        )
    return request_plane


def _kind_of(instance: Instance) -> str:
    """Return the kind of client that reaches an instance: `mux` where the instance offers it, else the native wire."""
    if TRANSPORT in instance.transport:
        return TRANSPORT
    if "nats_tcp" in instance.transport:
        return "nats"
    return "mux" if instance.mux is not None else "native"


def _expose(core: ServerCore, registry: MetricsRegistry, settings: RequestPlaneSettings, progress: Progress) -> None:
    """Let the gauges of admission read the core at every scrape, and let the core report what only the core knows."""
    metrics = WorkHandlerMetrics(registry)
    limited = settings.engine_request_limit is not None
    run = settings.engine_request_limit if limited else settings.worker_pool_size
    queue = settings.engine_queue_limit if limited else settings.work_queue_size
    metrics.engine_requests.read_from(lambda: core.running)
    metrics.queued_requests.read_from(lambda: core.queued)
    metrics.pool_active_tasks.read_from(lambda: core.running)
    metrics.queue_depth.read_from(lambda: core.queued)
    metrics.queue_age.read_from(lambda: core.queue_age_seconds)
    metrics.silence.read_from(lambda: progress.silent_seconds)
    metrics.longest_silence.read_from(lambda: progress.longest_silence_seconds)
    metrics.loop_lag.read_from(lambda: progress.loop_lag_seconds)
    metrics.pool_capacity.set(run or 0)
    metrics.queue_capacity.set(queue)

    def rejected() -> None:
        metrics.rejected_requests.inc()
        metrics.enqueue_rejected.inc()

    core.observe(
        waited=metrics.permit_wait_seconds.observe,
        rejected=rejected,
        answered=metrics.time_to_first_response_seconds.observe,
    )


def open_runtimes() -> list[Any]:
    """Return the runtimes of this process that were not closed yet; for leak checks in tests."""
    return list(_latest)
