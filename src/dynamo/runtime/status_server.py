"""The worker's own HTTP listener: health, metrics, engine routes, model card files.

A small server on `httptools`, in this process's event loop. The frontend's server (starlette on uvicorn) would add 4 MB
and an ASGI layer to every worker for a handful of routes without parameters, query strings or streaming. It is an
operator's door all the same, so headers, bodies, pipelines, connections and idle time are bounded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, unquote

from dynamo.errors import CannotConnect
from dynamo.runtime.addresses import WILDCARDS, detect_host
from dynamo.runtime.blocked_probes import BlockedProbes
from dynamo.runtime.health import HealthState
from dynamo.runtime.metrics import MetricsRegistry
from dynamo.runtime.request_plane.metrics import REFUSALS, RefusalMetrics
from dynamo.runtime.settings import SystemSettings

if TYPE_CHECKING:
    import httptools

logger = logging.getLogger(__name__)

__all__ = ["EngineRoute", "Reply", "StatusServer"]

EngineRoute = Callable[[Any], Awaitable[Any]]
"""`await callback(body)`: the decoded JSON body (`{}` when empty) in, a JSON value out."""

CLOSE_SECONDS: Final = 1.0  # for replies under way when the server closes
MAX_ROUTES: Final = 1024
MAX_FILES: Final = 4096
FILE_CHUNK_BYTES: Final = 256 * 1024
FEED_BYTES: Final = (
    16 * 1024
)  # the parser gets this much at once, so that a long header is noticed before it is assembled

LIMITS: Final = (
    "connections",
    "malformed",
    "header_size",
    "header_count",
    "body_size",
    "request_time",
    "pipeline",
    "json_depth",
    "idle",
    "write_stall",
)
"""The names under which refusals are counted."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. All bodies are `text/plain`, as in the native system, also those that are JSON."""

    status: int
    body: bytes = b""
    file: Path | None = None  # instead of `body`
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "text/plain; charset=utf-8"

    @classmethod
    def json(cls, status: int, value: Any) -> Reply:
        """Raises TypeError or ValueError when `value` is no JSON."""
        return cls(status, json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode())

    @classmethod
    def text(cls, status: int, text: str) -> Reply:
        return cls(status, text.encode())


NOT_FOUND: Final = Reply(404, b"Route not found")
NO_FILE: Final = Reply(404, b"Not found")
ENGINE_PREFIX: Final = "/engine/"
METADATA_PREFIX: Final = "/v1/metadata/"


