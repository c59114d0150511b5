"""Which planes there are, which extra of this package each needs, and how each is made: one table for each kind.

Libraries are imported by the factory that needs them: a frontend never listens for requests, a process without events needs
no ZMQ, and where every worker is of this system no worker calls home.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct

from dynamo.errors import CannotConnect
from dynamo.runtime.base.addresses import LOCAL_STORES, LOOPBACK, bind_host
from dynamo.runtime.base.settings import (
    DISCOVERY_BACKENDS,
    EventPlaneSettings,
    RequestPlaneSettings,
    RuntimeSettings,
    discovery_store,
)
from dynamo.runtime.calls.event_plane.base import EventPlane, EventPlaneMetrics
from dynamo.runtime.calls.event_plane.memory import shared_event_plane
from dynamo.runtime.calls.nats_connection import NatsMetrics
from dynamo.runtime.calls.request_plane.base import Instance, RequestPlaneClient, RequestPlaneServer
from dynamo.runtime.calls.request_plane.core import ServerCore
from dynamo.runtime.calls.request_plane.memory import TRANSPORT, MemoryPlane
from dynamo.runtime.calls.request_plane.metrics import REFUSALS, CallerMetrics, RefusalMetrics
from dynamo.runtime.calls.request_plane.security import PlaneSecurity
from dynamo.runtime.discovery.base import Discovery
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.discovery.memory import MemoryDiscovery, shared_hub
from dynamo.runtime.observe.metrics import MetricsRegistry

if TYPE_CHECKING:
    from dynamo.runtime.calls.nats_connection import NatsConnection

logger = logging.getLogger(__name__)

NATIVE_WIRE: Final = "dynamo.runtime.calls.request_plane.native.plane"
NATS_REQUESTS: Final = "--request-plane nats (DYN_REQUEST_PLANE)"
NATS_EVENTS: Final = "--event-plane nats (DYN_EVENT_PLANE)"
NATS_WORKERS: Final = "the workers reached by it, or run them with --request-plane tcp (DYN_REQUEST_PLANE)"

Made = TypeVar("Made", covariant=True)
Parts = TypeVar("Parts", contravariant=True)


class PlaneNames(Struct, frozen=True):
    """The planes that a runtime was made with."""

    store: str  # of discovery
    requests: str
    events: str


@dataclass(frozen=True, slots=True)
class PlaneFactory(Generic[Parts, Made]):
    """How one plane is made, of the parts that the planes of a process share."""

    make: Callable[[Parts], Made]
    extra: str | None = None  # of this package, which brings the library; None: nothing is needed


class PlaneParts:
    """What the planes of one runtime are made of and share: TLS, the connection to NATS, the listener for answers."""

    def __init__(
        self,
        names: PlaneNames,
        discovery: Discovery,
        memory: MemoryPlane,
        metrics: MetricsRegistry,
        settings: RuntimeSettings,
        *,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
    ) -> None:
        self.names, self.discovery, self.memory, self.metrics = names, discovery, memory, metrics
        self.loop, self.rng = loop, rng
        self.settings = settings
        self.made_nats: NatsConnection | None = None

    @property
    def requests(self) -> RequestPlaneSettings:
        return self.settings.requests

    @cached_property
    def events(self) -> EventPlaneSettings:
        """The settings of the event plane, with the address that suits the store."""
        events = self.settings.events
        return replace(events, host=bind_host(self.names.store, events.host, "") or None)

    @cached_property
    def caller_metrics(self) -> CallerMetrics:
        return CallerMetrics(self.metrics)

    @cached_property
    def security(self) -> PlaneSecurity:
        """TLS and the secret of the request plane. Raises InvalidArgument naming the variable of an unusable file."""
        return PlaneSecurity.of(self.requests)

    @cached_property
    def call_home(self) -> object:
        """Where workers that answer by calling home reach this process: the native wire's own, made once."""
        return _of_native_wire("call_home")(self)

    def nats(self, wanted_by: str) -> NatsConnection:
        """Return the one NATS connection, not started yet; `wanted_by` is the flag that needs it, for error messages."""
        if self.made_nats is None:
            from dynamo.runtime.calls.nats_connection import NatsConnection

            count = NatsMetrics(self.metrics).failed
            self.made_nats = NatsConnection(self.settings.nats, wanted_by=wanted_by, count_error=count)
        return self.made_nats


# -- discovery ------------------------------------------------------------------------------------------------------------


class StoreParts(Struct, frozen=True):
    """What a discovery store is made of."""

    settings: RuntimeSettings
    loop: asyncio.AbstractEventLoop


def _etcd(parts: StoreParts) -> Discovery:
    from dynamo.runtime.discovery.etcd import EtcdDiscovery

    logger.info("discovery: etcd at %s (ETCD_ENDPOINTS)", parts.settings.etcd.address)
    return EtcdDiscovery(parts.settings.etcd)


