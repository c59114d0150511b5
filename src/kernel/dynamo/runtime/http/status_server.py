"""The worker's own HTTP listener: health, metrics, engine routes, model card files.

Engine routes change what is served, and no key protects them: they have a listener of their own (`DYN_ADMIN_PORT`), or they
are on this one while it is bound to loopback.

It runs in this process's event loop on the HTTP connections of `runtime.http`, as the frontend does, but without a framework: a
handful of routes without parameters need none. It is an operator's door all the same, so headers, bodies, pipelines,
connections and idle time are bounded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote, unquote

from dynamo.errors import CannotConnect
from dynamo.runtime.base.addresses import LOOPBACK, WILDCARDS, detect_host, http_url, is_loopback
from dynamo.runtime.base.settings import SystemSettings
from dynamo.runtime.calls.health import HealthState
from dynamo.runtime.calls.request_plane.metrics import REFUSALS, RefusalMetrics
from dynamo.runtime.http.blocked_probes import BlockedProbes
from dynamo.runtime.http.engine_routes import ENGINE_PREFIX, LORA_PREFIX, EngineRoute, EngineRoutes
from dynamo.runtime.http.replies import NO_FILE, NOT_FOUND, Reply
from dynamo.runtime.observe.metrics import MetricsRegistry

if TYPE_CHECKING:
    from dynamo.runtime.base.http_limits import Rejection
    from dynamo.runtime.http.cycle import Receive, Scope, Send
    from dynamo.runtime.http.service import HttpService

logger = logging.getLogger(__name__)

__all__ = ["METADATA_PREFIX", "EngineRoute", "MetadataFiles", "Reply", "StatusServer"]

# The files of model cards that a status server hands out.


MAX_FILES: Final = 4096
METADATA_PREFIX: Final = "/v1/metadata/"


class MetadataFiles:
    """Files by URL path. Only these very files are reachable: a path is looked up, never resolved."""

    def __init__(self) -> None:
        self._files: dict[str, Path] = {}

    def add(
        self, namespace: str, component: str, endpoint: str, slug: str, suffix: str, files: Mapping[str, Path]
    ) -> dict[str, str]:
        """Serve a model card's files, by name, and return the path part of each one's URL. Raises ValueError for too many.

        `suffix` is `_base` or the LoRA's.
        """
        folder = "/".join(quote(part, safe="") for part in (namespace, component, endpoint, slug, suffix))
        paths = {name: f"{METADATA_PREFIX}{folder}/{quote(name, safe='')}" for name in files}
        if len(self._files.keys() | set(paths.values())) > MAX_FILES:
            raise ValueError(f"more than {MAX_FILES} model card files")
        for name, file in files.items():
            self._files[paths[name]] = Path(file)
        return paths

    def remove(self, namespace: str, component: str, endpoint: str, slug: str, suffix: str) -> None:
        """Withdraw a model card's files; absent is fine."""
        folder = "/".join(quote(part, safe="") for part in (namespace, component, endpoint, slug, suffix))
        for path in [path for path in self._files if path.startswith(f"{METADATA_PREFIX}{folder}/")]:
            del self._files[path]

    def find(self, path: str) -> Path | None:
        """Return the file of a URL path, whichever of its characters are percent-encoded."""
        return self._files.get(path) or self._files.get(_canonical(path))


def _canonical(path: str) -> str:
    return "/".join(quote(unquote(part), safe="") for part in path.split("/"))


FILE_CHUNK_BYTES: Final = 256 * 1024

_COUNTED_AS: Final = {"header_time": "request_time", "body_time": "request_time", "body_framing": "header_size"}

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


Answer = Callable[[str, str, bytes], Awaitable[Reply]]


class _Address(NamedTuple):
    """Where a server listens, and what others know it by where that is every address."""

    host: str
    advertised: str | None  # None: found out

    def url(self, port: int) -> str:
        """Return `http://host:port` as others reach it."""
        return http_url((self.advertised or detect_host()) if self.host in WILDCARDS else self.host, port)


