"""The listener: uvicorn with limits, one signal to drain, a second one to leave at once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final, Protocol

import uvicorn
from uvicorn.protocols.http import httptools_impl

from dynamo.frontend.app import Frontend
from dynamo.frontend.http.connection import SPARE_CONNECTIONS, protocol_class
from dynamo.frontend.settings import FrontendSettings
from dynamo.runtime.limits import within_descriptors
from dynamo.runtime.tls import ServerTls, TlsFile
from dynamo.runtime.tls_gate import TlsGate

__all__ = ["Connect", "Connections", "HttpServer", "PortInUse", "bind", "serve_until", "serve_until_signal"]

logger = logging.getLogger(__name__)

LISTEN_BACKLOG: Final = 2048

LAST_WORDS_SECONDS: Final = 1.0  # for the error events of streams that were cut

SPARE_DESCRIPTORS: Final = 128  # for connections to workers, files and logs, whatever clients do


class PortInUse(Exception):
    """Somebody else listens on the port."""

    def __init__(self, port: int) -> None:
        super().__init__(
            f"Failed to start HTTP server: port {port} already in use. Use --http-port to specify a different port."
        )
        self.port = port


def bind(host: str, port: int) -> socket.socket:
    """A bound, not yet listening socket. Raises `PortInUse`, or OSError when the host is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by accepted connections: without it the second small write of a stream waits 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(port) from None
        raise
    return listener


Connect = Callable[[socket.socket], Coroutine[Any, Any, None]]
"""Makes an accepted connection one of the server's."""


class Connections(Protocol):
    """Where connections come from that another process has accepted."""

    def open(self, connect: Connect) -> None:
        """From now on `connect` is awaited for every connection."""

    def changed(self, connections: int) -> None:
        """How many connections are open."""

    def close(self) -> None:
        """Take no more; idempotent."""


class _CountedSet(set[Any]):
    """uvicorn's set of open connections, which tells somebody its size."""

    def __init__(self, changed: Callable[[int], None]) -> None:
        super().__init__()
        self._changed = changed

    def add(self, connection: Any) -> None:
        super().add(connection)
        self._changed(len(self))

    def discard(self, connection: Any) -> None:
        super().discard(connection)
        self._changed(len(self))


class _Uvicorn(uvicorn.Server):
    """Signals are the frontend's business, and nothing is done ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Let `serve` end."""
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        # The original looks at the flag and renews the date header every 0.1 s: half of what an idle frontend would cost.
        await self._leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
        frontend: Frontend,
        *,
        listener: socket.socket | None = None,
        deliveries: Connections | None = None,
    ) -> None:
        """`listener`: a bound socket; None binds the address of the settings, unless there are `deliveries`.

        Raises `PortInUse`.
        """
        settings = frontend.settings
        self._frontend = frontend
        self._settings = settings
        self._deliveries = deliveries
        if listener is None and deliveries is None:
            listener = bind(settings.http_host, settings.http_port)
        self._listener = listener
        self.port: int = 0 if listener is None else listener.getsockname()[1]
        # uvicorn's table of status lines ends at 599, the overload status may be anything up to 999.
        status = settings.overload_status
        httptools_impl.STATUS_LINE.setdefault(status, b"HTTP/1.1 %d \r\n" % status)
        self._uvicorn = _Uvicorn(self._config(settings))
        if deliveries is not None:
            self._uvicorn.server_state.connections = _CountedSet(deliveries.changed)
        self._task: asyncio.Task[None] | None = None
        self._gate: TlsGate | None = None

    def _config(self, settings: FrontendSettings) -> uvicorn.Config:
        return uvicorn.Config(
            self._frontend.asgi,
            http=protocol_class(
                settings,
                self._frontend.metrics.refused,
                max_connections=within_descriptors(
                    settings.max_connections, spare=SPARE_DESCRIPTORS + SPARE_CONNECTIONS
                ),
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            log_level="warning",  # its start and stop lines say what ours say already
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=LISTEN_BACKLOG,
            timeout_keep_alive=settings.idle_connection_seconds,
            timeout_graceful_shutdown=1,
        )

    async def start(self) -> None:
        """Listen; returns when connections are accepted. Raises InvalidArgument for a certificate that cannot be used."""
        self._gate = self._make_gate()
        listeners = [] if self._listener is None or self._gate is not None else [self._listener]
        self._task = asyncio.create_task(self._uvicorn.serve(listeners), name="frontend: http")  # awaited in stop
        while not self._uvicorn.started:
            if self._task.done():
                await self._task  # raises what went wrong
                raise RuntimeError("the HTTP server ended before it had started")
            await asyncio.sleep(0)
        if self._deliveries is not None:
            self._deliveries.open(self._connect if self._gate is None else self._gate.admit)
        elif self._gate is not None and self._listener is not None:
            self._gate.listen(self._listener, LISTEN_BACKLOG)

    def _make_gate(self) -> TlsGate | None:
        settings = self._settings
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
            self._make_protocol,
            timeout_seconds=settings.tls_handshake_timeout_seconds,
            limit=settings.max_tls_handshakes,
            refused=self._frontend.metrics.refused,
        )

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # the client has left already
            connection.close()

    def _make_protocol(self) -> asyncio.Protocol:
        """What uvicorn does for each connection that it accepts itself."""
        server = self._uvicorn
        loop = asyncio.get_running_loop()
        make: Any = server.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state, _loop=loop
        )
        return protocol

    async def stop(self) -> None:
        """Drain, then close: section "Lifecycle" of the docs. In-flight requests get `graceful_shutdown_seconds`, after the grace."""
        settings = self._settings
        # Who keeps connections should go elsewhere, and not find one closed under the next request: every answer that
        # begins from now on is the last one of its connection.
        self._uvicorn.server_state.default_headers.append((b"connection", b"close"))
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
        if self._task is not None:
            self._uvicorn.leave()
            await self._task
            self._task = None
        if self._listener is not None:
            self._listener.close()


async def serve_until(server: HttpServer, asked: asyncio.Event, serving: Callable[[], Awaitable[None]]) -> None:
    """Serve until `asked`, then drain. `serving` is awaited once connections are taken."""
    try:
        await server.start()
        await serving()
        await asked.wait()
        await server.stop()
    finally:
        await server.close()


def _grace_words(settings: FrontendSettings) -> str:
    grace = settings.grace_period_seconds
    return f", new requests for {grace:g} s more" if grace > 0 else ", no new requests"


async def serve_until_signal(frontend: Frontend, *, listener: socket.socket | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    server = HttpServer(frontend, listener=listener)

    def first(number: signal.Signals) -> None:
        logger.info("%s: draining%s (again to leave at once)", number.name, _grace_words(frontend.settings))
        asked.set()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(one)
            signal.signal(one, signal.SIG_DFL)  # what is still in flight is lost then, as asked

    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, first, one)

    async def serving() -> None:
        logger.info("serving HTTP on %s:%d", frontend.settings.http_host, server.port)

    await serve_until(server, asked, serving)