def _kubernetes(parts: StoreParts) -> Discovery:
    from dynamo.runtime.discovery.kubernetes import KubernetesDiscovery

    return KubernetesDiscovery(parts.settings.kubernetes)


DISCOVERY: Final[Mapping[str, PlaneFactory[StoreParts, Discovery]]] = {
    "file": PlaneFactory(lambda parts: FileDiscovery(parts.settings.file_root)),
    "mem": PlaneFactory(lambda parts: MemoryDiscovery(shared_hub(parts.loop))),
    "etcd": PlaneFactory(_etcd, extra="etcd"),
    "kubernetes": PlaneFactory(_kubernetes, extra="kubernetes"),
}


def make_discovery(backend: str, settings: RuntimeSettings, loop: asyncio.AbstractEventLoop) -> Discovery:
    """Make the store of a backend's name, and log what was chosen where the name leaves a choice. Raises ValueError."""
    backend = backend.lower()
    factory = DISCOVERY.get(store := discovery_store(backend, settings.etcd.endpoints))
    if factory is None:
        raise ValueError(f"unknown discovery backend {backend!r}; use one of {', '.join(DISCOVERY_BACKENDS)}")
    if store == "file" and backend == "etcd":
        logger.warning(
            "discovery: etcd is configured, but ETCD_ENDPOINTS is not set; using files in %s, which serve "
            "one machine. Set --discovery-backend file (or DYN_DISCOVERY_BACKEND=file) to choose them",
            settings.file_root,
        )
    if store == "file" and backend == "auto":
        logger.info(
            "discovery: files in %s, because ETCD_ENDPOINTS is not set; choose another store with "
            "--discovery-backend or DYN_DISCOVERY_BACKEND, another directory with DYN_FILE_KV",
            settings.file_root,
        )
    return factory.make(StoreParts(settings, loop))


# -- requests: the worker's side ------------------------------------------------------------------------------------------

CoreServer = tuple[RequestPlaneServer, ServerCore]


def _of_native_wire(name: str) -> Callable[[PlaneParts], Any]:
    """Return what makes a part of the native wire, which is loaded by name and at first use."""
    return lambda parts: getattr(importlib.import_module(NATIVE_WIRE), name)(parts)


def _memory_server(parts: PlaneParts) -> CoreServer:
    server = parts.memory.server(parts.requests)
    return server, server.core


def _tcp_server(parts: PlaneParts) -> CoreServer:
    from dynamo.runtime.calls.request_plane.listener import LIMITS, Listener

    settings, security, store = parts.requests, parts.security, parts.names.store
    refusals = RefusalMetrics(parts.metrics, REFUSALS["tcp"], LIMITS)
    host = bind_host(store, settings.rpc_host, "")
    listener = Listener(host, settings=settings, refused=refusals.count, security=security)
    if settings.rpc_host is None and host == LOOPBACK:
        text = "requests are taken at %s only, as discovery (%s) is of one machine; DYN_TCP_RPC_HOST=0.0.0.0 opens them to the network"
        logger.info(text, LOOPBACK, store)
    elif store not in LOCAL_STORES and security.server is None and security.secret is None:
        logger.warning(
            "this worker takes requests from its whole network: neither DYN_TCP_TLS_CERT_PATH nor DYN_TCP_SECRET_PATH "
            "is set (docs/security.md)"
        )
    return listener, listener.core


REQUEST_SERVERS: Final[Mapping[str, PlaneFactory[PlaneParts, CoreServer]]] = {
    "tcp": PlaneFactory(_tcp_server),
    "mem": PlaneFactory(_memory_server),
    "nats": PlaneFactory(_of_native_wire("nats_server"), extra="nats"),
}

REQUEST_PLANES: Final = tuple(REQUEST_SERVERS)


# -- requests: the caller's side, by how an instance is reached -------------------------------------------------------------


def _mux_client(parts: PlaneParts) -> RequestPlaneClient:
    from dynamo.runtime.calls.request_plane.mux.client import MuxClient

    return MuxClient(
        connect_timeout=parts.requests.connect_timeout_seconds,
        waited=parts.caller_metrics.queue_seconds.observe,
        security=parts.security,
    )


REQUEST_CLIENTS: Final[Mapping[str, PlaneFactory[PlaneParts, RequestPlaneClient]]] = {
    TRANSPORT: PlaneFactory(lambda parts: parts.memory.client()),
    "mux": PlaneFactory(_mux_client),
    "native": PlaneFactory(_of_native_wire("native_client")),
    "nats": PlaneFactory(_of_native_wire("nats_client"), extra="nats"),
}


def _wire_of(instance: Instance) -> str:
    """Return the kind of client that reaches an instance: `mux` where the instance offers it, else the native wire."""
    if TRANSPORT in instance.transport:
        return TRANSPORT
    if "nats_tcp" in instance.transport:
        return "nats"
    return "mux" if instance.mux is not None else "native"


# -- events ---------------------------------------------------------------------------------------------------------------


