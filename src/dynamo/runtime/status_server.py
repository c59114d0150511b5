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
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

from dynamo.errors import CannotConnect
from dynamo.runtime.addresses import WILDCARDS, detect_host
from dynamo.runtime.blocked_probes import BlockedProbes
from dynamo.runtime.health import HealthState
from dynamo.runtime.metrics import MetricsRegistry
from dynamo.runtime.request_plane.metrics import REFUSALS, RefusalMetrics
from dynamo.runtime.settings import SystemSettings
from dynamo.runtime.status_connection import CLOSE_SECONDS, NO_FILE, Reply, StatusConnection

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

__all__ = ["EngineRoute", "Reply", "StatusServer"]

EngineRoute = Callable[[Any], Awaitable[Any]]
"""`await callback(body)`: the decoded JSON body (`{}` when empty) in, a JSON value out."""

MAX_ROUTES: Final = 1024
MAX_FILES: Final = 4096
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


NOT_FOUND: Final = Reply(404, b"Route not found")
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
        self._connections: set[StatusConnection] = set()
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
            self._server = await loop.create_server(lambda: StatusConnection(self), host, port)
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

    def admit(self, connection: StatusConnection) -> bool:
        if self._server is None or len(self._connections) >= self._settings.max_connections:
            return False
        self._connections.add(connection)
        return True

    def release(self, connection: StatusConnection) -> None:
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
