"""The listener: uvicorn with limits, one signal to drain, a second one to leave at once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dynamo.frontend.app import Frontend
from dynamo.frontend.event_stream import PUSH_EXTENSION
from dynamo.frontend.settings import FrontendSettings

__all__ = ["HttpServer", "PortInUse", "bind", "serve_until_signal"]

logger = logging.getLogger(__name__)

LISTEN_BACKLOG: Final = 2048

LAST_WORDS_SECONDS: Final = 1.0  # for the error events of streams that were cut

_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


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


class _TooLong(Exception):
    """The request line and headers are longer than allowed."""


class _LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with what it lacks: a bound on request line and headers, and one on waiting for a request.

    uvicorn itself closes a connection that is idle after an answer. One that never asks, or stops in the middle of its
    request, is closed here.
    """

    header_limit_bytes = 64 * 1024
    idle_seconds = 75.0
    _header_bytes = 0
    _is_waiting = True  # for a request, or for the rest of one
    _heard_at = 0.0
    _idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)  # type: ignore[arg-type]
        self._heard_at = self.loop.time()
        self._idle = self.loop.call_later(self.idle_seconds, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        super().connection_lost(exc)
        # uvicorn calls this timer off after a close only; after a reset it would keep the connection for as long.
        self._unset_keepalive_if_required()

    def _look(self) -> None:
        """Close a connection we have waited for too long; one timer per connection, not one per read."""
        due = self._heard_at + self.idle_seconds if self._is_waiting else self.loop.time() + self.idle_seconds
        if due <= self.loop.time():
            self._idle = None
            self.transport.close()
        else:
            self._idle = self.loop.call_at(due, self._look)

    def data_received(self, data: bytes) -> None:
        # Until the headers are complete, whatever arrives counts; one read may also bring the body, and is not judged
        # before the parser has seen it.
        self._heard_at = self.loop.time()
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > self.header_limit_bytes and self.transport is not None:
            if not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        if self._header_bytes > self.header_limit_bytes:  # perhaps only because the same read brought a body
            size = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
            if size > self.header_limit_bytes:
                raise _TooLong
        self._header_bytes = -(1 << 62)  # the body has a limit of its own
        super().on_headers_complete()
        if self.cycle is not None:  # its task has not run yet
            extensions: dict[str, Any] = {PUSH_EXTENSION: partial(_push, self.cycle)}
            self.cycle.scope["extensions"] = extensions

    def on_message_begin(self) -> None:
        self._is_waiting = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._header_bytes = 0
        self._is_waiting = False

    def send_400_response(self, msg: str) -> None:
        """What the parser's own errors lead to, and ours from inside its callbacks."""
        if self._header_bytes > self.header_limit_bytes:
            return  # `data_received` answers it
        super().send_400_response(msg)


def _push(cycle: RequestResponseCycle, data: bytes) -> bool:
    """What `send` does for one more body chunk, where nothing has to be waited for; the extension `dynamo.push`."""
    if (
        cycle.flow.write_paused
        or cycle.disconnected
        or cycle.response_complete
        or not cycle.response_started
        or not cycle.chunked_encoding
        or cycle.scope["method"] == "HEAD"
    ):
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


def _protocol_class(settings: FrontendSettings) -> type[_LimitedProtocol]:
    limits = {"header_limit_bytes": settings.header_limit_bytes, "idle_seconds": settings.idle_connection_seconds}
    return type("LimitedProtocol", (_LimitedProtocol,), limits)


class _Uvicorn(uvicorn.Server):
    """Signals are the frontend's business."""

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

    def __init__(self, frontend: Frontend, *, listener: socket.socket | None = None) -> None:
        """`listener`: a bound socket; None binds the address of the settings. Raises `PortInUse`."""
        settings = frontend.settings
        self._frontend = frontend
        self._settings = settings
        self._listener = bind(settings.http_host, settings.http_port) if listener is None else listener
        self.port: int = self._listener.getsockname()[1]
        # uvicorn's table of status lines ends at 599, the overload status may be anything up to 999.
        status = settings.overload_status
        httptools_impl.STATUS_LINE.setdefault(status, b"HTTP/1.1 %d \r\n" % status)
        self._uvicorn = _Uvicorn(self._config(settings))
        self._task: asyncio.Task[None] | None = None

    def _config(self, settings: FrontendSettings) -> uvicorn.Config:
        options: dict[str, Any] = {}
        if settings.tls_cert_path is not None:
            options |= {"ssl_certfile": settings.tls_cert_path, "ssl_keyfile": settings.tls_key_path}
        if settings.tls_client_ca_cert_path is not None:
            options |= {"ssl_ca_certs": settings.tls_client_ca_cert_path, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return uvicorn.Config(
            self._frontend.asgi,
            http=_protocol_class(settings),
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
            **options,
        )

    async def start(self) -> None:
        """Listen; returns when connections are accepted."""
        self._task = asyncio.create_task(
            self._uvicorn.serve([self._listener]), name="frontend: http"
        )  # awaited in stop
        while not self._uvicorn.started:
            if self._task.done():
                await self._task  # raises what went wrong
                raise RuntimeError("the HTTP server ended before it had started")
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Drain, then close: section "Lifecycle" of the docs. In-flight requests get `graceful_shutdown_seconds`."""
        drained = await self._frontend.drain(self._settings.graceful_shutdown_seconds)
        if not drained:
            cut = self._frontend.cut()
            logger.warning("%d request(s) did not end within the shutdown limit and were cut", cut)
            await self._frontend.admission.wait_idle(LAST_WORDS_SECONDS)
        await self.close()

    async def close(self) -> None:
        """Close the listener and every connection now; idempotent."""
        self._frontend.stopping()
        if self._task is not None:
            self._uvicorn.should_exit = True
            await self._task
            self._task = None
        self._listener.close()


async def serve_until_signal(frontend: Frontend, *, listener: socket.socket | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    server = HttpServer(frontend, listener=listener)

    def first(number: signal.Signals) -> None:
        logger.info("%s: draining, no new requests (again to leave at once)", number.name)
        asked.set()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(one)
            signal.signal(one, signal.SIG_DFL)  # what is still in flight is lost then, as asked

    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, first, one)
    try:
        await server.start()
        logger.info("serving HTTP on %s:%d", frontend.settings.http_host, server.port)
        await asked.wait()
        await server.stop()
    finally:
        await server.close()