class _Open(NamedTuple):
    """What listens."""

    service: HttpService
    admin: HttpService | None  # None: the engine routes have no listener of their own
    probes: BlockedProbes


def _port(service: HttpService) -> int:
    port: int = service.sockets[0].getsockname()[1]
    return port


class StatusServer:
    """Serves `/health`, `/live`, `/metrics`, `/v1/metadata/...`, `/engine/...` and `/v1/loras` from `start` to `close`."""

    def __init__(
        self,
        health: HealthState,
        metrics: MetricsRegistry,
        *,
        settings: SystemSettings | None = None,
        discovery_metadata: Callable[[], object] | None = None,
        advertised_host: str | None = None,
        default_host: str = LOOPBACK,
    ) -> None:
        """`discovery_metadata` gives the JSON of `/metadata` (kubernetes backend only; None: 404).

        `default_host`: where to listen unless the settings name an address.
        `advertised_host` is what `url` names when the server listens on every address; None: found out.
        """
        self._health = health
        self._metrics = metrics
        self._settings = settings or SystemSettings.from_env()
        host = self._settings.host if self._settings.host is not None else default_host
        self._address = _Address(host, advertised_host)
        self._discovery_metadata = discovery_metadata
        self._routes = EngineRoutes(depth_limit=self._settings.limits.json_depth_limit, refused=self.refused)
        self._files = MetadataFiles()
        self._open: _Open | None = None
        self._refusals: RefusalMetrics | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen; idempotent. Raises `CannotConnect` naming the address when it is taken."""
        if self._open is not None:
            return
        # Imported here: a process without this server does not need the parser.
        from dynamo.runtime.http.service import HttpService

        if self._refusals is None:
            self._refusals = RefusalMetrics(self._metrics, REFUSALS["system"], LIMITS)
        host, settings = self._address.host, self._settings
        service = HttpService(self._serve, settings.limits, render=_render, refused=self.refused)
        try:
            await service.listen_at(host, max(settings.port, 0))
        except OSError as error:
            raise CannotConnect(
                f"the status server cannot listen on {host}:{settings.port} ({error.strerror or error}); "
                "set DYN_SYSTEM_PORT to a free port, 0 for any, or -1 for none"
            ) from error
        admin: HttpService | None = None
        if settings.admin_port is not None:
            admin = HttpService(self._serve_admin, settings.limits, render=_render, refused=self.refused)
            try:
                await admin.listen_at(settings.admin_host, settings.admin_port)
            except OSError as error:
                await service.close(0)
                raise CannotConnect(
                    f"the admin listener cannot listen on {settings.admin_host}:{settings.admin_port} "
                    f"({error.strerror or error}); set DYN_ADMIN_PORT to a free port, or 0 for any"
                ) from error
        probes = BlockedProbes(
            [socket.socket(fileno=os.dup(each.fileno())) for each in service.sockets],
            (self._settings.health_path, self._settings.live_path),
            self._health.body,
        )
        self._open = _Open(service, admin, probes)
        is_open = self._settings.host is not None or host in WILDCARDS
        logger.info(
            "status server on %s%s", self.url, "" if is_open else "; DYN_SYSTEM_HOST=0.0.0.0 opens it to the network"
        )
        if admin is not None:
            logger.info("engine routes on %s", self.admin_url)
            if not is_loopback(settings.admin_host):
                logger.warning(
                    "the admin port at %s is open to its network, and changes this engine: no key protects it yet; "
                    "DYN_ADMIN_HOST=127.0.0.1 closes it",
                    settings.admin_host,
                )

    async def close(self) -> None:
        """Stop listening and end every connection, and the routes under way; idempotent."""
        opened, self._open = self._open, None
        if opened is None:
            return
        if opened.admin is not None:
            await opened.admin.close(0)
        opened.probes.close()
        await opened.service.close(0)

    def answer_while_blocked(self, is_blocked: Callable[[], bool], seconds: float) -> None:
        """Answer probes in the calling thread for about `seconds`: for a watchdog of a blocked event loop."""
        if self._open is None:
            time.sleep(seconds)
        else:
            self._open.probes.answer(is_blocked, seconds)

    @property
    def port(self) -> int:
        """The port it listens on; 0 before `start`."""
        return 0 if self._open is None else _port(self._open.service)

    @property
    def url(self) -> str | None:
        """`http://host:port` as others reach it; None while it does not listen."""
        return None if self._open is None else self._address.url(_port(self._open.service))

    @property
    def admin_url(self) -> str | None:
        """Return the same of the engine routes; None while they are not served."""
        if self._open is not None and self._open.admin is not None:
            return self._address._replace(host=self._settings.admin_host).url(_port(self._open.admin))
        return self.url if is_loopback(self._address.host) else None

    # -- what is served ----------------------------------------------------------------------------------------------

    def register_route(self, name: str, callback: EngineRoute) -> None:
        """Serve `POST /engine/{name}`; a second registration replaces the first. Raises ValueError."""
        self._routes.register(name, callback)

    def register_reserved_route(self, name: str, method: str, callback: EngineRoute) -> None:
        """Serve one of the worker's own routes below `/engine/`, with GET or POST."""
        self._routes.register_reserved(name, method, callback)

    def unregister_route(self, name: str) -> None:
        """Remove a route; an absent one is fine. A call under way goes on."""
        self._routes.unregister(name)

    @property
    def route_names(self) -> list[str]:
        """The engine routes, sorted."""
        return self._routes.names

    def add_metadata_files(
        self, namespace: str, component: str, endpoint: str, slug: str, suffix: str, files: Mapping[str, Path]
    ) -> dict[str, str]:
        """Serve a model card's files; see `MetadataFiles.add`."""
        return self._files.add(namespace, component, endpoint, slug, suffix, files)

    def remove_metadata_files(self, namespace: str, component: str, endpoint: str, slug: str, suffix: str) -> None:
        """Withdraw a model card's files; absent is fine."""
        self._files.remove(namespace, component, endpoint, slug, suffix)

    async def answer(self, method: str, path: str, body: bytes) -> Reply:
        """Answer one request; `path` is still percent-encoded and has no query."""
        if path.startswith((ENGINE_PREFIX, LORA_PREFIX)):
            if self._settings.admin_port is not None:
                return _elsewhere("it is served on the admin port only (DYN_ADMIN_PORT)")
            if not is_loopback(self._address.host):
                return _elsewhere(
                    "engine routes are not served on a port that is open to a network. Set DYN_ADMIN_PORT (0: any free "
                    "port), which serves them at 127.0.0.1"
                )
            return await self.answer_admin(method, path, body)
        reply = await self._read(path)
        if reply is not NOT_FOUND and method not in ("GET", "HEAD"):
            return Reply(405, b"Method not allowed", headers={"allow": "GET, HEAD"})
        return reply

    async def answer_admin(self, method: str, path: str, body: bytes) -> Reply:
        """Answer a request for what changes the engine; `path` as in `answer`."""
        if path.startswith(ENGINE_PREFIX):
            return await self._routes.call(method, unquote(path[len(ENGINE_PREFIX) :]), body)
        if path.startswith(LORA_PREFIX) and self._settings.lora_enabled:
            return await self._routes.call_loras(method, path, body)
        return NOT_FOUND

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
            file = self._files.find(path)
            return NO_FILE if file is None else Reply(200, file=file, content_type="application/octet-stream")
        return NOT_FOUND

    # -- HTTP --------------------------------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """Open connections."""
        return 0 if self._open is None else len(self._open.service.connections)

    def refused(self, limit: str) -> None:
        """Count a refusal."""
        if self._refusals is not None:
            self._refusals.count(_COUNTED_AS.get(limit, limit))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; the ASGI application of this server."""
        await self._reply(scope, receive, send, self._unless_cross_site(scope, self._address.host, self.answer))

    async def _serve_admin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request at the admin listener."""
        answer = self._unless_cross_site(scope, self._settings.admin_host, self.answer_admin)
        await self._reply(scope, receive, send, answer)

    def _unless_cross_site(self, scope: Scope, listens_at: str, answer: Answer) -> Answer:
        """Return what answers a request: `answer`, or a refusal of what the page of another site sent."""
        from dynamo.runtime.http.cross_site import SEND_JSON, SameSite, is_form

        reason = SameSite(listens_at, self._settings.allowed_hosts).reason(scope["headers"])
        if reason is not None:
            text = f"this request may come from a page of another site: {reason}"
            refusal = Reply.json(403, {"error": "Forbidden", "message": text})
        elif scope["method"] == "POST" and is_form(scope["headers"]):
            text = f"{scope['path']} takes no form, as {SEND_JSON}"
            refusal = Reply.json(415, {"error": "Unsupported Media Type", "message": text})
        else:
            return answer

        async def refuse(_method: str, _path: str, _body: bytes) -> Reply:
            return refusal

        return refuse

    async def _reply(self, scope: Scope, receive: Receive, send: Send, answer: Answer) -> None:
        method = scope["method"]
        body = await self._body(scope["headers"], receive)
        if body is None:
            return
        if isinstance(body, Reply):
            reply = body
        else:
            try:
                reply = await answer(method, scope["raw_path"].decode("latin-1"), body)
            except Exception:  # the boundary: a defect of ours is a 500, not a dead connection
                logger.exception("%s %s failed", method, scope["path"])
                reply = Reply(500, b"Internal server error")
        if reply.file is not None:
            await _send_file(reply, reply.file, scope, send)
        else:
            await _send_head(reply, len(reply.body), send)
            await send({"type": "http.response.body", "body": reply.body})

    async def _body(self, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> bytes | Reply | None:
        """Read the whole body; None where the client left, and a refusal for a body that is too long."""
        limit = self._settings.limits.body_limit_bytes
        announced = dict(headers).get(b"content-length", b"")
        size = int(announced[:20]) if announced.isdigit() else 0
        parts: list[bytes] = []
        if size <= limit:
            size = 0
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                size += len(message["body"])
                parts.append(message["body"])
                if size > limit:
                    break
                if not message["more_body"]:
                    return b"".join(parts)
        self.refused("body_size")
        text = f"The body exceeds {limit} bytes (DYN_SYSTEM_BODY_LIMIT_MB)"
        return Reply(413, text.encode(), headers={"connection": "close"})


def _elsewhere(way: str) -> Reply:
    return Reply.json(404, {"error": "Route not found", "message": f"this route is not here: {way}"})


async def _send_head(reply: Reply, size: int, send: Send) -> None:
    headers = [
        (b"content-type", reply.content_type.encode()),
        (b"content-length", b"%d" % size),
        *((name.encode(), value.encode("latin-1")) for name, value in reply.headers.items()),
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})


def _render(rejection: Rejection, request_headers: object) -> tuple[dict[bytes, bytes], bytes]:
    return {b"content-type": b"text/plain; charset=utf-8"}, rejection.text.encode()


async def _send_file(reply: Reply, path: Path, scope: Scope, send: Send) -> None:
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except OSError as error:
        logger.warning("model card file %s cannot be read: %s; answering 404", path, error)
        await _send_head(NO_FILE, len(NO_FILE.body), send)
        await send({"type": "http.response.body", "body": NO_FILE.body})
        return
    with file:
        size = (await asyncio.to_thread(path.stat)).st_size
        await _send_head(reply, size, send)
        if scope["method"] == "HEAD" or size == 0:
            await send({"type": "http.response.body"})
            return
        # The extensions leave the scope when the client leaves.
        while size > 0 and "extensions" in scope:
            chunk = await asyncio.to_thread(file.read, min(size, FILE_CHUNK_BYTES))
            if not chunk:
                raise OSError(f"model card file {path} became shorter while it was sent")
            size -= len(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": size > 0})
