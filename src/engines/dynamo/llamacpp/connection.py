"""HTTP to llama.cpp's own server over a socket: one connection per request, whose end ends the request."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from pathlib import Path
from typing import Any, Final, cast

import httptools

from dynamo.errors import EngineShutdown

PAUSE_BYTES: Final = 256 * 1024  # answers that wait for their reader; beyond, the socket is not read
DATA: Final = b"data: "
DONE: Final = b"[DONE]"


class LlamaRefusal(Exception):
    """llama.cpp's own error of one request."""

    def __init__(self, status: int, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind


class LlamaConnection(asyncio.Protocol):
    """One request and its answer: a JSON object, or a stream of objects as server-sent events."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._is_stream = False
        self._is_complete = False
        self._is_lost = False
        self._body = bytearray()  # not yet cut into events
        self._events: deque[Any] = deque()
        self._waiting_bytes = 0
        self._wake: asyncio.Future[None] | None = None

    # -- the socket's side --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of a class of its own

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        if self._waiting_bytes > PAUSE_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._notify()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._notify()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._body += data
        if not self._is_stream:
            return
        while (end := self._body.find(b"\n\n")) >= 0:
            event = bytes(self._body[:end])
            del self._body[: end + 2]
            for line in event.split(b"\n"):
                if line.startswith(DATA) and line[len(DATA) :] != DONE:
                    self._events.append(json.loads(line[len(DATA) :]))
                    self._waiting_bytes += len(line)

    def on_message_complete(self) -> None:
        if not self._is_stream and self._body:
            self._events.append(json.loads(self._body))
        self._is_complete = True

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # -- the engine's side --------------------------------------------------------------------------------------------

    def send(self, method: str, path: str, key: str, body: Any = None) -> None:
        """Send the one request of this connection."""
        assert self._transport is not None
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self._transport.write(head.encode() + content)

    async def next(self) -> Any:
        """Return the next object of the answer, or None after the last one and after `close`.

        Raises LlamaRefusal for an error that llama.cpp reports, EngineShutdown when its process is gone.
        """
        while not self._events:
            if self._is_complete or self._transport is None:
                return None
            if self._is_lost:
                raise EngineShutdown("llama.cpp ended the connection in the middle of an answer")
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        event = self._events.popleft()
        if not self._events:
            self._waiting_bytes = 0
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        error = event.get("error") if isinstance(event, dict) else None
        if isinstance(error, dict):
            raise LlamaRefusal(
                int(error.get("code") or self._status or 500),
                str(error.get("message") or error),
                str(error.get("type") or ""),
            )
        if self._status >= 400:
            raise LlamaRefusal(self._status, f"llama.cpp answered with status {self._status}")
        return event

    def close(self) -> None:
        """End the connection: llama.cpp stops working on the request when it writes next. Safe twice."""
        transport, self._transport = self._transport, None
        self._events.clear()
        if transport is not None:
            transport.abort()
        self._notify()


async def open_llama(socket: Path) -> LlamaConnection:
    """Connect. Raises EngineShutdown when nothing listens."""
    try:
        _, connection = await asyncio.get_running_loop().create_unix_connection(LlamaConnection, str(socket))
    except OSError as error:
        raise EngineShutdown(f"llama.cpp is not running: {error}") from error
    return connection


async def call_llama(socket: Path, method: str, path: str, key: str, body: Any = None) -> Any:
    """Return the answer of one plain call. Raises as `LlamaConnection.next` does."""
    connection = await open_llama(socket)
    try:
        connection.send(method, path, key, body)
        return await connection.next()
    finally:
        connection.close()
