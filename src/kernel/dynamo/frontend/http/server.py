"""The listener: one signal to drain, a second one to leave at once."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Protocol

from starlette.types import ASGIApp

from dynamo.errors import CannotConnect
from dynamo.frontend.admission.process import Admission
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.request_id import client_request_id
from dynamo.frontend.http.admin import ADMIN_CONNECTIONS, AdminLimits
from dynamo.frontend.http.inspector_access import published_access
from dynamo.frontend.http.settings import HttpSettings
from dynamo.protocol.dialect import OPENAI
from dynamo.protocol.messages.errors import MESSAGES, VERSION_HEADER
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.base.addresses import UnixListener, bound_socket, http_url
from dynamo.runtime.base.http_limits import Rejection
from dynamo.runtime.base.limits import within_descriptors
from dynamo.runtime.base.tls import ServerTls, TlsFile
from dynamo.runtime.base.tls_gate import TlsGate
from dynamo.runtime.http.limits import SPARE_CONNECTIONS
from dynamo.runtime.http.service import HttpService

logger = logging.getLogger(__name__)

LIMITS: Final = (
    "connections",
    "header_size",
    "header_count",
    "header_time",
    "body_size",
    "body_time",
    "body_framing",
    "pending_bodies",
    "pipeline",
    "idle",
    "write_stall",
    "malformed",
    "json_depth",
    "json_containers",
    "json_structure",
    "json_members",
    "body_tokens",
    "json_items",
    "messages",
    "models",
    "card_size",
    "guided_brackets",
    "guided_characters",
    "guided_depth",
    "guided_nodes",
    "guided_references",
    "guided_rules",
    "handshakes",
    "handshake_time",
    "handshake",
)
"""The labels under which refusals are counted."""

LISTEN_BACKLOG: Final = 2048
CLOSE_SECONDS: Final = 1.0  # for answers under way when the listener closes
LAST_WORDS_SECONDS: Final = 1.0  # for the error events of streams that were cut
SPARE_DESCRIPTORS: Final = 128  # for connections to workers, files and logs, whatever clients do
Connect = Callable[[socket.socket], Coroutine[None, None, None]]
"""Makes an accepted connection one of the server's."""


def render_rejection(
    rejection: Rejection, request_headers: Sequence[tuple[bytes, bytes]]
) -> tuple[Mapping[bytes, bytes], bytes]:
    """Write a refusal of the listener in the form of the API's errors."""
    rejected = RequestRejected(
        rejection.status, rejection.text, retry_after_seconds=rejection.retry_after_seconds, limit=rejection.limit
    )
    given = dict(request_headers)
    request_id = client_request_id(given) or str(uuid.uuid4())
    # Of a refused request not even the path may be known; Anthropic's clients name the version of their API in a header.
    dialect = MESSAGES if VERSION_HEADER in given else OPENAI
    headers = {name.lower().encode(): value.encode() for name, value in rejected.headers().items()}
    named = dict.fromkeys(dialect.id_headers, request_id.encode())
    return {b"content-type": b"application/json", **named, **headers}, dialect.error_body(rejected, request_id)


class PortInUse(Exception):
    """Another process listens on the port."""

    def __init__(self, port: int, flag: str = "--http-port") -> None:
        super().__init__(
            f"Failed to start HTTP server: port {port} already in use. Use {flag} to specify a different port."
        )
        self.port = port