class StatusServer:
    """Serves `/health`, `/live`, `/metrics`, `/engine/...` and `/v1/metadata/...` from `start` to `close`."""

    def __init__(
        self,
        health: HealthState,
        metrics: MetricsRegistry,
        *,
        settings: SystemSettings | None = None,
        discovery_metadata: Callable[[], Any] | None = None,
        advertised_host: str | None = None,
        default_host: str = "0.0.0.0",
    ) -> None:
        """`discovery_metadata` gives the JSON of `/metadata` (kubernetes backend only; None: 404).

        `default_host`: where to listen unless the settings name an address.
        `advertised_host` is what `url` names when the server listens on every address; None: found out.
        """
        self._health = health
        self._metrics = metrics
        self._settings = settings or SystemSettings.from_env()
        self._host = self._settings.host if self._settings.host is not None else default_host
        self._discovery_metadata = discovery_metadata
        self._advertised_host = advertised_host
        self._routes: dict[str, EngineRoute] = {}
        self._files: dict[str, Path] = {}
        self._server: asyncio.Server | None = None
        self._port = 0
        self._connections: set[_Connection] = set()
        self._refusals: RefusalMetrics | None = None
        self._blocked_probes: BlockedProbes | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen; idempotent. Raises `CannotConnect` naming the address when it is taken."""
        if self._server is not None:
            return
        if self._refusals is None:
            self._refusals = RefusalMetrics(self._metrics, REFUSALS["system"], LIMITS)
        loop = asyncio.get_running_loop()
        host, port = self._host, max(self._settings.port, 0)
        try:
            self._server = await loop.create_server(lambda: _Connection(self), host, port)
        except OSError as error:
            raise CannotConnect(
                f"the status server cannot listen on {host}:{port} ({error.strerror or error}); "
                "set DYN_SYSTEM_PORT to a free port, 0 for any, or -1 for none"
            ) from error
        self._port = self._server.sockets[0].getsockname()[1]
        self._blocked_probes = BlockedProbes(
            [socket.socket(fileno=os.dup(each.fileno())) for each in self._server.sockets],
            (self._settings.health_path, self._settings.live_path),
            self._health.body,
        )
        opened = (
            ""
            if self._settings.host is not None or host in WILDCARDS
            else "; DYN_SYSTEM_HOST=0.0.0.0 opens it to the network"
        )
        logger.info("status server on %s%s", self.url, opened)

    async def close(self) -> None:
        """Stop listening and end every connection, and the routes under way; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        if self._blocked_probes is not None:
            self._blocked_probes.close()
        server.close()
        tasks = {task for connection in list(self._connections) if (task := connection.abandon()) is not None}
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        await server.wait_closed()

    def answer_while_blocked(self, is_blocked: Callable[[], bool], seconds: float) -> None:
        """Answer probes in the calling thread for about `seconds`: for a watchdog of a blocked event loop."""
        probes = self._blocked_probes
        if probes is None:
            time.sleep(seconds)
        else:
            probes.answer(is_blocked, seconds)

    @property
    def port(self) -> int:
        """The port it listens on; 0 before `start`."""
        return self._port if self._server is not None else 0

    @property
    def url(self) -> str | None:
        """`http://host:port` as others reach it; None while it does not listen."""
        if self._server is None:
            return None
        host = self._host
        if host in WILDCARDS:
            host = self._advertised_host or detect_host()
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    # -- what is served ----------------------------------------------------------------------------------------------

    def register_route(self, name: str, callback: EngineRoute) -> None:
        """Serve `/engine/{name}`, any method; a second registration replaces the first."""
        name = name.strip("/")
        if not name:
            raise ValueError("an engine route needs a name")
        if name not in self._routes and len(self._routes) >= MAX_ROUTES:
            raise ValueError(f"more than {MAX_ROUTES} engine routes")
        self._routes[name] = callback

    def unregister_route(self, name: str) -> None:
        """Absent is fine. A call under way goes on."""
        self._routes.pop(name.strip("/"), None)

    @property
    def route_names(self) -> list[str]:
        """The engine routes, sorted."""
        return sorted(self._routes)

    def add_metadata_files(
        self, namespace: str, component: str, endpoint: str, slug: str, suffix: str, files: Mapping[str, Path]
    ) -> dict[str, str]:
        """Serve a model card's files, by name, and return the path part of each one's URL.

        `suffix` is `_base` or the LoRA's. Only these very files are reachable: a URL is looked up, never resolved.
        """
        folder = "/".join(quote(part, safe="") for part in (namespace, component, endpoint, slug, suffix))
        paths = {name: f"{METADATA_PREFIX}{folder}/{quote(name, safe='')}" for name in files}
        if len(self._files.keys() | set(paths.values())) > MAX_FILES:
            raise ValueError(f"more than {MAX_FILES} model card files")
        for name, file in files.items():
            self._files[paths[name]] = Path(file)
        return paths

    def remove_metadata_files(self, namespace: str, component: str, endpoint: str, slug: str, suffix: str) -> None:
        """Withdraw a model card's files; absent is fine."""
        folder = "/".join(quote(part, safe="") for part in (namespace, component, endpoint, slug, suffix))
        for path in [path for path in self._files if path.startswith(f"{METADATA_PREFIX}{folder}/")]:
            del self._files[path]

    async def answer(self, method: str, path: str, body: bytes) -> Reply:
        """One request in, one reply out; `path` is still percent-encoded and has no query."""
        if path.startswith(ENGINE_PREFIX):
            return await self._engine(unquote(path[len(ENGINE_PREFIX) :]), body)
        if path.startswith("/v1/loras") and self._settings.lora_enabled:
            return await self._loras(method, path, body)
        reply = await self._read(path)
        if reply is not NOT_FOUND and method not in ("GET", "HEAD"):
            return Reply(405, b"Method not allowed", headers={"allow": "GET, HEAD"})
        return reply

    async def _read(self, path: str) -> Reply:
        if path in (self._settings.health_path, self._settings.live_path):
            body = self._health.body()
            return Reply.json(200 if body["status"] == "ready" else 503, body)
        if path == "/metrics":
            if self._metrics.has_callbacks:  # foreign code that may read files of other processes
                return Reply(200, await asyncio.to_thread(self._metrics.expose))
            return Reply(200, self._metrics.expose())
        if path == "/metadata" and self._discovery_metadata is not None:
            return Reply.json(200, self._discovery_metadata())
        if path.startswith(METADATA_PREFIX):
            file = self._files.get(path) or self._files.get(_canonical(path))
            return NO_FILE if file is None else Reply(200, file=file, content_type="application/octet-stream")
        return NOT_FOUND

    async def _loras(self, method: str, path: str, body: bytes) -> Reply:
        name = unquote(path.removeprefix("/v1/loras").removeprefix("/"))
        match method, bool(name):
            case "GET", False:
                return await self._engine("update/list_loras", b"")
            case "POST", False:
                return await self._engine("update/load_lora", body)
            case "DELETE", True:
                return await self._engine("update/unload_lora", json.dumps({"lora_name": name}).encode())
        return NOT_FOUND

    async def _engine(self, name: str, body: bytes) -> Reply:
        callback = self._routes.get(name)
        if callback is None:
            return Reply.json(404, {"error": "Route not found", "message": f"Route {ENGINE_PREFIX}{name} not found"})
        try:
            request = json.loads(body) if body.strip() else {}
        except RecursionError:
            return self._too_deep()
        except ValueError as error:  # also a UnicodeDecodeError
            return Reply.json(400, {"error": "Invalid JSON", "message": str(error)})
        if _is_deeper(request, self._settings.json_depth_limit):
            return self._too_deep()
        try:
            return Reply.json(200, await callback(request))
        except Exception as error:  # the boundary: the operator gets the reason, the log the traceback
            logger.exception("engine route %s failed", name)
            message = f"Python callback failed: {type(error).__name__}: {error}"
            return Reply.json(500, {"error": "Handler error", "message": message})

    def _too_deep(self) -> Reply:
        self.refused("json_depth")
        text = f"nested deeper than {self._settings.json_depth_limit} levels (DYN_SYSTEM_JSON_DEPTH_LIMIT)"
        return Reply.json(400, {"error": "Invalid JSON", "message": text})

    # -- connections -------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> SystemSettings:
        return self._settings

    def refused(self, limit: str) -> None:
        """Count a refusal."""
        if self._refusals is not None:
            self._refusals.count(limit)

    def _joined(self, connection: _Connection) -> bool:
        if self._server is None or len(self._connections) >= self._settings.max_connections:
            return False
        self._connections.add(connection)
        return True

    def _left(self, connection: _Connection) -> None:
        self._connections.discard(connection)


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether arrays and objects nest deeper than `limit`; level by level, without recursion."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return False
    return any(isinstance(value, dict | list) for value in level)


