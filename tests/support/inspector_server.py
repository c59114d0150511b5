"""The API of the inspector on a real socket: pictures and patches that a test gives, and what was asked of it."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from dynamo.protocol.inspector.views import Patch, Picture, RequestDetail, RoutingView, StreamView
from support.ports import held_port

END: Final = object()


@dataclass
class InspectorServer:
    """One server. `close` cuts its connections as a killed process does; `open` begins again on the same port."""

    picture: Picture
    detail: RequestDetail | None = None
    explained: RoutingView | None = None
    key: str | None = None
    port: int = 0
    asked: list[tuple[str, str, dict[str, list[str]]]] = field(default_factory=list)
    actions: list[tuple[str, Any]] = field(default_factory=list)
    last_ids: list[str | None] = field(default_factory=list)
    refuse: int | None = None  # a status that every request is answered with
    _watches: list[queue.SimpleQueue[Any]] = field(default_factory=list)
    _sockets: list[socket.socket] = field(default_factory=list)
    _server: ThreadingHTTPServer | None = None
    _thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        inspector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                inspector._sockets.append(self.connection)

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                inspector._get(self)

            def do_POST(self) -> None:
                inspector._post(self)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *_: Any) -> None:
                pass  # its connections are cut by `close`

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.shutdown()
        self._server.server_close()
        for watch in self._watches:
            watch.put(END)
        self._watches.clear()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()
        self._thread.join()

    def push(self, patch: Patch) -> None:
        """Send a patch to everyone who watches."""
        data = msgspec.json.encode(patch)
        for watch in self._watches:
            watch.put(b"event: patch\nid: %d\ndata: %b\n\n" % (patch.seq, data))

    @property
    def watchers(self) -> int:
        return len(self._watches)

    def queries(self, path: str) -> list[dict[str, list[str]]]:
        return [query for _, asked, query in self.asked if asked == path]

    # -- the routes ----------------------------------------------------------------------------------------------------

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        path, query = self._admitted(handler)
        match path.removeprefix("/admin/v1/").split("/"):
            case [""]:
                return
            case ["snapshot"]:
                _answer(handler, 200, msgspec.json.encode(self._seen(query)))
            case ["watch"]:
                self._watch(handler, query)
            case ["requests", _] if self.detail is not None:
                _answer(handler, 200, msgspec.json.encode(self.detail))
            case _:
                _answer(handler, 404, b'{"error": {"message": "there is no such thing"}}')

    def _post(self, handler: BaseHTTPRequestHandler) -> None:
        path, _ = self._admitted(handler)
        body = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length") or 0)) or b"null")
        if not path:
            return
        self.actions.append((unquote(path), body))
        if path == "/admin/v1/routing/explain" and self.explained is not None:
            _answer(handler, 200, msgspec.json.encode({"routing": [self.explained]}))
            return
        _answer(handler, 202, b'{"told": ["694d9a3c5d8f7ea0"]}')

    def _admitted(self, handler: BaseHTTPRequestHandler) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(handler.path)
        path, query = parts.path, parse_qs(parts.query)
        self.asked.append((handler.command, unquote(path), query))
        if self.refuse is not None:
            _answer(handler, self.refuse, b'{"error": {"message": "refused"}}')
            return "", query
        if self.key is not None and handler.headers.get("Authorization") != f"Bearer {self.key}":
            _answer(handler, 401, b'{"error": {"message": "no valid key was given"}}')
            return "", query
        return path, query

    def _seen(self, query: dict[str, list[str]]) -> Picture:
        views = query["views"][0].split(",")
        limit = int(query.get("limit", ["1000000"])[0])
        changes: dict[str, Any] = {
            name: None for name in self.picture.__struct_fields__ if name not in {"seq", "taken_ms", "partial", *views}
        }
        changes["totals"] = dict(self.picture.totals)
        for view in views:
            entries = getattr(self.picture, view)
            if isinstance(entries, list):
                if view == "streams" and "filter" in query:
                    entries = [one for one in entries if _passes(one, query["filter"][0])]
                if len(entries) > limit:
                    changes["totals"][view] = len(entries)
                changes[view] = entries[:limit]
        return msgspec.structs.replace(self.picture, **changes)

    def _watch(self, handler: BaseHTTPRequestHandler, query: dict[str, list[str]]) -> None:
        watch: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.last_ids.append(handler.headers.get("Last-Event-ID"))
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        self._watches.append(watch)
        seen = self._seen(query)
        handler.wfile.write(b": hello\n\nevent: snapshot\nid: %d\ndata: %b\n\n" % (seen.seq, msgspec.json.encode(seen)))
        handler.close_connection = True
        while (data := watch.get()) is not END:
            handler.wfile.write(data)


def _passes(stream: StreamView, filter: str) -> bool:
    """A little of the filter language: `stalled`, and `model:NAME`."""
    return all(
        stream.is_stalled if word == "stalled" else stream.model == word.removeprefix("model:")
        for word in filter.split()
    )


def _answer(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@contextlib.contextmanager
def inspector_server(picture: Picture, **options: Any) -> Iterator[InspectorServer]:
    with held_port() as port:  # also while it is closed
        server = InspectorServer(picture, port=port, **options)
        server.open()
        try:
            yield server
        finally:
            server.close()