def bind(host: str, port: int, *, flag: str = "--http-port") -> socket.socket:
    """Bind a socket that does not listen yet. Raises `PortInUse`, which names `flag`, or OSError when the host is not an
    address of this machine.
    """
    try:
        return bound_socket(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(port, flag) from None
        raise


def bind_admin(settings: HttpSettings) -> socket.socket | None:
    """Return a bound socket for the admin routes, and log its address; None where they have no port of their own.

    Raises `PortInUse`, or `CannotConnect` when the host is not an address of this machine.
    """
    if settings.admin_port is None:
        return None
    host = settings.admin_host
    try:
        listener = bind(host, settings.admin_port, flag="--admin-port")
    except OSError as error:
        raise CannotConnect(f"the admin routes cannot be served at {host} (DYN_ADMIN_HOST): {error}") from error
    logger.info("admin routes at %s", http_url(host, listener.getsockname()[1]))
    return listener


def bind_listeners(settings: HttpSettings) -> list[socket.socket]:
    """Return the sockets of the API, bound and not listening yet: that of the port, and the Unix socket.

    Raises `PortInUse`, OSError when the host is not an address of this machine, and `CannotConnect` for a Unix socket that
    cannot be made.
    """
    found: list[socket.socket] = []
    if settings.http_port is not None:
        found.append(bind(settings.http_host, settings.http_port))
    try:
        if settings.uds is not None:
            found.append(UnixListener(settings.uds))
    except CannotConnect:
        close_listeners(found)
        raise
    return found


def close_listeners(listeners: Iterable[socket.socket]) -> None:
    """Close all of them. Idempotent."""
    for listener in listeners:
        listener.close()


def port_of(listeners: Iterable[socket.socket]) -> int:
    """Return the port of the API; 0: it has none."""
    return next((each.getsockname()[1] for each in listeners if each.family != socket.AF_UNIX), 0)


def log_serving(settings: HttpSettings, port: int) -> None:
    """Log where the API is served from now on. `port`: 0: at no port."""
    if port:
        logger.info("serving HTTP on %s:%d", settings.http_host, port)
    if settings.uds is not None:
        logger.info("serving the Unix socket %s", settings.uds)


class Connections(Protocol):
    """Where connections come from that another process has accepted."""

    def open(self, connect: Connect) -> None:
        """Await `connect` for every connection from now on."""

    def changed(self, connections: int) -> None:
        """Record how many connections are open."""

    def close(self) -> None:
        """Take no more; idempotent."""


class ServedFrontend(Protocol):
    """What the listener needs of a `Frontend`."""

    settings: Any
    asgi: ASGIApp
    admin_asgi: ASGIApp
    metrics: FrontendMetrics
    admission: Admission
    parts: dict[str, Any]

    async def drain(self, timeout_seconds: float, *, grace_seconds: float = 0.0) -> bool:
        """Decline new requests and wait for those in flight; whether all of them ended in time."""

    def cut(self) -> int:
        """End every request in flight; return how many there were."""

    def stopping(self) -> None:
        """Mark the process as neither ready nor alive."""


class HttpServer:
    """One listener for one frontend.

    async with Frontend(...) as frontend:
        server = HttpServer(frontend)
        await server.start()
        ...
        await server.stop()
    """

    def __init__(
        self,
        frontend: ServedFrontend,
        *,
        listeners: Sequence[socket.socket] = (),
        admin: socket.socket | None = None,
        deliveries: Connections | None = None,
    ) -> None:
        """`listeners`: bound sockets; without any, those of the settings are bound, unless there are `deliveries`.

        `admin`: the same for the admin routes, where they have a port of their own. Raises as `bind_listeners`, and
        `CannotConnect` for an admin address that is not ours.
        """
        settings: HttpSettings = frontend.settings
        self._frontend = frontend
        self._deliveries = deliveries
        if not listeners and deliveries is None:
            listeners = bind_listeners(settings)
        if admin is None and deliveries is None:
            admin = bind_admin(settings)
        self._listeners = listeners
        self.port = port_of(listeners)
        limits, spare = settings.limits, SPARE_DESCRIPTORS + SPARE_CONNECTIONS
        self.service = HttpService(
            frontend.asgi,
            replace(limits, max_connections=within_descriptors(limits.max_connections, spare=spare)),
            render=render_rejection,
            refused=frontend.metrics.refused,
            changed=None if deliveries is None else deliveries.changed,
        )
        self._admin_listener = admin
        self.admin_port: int | None = None if admin is None else admin.getsockname()[1]
        """The port of the admin routes; None: they have none of their own. Like `port` it stays what it is."""
        self.admin_service = HttpService(
            frontend.admin_asgi,
            AdminLimits.of(limits),
            render=render_rejection,
            refused=frontend.metrics.refused,
        )
        self._gate: TlsGate | None = None

    async def start(self) -> None:
        """Listen; returns when connections are accepted. Raises InvalidArgument for a certificate that cannot be used."""
        self._gate = self._make_gate()
        if self._admin_listener is not None:
            await self.admin_service.listen(self._admin_listener, ADMIN_CONNECTIONS)
        if self._deliveries is not None:
            self._deliveries.open(self._connect if self._gate is None else self._gate.admit)
        for listener in self._listeners:
            if self._gate is not None:
                self._gate.listen(listener, LISTEN_BACKLOG)
            else:
                await self.service.listen(listener, LISTEN_BACKLOG)

    @contextmanager
    def published_inspector(self) -> Iterator[None]:
        """Let the tools of this user find the inspector, for as long as the block runs."""
        part = self._frontend.parts.get("inspector")
        if part is None:
            yield
            return
        keys = self._frontend.parts.get("keys")
        store = None if keys is None else keys.store
        with published_access(self._frontend.settings, self.port, self.admin_port, part.inspector.token, store):
            yield

    def _make_gate(self) -> TlsGate | None:
        settings = self._frontend.settings
        if settings.tls_cert_path is None or settings.tls_key_path is None:
            return None
        authority = settings.tls_client_ca_cert_path
        tls = ServerTls(
            TlsFile("--tls-cert-path", settings.tls_cert_path),
            TlsFile("--tls-key-path", settings.tls_key_path),
            None if authority is None else TlsFile("--tls-client-ca-cert-path", authority),
        )
        return TlsGate(
            tls,
            self.service.connection,
            timeout_seconds=settings.tls_handshake_timeout_seconds,
            limit=settings.max_tls_handshakes,
            refused=self._frontend.metrics.refused,
        )

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self.service.connection, connection)
        except OSError:  # the client has left already
            connection.close()

    async def stop(self) -> None:
        """Drain, then close: section "Lifecycle" of the docs. In-flight requests get `graceful_shutdown_seconds`, after the grace."""
        settings = self._frontend.settings
        # A client that keeps connections should use another frontend, and not find one closed under the next request: every answer that
        # begins from now on is the last one of its connection.
        self.service.default_headers.append((b"connection", b"close"))
        drained = await self._frontend.drain(
            settings.graceful_shutdown_seconds, grace_seconds=settings.grace_period_seconds
        )
        if not drained:
            cut = self._frontend.cut()
            logger.warning("%d request(s) did not end within the shutdown limit and were cut", cut)
            await self._frontend.admission.wait_idle(LAST_WORDS_SECONDS)
        await self.close()

    async def close(self) -> None:
        """Close the listener and every connection now; idempotent."""
        self._frontend.stopping()
        if self._deliveries is not None:
            self._deliveries.close()
        if self._gate is not None:
            self._gate.close()
        await self.admin_service.close(CLOSE_SECONDS)
        if self._admin_listener is not None:
            self._admin_listener.close()
        await self.service.close(CLOSE_SECONDS)
        close_listeners(self._listeners)


async def serve_until(server: HttpServer, asked: asyncio.Event, serving: Callable[[], Awaitable[None]]) -> None:
    """Serve until `asked`, then drain. `serving` is awaited once connections are taken."""
    try:
        await server.start()
        await serving()
        await asked.wait()
        await server.stop()
    finally:
        await server.close()


def _grace_words(settings: HttpSettings) -> str:
    grace = settings.grace_period_seconds
    return f", new requests for {grace:g} s more" if grace > 0 else ", no new requests"


async def serve_until_signal(
    frontend: ServedFrontend, *, listeners: Sequence[socket.socket] = (), admin: socket.socket | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    server = HttpServer(frontend, listeners=listeners, admin=admin)

    def first(number: signal.Signals) -> None:
        logger.info("%s: draining%s (again to leave at once)", number.name, _grace_words(frontend.settings))
        asked.set()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(one)
            signal.signal(one, signal.SIG_DFL)  # a second signal gives up what is in flight

    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, first, one)

    async def serving() -> None:
        log_serving(frontend.settings, server.port)

    with server.published_inspector():
        await serve_until(server, asked, serving)
