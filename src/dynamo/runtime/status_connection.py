"""One client of the status server: its requests are parsed within limits and answered one after the other."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    import httptools

    from dynamo.runtime.status_server import StatusServer

__all__ = ["CLOSE_SECONDS", "NO_FILE", "Reply", "StatusConnection"]

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 1.0  # for replies under way when the server closes
FILE_CHUNK_BYTES: Final = 256 * 1024
FEED_BYTES: Final = (
    16 * 1024
)  # the parser gets this much at once, so that a long header is noticed before it is assembled


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


NO_FILE: Final = Reply(404, b"Not found")


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    body: bytes
    keep_alive: bool


class StatusConnection(asyncio.Protocol):
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
        if self._server.admit(self):
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
            self._server.release(self)

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
                self._server.release(self)

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