def _nats_events(parts: PlaneParts) -> EventPlane:
    from dynamo.runtime.calls.event_plane.nats import NatsEventPlane

    return NatsEventPlane(
        parts.discovery,
        parts.nats(NATS_EVENTS),
        counts=EventPlaneMetrics(parts.metrics),
        rng=parts.rng,
        capacity=parts.events.subscriber_capacity,
    )


def _zmq_events(parts: PlaneParts) -> EventPlane:
    from dynamo.runtime.calls.event_plane.zmq import ZmqEventPlane

    return ZmqEventPlane(parts.discovery, parts.events, counts=EventPlaneMetrics(parts.metrics), rng=parts.rng)


EVENTS: Final[Mapping[str, PlaneFactory[PlaneParts, EventPlane]]] = {
    "zmq": PlaneFactory(_zmq_events),
    "nats": PlaneFactory(_nats_events, extra="nats"),
    "mem": PlaneFactory(lambda parts: shared_event_plane(parts.loop)),
}


# -- the choice -----------------------------------------------------------------------------------------------------------


def choose_planes(store: str, requests: str, responses: str | None, events: str | None) -> PlaneNames:
    """Check the names. Events go through memory where requests do, else through ZMQ, unless a plane is named.

    Raises ValueError for an unknown name and CannotConnect for a plane that is not built.
    """
    requests = requests.lower()
    if requests not in REQUEST_SERVERS:
        raise ValueError(f"unknown request plane {requests!r}; use one of {', '.join(REQUEST_PLANES)}")
    if responses == "quic":
        raise CannotConnect(
            "the quic response plane is not built in this version; use --response-plane tcp (or DYN_RESPONSE_PLANE=tcp)"
        )
    events = (events or ("mem" if requests == "mem" else "zmq")).lower()
    if events not in EVENTS:
        raise ValueError(f"unknown event plane {events!r}; use one of {', '.join(EVENTS)}")
    return PlaneNames(store, requests, events)


class Planes:
    """The planes of one runtime. Each is made at its first use, and ends with the runtime."""

    def __init__(self, parts: PlaneParts) -> None:
        self.parts = parts
        self.core: ServerCore | None = None  # of the listener, once there is one
        self.clients: dict[str, RequestPlaneClient] = {}  # by wire
        self.client_stand_in: Callable[[RequestPlaneClient], RequestPlaneClient] | None = None  # fault injection
        self._server: RequestPlaneServer | None = None
        self._server_lock = asyncio.Lock()
        self._events: EventPlane | None = None
        self._closed = False

    @property
    def names(self) -> PlaneNames:
        return self.parts.names

    async def start(self) -> None:
        """Reach what was chosen by name, or fail: from the beginning, and not at the first request."""
        if self.names.requests != TRANSPORT:
            _ = self.parts.security
        await self.parts.discovery.start()
        if self.names.requests == "nats":
            await self.parts.nats(NATS_REQUESTS).start()
        if self.names.events == "nats" or self.parts.events.broker_enabled:
            await self.events.start()

    async def server(self, on_start: Callable[[ServerCore], None]) -> RequestPlaneServer:
        """Return the one listener, started. `on_start` is called once, with its core."""
        async with self._server_lock:
            if self._server is None:
                server, core = REQUEST_SERVERS[self.names.requests].make(self.parts)
                await server.start()
                self._server, self.core = server, core
                on_start(core)
            return self._server

    def take_streams(self, route: str) -> None:
        """Let native callers send a stream of requests to a routing path that is served."""
        if self.core is not None:
            self.core.stream_paths.add(route)

    def decline(self, route: str) -> None:
        """Decline new requests for a routing path."""
        if self._server is not None:
            self._server.unregister(route)

    def client(self, instance: Instance) -> RequestPlaneClient:
        """Return the client of the plane that reaches an instance. Raises CannotConnect once the planes are closed."""
        wire = _wire_of(instance)
        client = self.clients.get(wire)
        if client is None:
            self._check_open()
            client = REQUEST_CLIENTS[wire].make(self.parts)
            if self.client_stand_in is not None:
                client = self.client_stand_in(client)
            self.clients[wire] = client
        return client

    @property
    def events(self) -> EventPlane:
        """How events travel. Raises CannotConnect once the planes are closed."""
        if self._events is None:
            self._check_open()
            self._events = EVENTS[self.names.events].make(self.parts)
        return self._events

    def _check_open(self) -> None:
        if self._closed:
            raise CannotConnect("the runtime is closed")

    def begin_close(self) -> None:
        """Make no further plane."""
        self._closed = True

    async def close_requests(self) -> None:
        """Leave the request plane, both sides."""
        for client in self.clients.values():
            await client.close()
        if self._server is not None:
            await self._server.close()

    async def close(self) -> None:
        """Leave the event plane, NATS and discovery; after `close_requests`."""
        if self._events is not None and self.names.events != "mem":  # that one is every runtime's on this loop
            await self._events.close()
        if self.parts.made_nats is not None:
            await self.parts.made_nats.close()
        await self.parts.discovery.close()