def _canonical(path: str) -> str:
    return "/".join(quote(unquote(part), safe="") for part in path.split("/"))


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    body: bytes
    keep_alive: bool


class _Connection(asyncio.Protocol):
    """One client: parses requests, answers them one after the other."""

    def __init__(self, server: StatusServer) -> None:
        import httptools

        self._server = server
        self._settings = server.settings
        self._parser: httptools.HttpRequestParser = httptools.HttpRequestParser(self)
        self._malformed, self._upgrade = httptools.HttpParserError, httptools.HttpParserUpgrade
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[_Request] = deque()
        self._task: asyncio.Task[None] | None = None  # awaited by StatusServer.close, ended by connection_lost
        self._writable = asyncio.Event()
        self._writable.set()
        self._refused = False
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._header_count = 0
        self._head_bytes = 0  # of what the parser has handed over
        self._unseen_bytes = 0  # fed while a head was open: the parser assembles one header of any length
        self._head_open = False
        self._wants_continue = False
        self._has_body = False
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._in_request = False

    # -- transport callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        if self._server._joined(self):
            self._watch(self._settings.idle_seconds)
        else:
            limit = self._settings.max_connections
            self._refuse(503, f"More than {limit} connections (DYN_SYSTEM_MAX_CONNECTIONS)", "connections")

    def connection_lost(self, error: Exception | None) -> None:
        self._watch(None)
        self._transport = None
        self._writable.set()
        self._waiting.clear()
        # A route that runs is not cancelled: half a "sleep" is worse than one whose answer nobody reads. The server
        # keeps this connection until then, so that `close` finds the task.
        if self._task is None:
            self._server._left(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not self._in_request:
            self._in_request = True
            self._watch(self._settings.request_timeout_seconds)
        # In small steps, so that the header limit is checked before a long header is assembled.
        view = memoryview(data)
        for start in range(0, len(data), FEED_BYTES):
            if not self._feed(view[start : start + FEED_BYTES]):
                return

    def _feed(self, step: memoryview) -> bool:
        """Parse some bytes; whether the connection goes on."""
        try:
            self._parser.feed_data(step)
        except self._upgrade:
            self._refused = True  # answered as plain HTTP; what follows cannot be understood any more
        except self._malformed:
            if not self._refused:
                self._refuse(400, "Bad request", "malformed")
        if self._head_open:
            self._unseen_bytes += len(step)
            if self._unseen_bytes > self._settings.header_limit_bytes + FEED_BYTES:
                self._count_head(self._settings.header_limit_bytes + 1)
        return not self._refused

    # -- parser callbacks --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._reset()
        self._in_request = self._head_open = True

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1  # trailers, too
        self._count_head(len(name) + len(value) + 4)
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_body = value != b"0"
        limit = self._settings.header_count_limit
        if self._header_count > limit and not self._refused:
            self._refuse(431, f"More than {limit} headers (DYN_SYSTEM_HEADER_COUNT_LIMIT)", "header_count")
        elif (
            name.lower() == b"content-length" and value.isdigit() and int(value[:20]) > self._settings.body_limit_bytes
        ):
            self._refuse_body()
        elif name.lower() == b"expect" and value.lower() == b"100-continue":
            self._wants_continue = True

    def on_headers_complete(self) -> None:
        self._head_open = False
        if self._parser.should_upgrade() and (self._parser.get_method() == b"CONNECT" or self._has_body):
            # The parser would leave the body out.
            self._refuse(
                400, "CONNECT, and bodies of requests that ask for another protocol, are not read", "malformed"
            )
            return
        if self._wants_continue and self._transport is not None and not self._refused and self._task is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._settings.body_limit_bytes:
            self._refuse_body()
        elif not self._refused:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._refused:
            return
        limit = self._settings.pipeline_limit
        if len(self._waiting) >= limit:
            self._refuse(429, f"More than {limit} requests wait (DYN_SYSTEM_PIPELINE_LIMIT)", "pipeline")
            return
        method = self._parser.get_method().decode("ascii", "replace")
        path = self._url.split(b"?", 1)[0].split(b"#", 1)[0].decode("latin-1")
        keep_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        self._waiting.append(_Request(method, path, b"".join(self._body), keep_alive))
        self._reset()
        self._watch(None)
        if self._task is None:
            self._task = self._loop.create_task(self._answer_all(), name="status server reply")

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        limit = self._settings.header_limit_bytes
        if self._head_bytes > limit and not self._refused:
            self._refuse(431, f"The headers exceed {limit} bytes (DYN_SYSTEM_HEADER_LIMIT_KB)", "header_size")

    def _refuse_body(self) -> None:
        limit = self._settings.body_limit_bytes
        if not self._refused:
            self._refuse(413, f"The body exceeds {limit} bytes (DYN_SYSTEM_BODY_LIMIT_MB)", "body_size")

    # -- replies -----------------------------------------------------------------------------------------------------

    async def _answer_all(self) -> None:
        try:
            while self._waiting and not self._is_gone:
                request = self._waiting.popleft()
                try:
                    reply = await self._server.answer(request.method, request.path, request.body)
                except Exception:  # the boundary: a defect of ours is a 500, not a dead connection
                    logger.exception("%s %s failed", request.method, request.path)
                    reply = Reply(500, b"Internal server error")
                await self._send(reply, request)
                if not await self._room():  # or somebody who never reads asks for ever more
                    self._abort()
                    return
                if not request.keep_alive and self._transport is not None:
                    self._transport.close()
                    self._watch(self._settings.write_stall_seconds)
                    return
            if not self._is_gone and not self._in_request:
                self._watch(self._settings.idle_seconds)
        finally:
            self._task = None
            if self._is_gone:
                self._server._left(self)

    async def _send(self, reply: Reply, request: _Request) -> None:
        file, size = None, len(reply.body)
        if reply.file is not None:
            try:
                file = await asyncio.to_thread(reply.file.open, "rb")
                size = (await asyncio.to_thread(reply.file.stat)).st_size
            except OSError as error:
                logger.warning("model card file %s cannot be read: %s", reply.file, error)
                reply, size = NO_FILE, len(NO_FILE.body)
        try:
            if self._transport is None:
                return
            self._transport.write(_head(reply, size, keep_alive=request.keep_alive))
            if request.method == "HEAD":
                return
            if file is None:
                self._transport.write(reply.body)
                return
            while size > 0:
                chunk = await asyncio.to_thread(file.read, min(size, FILE_CHUNK_BYTES))
                if not await self._room() or not chunk:  # the reader left, or stalled, or the file shrank
                    self._abort()
                    return
                size -= len(chunk)
                self._transport.write(chunk)
        finally:
            if file is not None:
                file.close()

    async def _room(self) -> bool:
        """Wait until the client has read enough; False when it is gone, or has not moved for too long."""
        try:
            if not self._writable.is_set():
                async with asyncio.timeout(self._settings.write_stall_seconds):
                    await self._writable.wait()
        except TimeoutError:
            self._server.refused("write_stall")
            return False
        return not self._is_gone

    @property
    def _is_gone(self) -> bool:
        return self._transport is None

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, status: int, text: str, limit: str) -> None:
        self._refused = True
        self._server.refused(limit)
        self._waiting.clear()
        self._watch(None)
        if self._transport is not None:
            if self._task is None:  # in the middle of another reply there is no place for this one
                reply = Reply.text(status, text)
                self._transport.write(_head(reply, len(reply.body), keep_alive=False) + reply.body)
            self._transport.close()
            self._watch(CLOSE_SECONDS)  # for a client that does not read even this

    def abandon(self) -> asyncio.Task[None] | None:
        """End the connection; returns the reply task to wait for, if one runs."""
        self._watch(None)
        task = self._task
        if task is not None:
            task.cancel()
        self._abort()
        return task

    def _watch(self, seconds: float | None) -> None:
        """Close the connection after `seconds` unless called again; None: never."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self._loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if self._in_request and not self._refused:
            self._refuse(408, "The request did not arrive in time (DYN_SYSTEM_REQUEST_TIMEOUT_SECS)", "request_time")
            return
        if not self._refused:
            is_closing = self._transport is not None and self._transport.is_closing()
            self._server.refused("write_stall" if is_closing else "idle")
        self._abort()


def _head(reply: Reply, size: int, *, keep_alive: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}",
        f"content-type: {reply.content_type}",
        f"content-length: {size}",
        *(f"{name}: {value}" for name, value in reply.headers.items()),
        *(() if keep_alive else ("connection: close",)),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
