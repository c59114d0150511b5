"""One request and its answer on an HTTP connection: ASGI's `receive` and `send`, and two shorter ways to write."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from dynamo.runtime.write_batch import WriteBatch

if TYPE_CHECKING:
    from dynamo.runtime.http.connection import HttpConnection

__all__ = [
    "LEAVE_EXTENSION",
    "PUSH_EXTENSION",
    "RESPOND_EXTENSION",
    "SPLICE_EXTENSION",
    "Application",
    "Cycle",
    "Gate",
    "Splicer",
    "status_line",
]

logger = logging.getLogger(__name__)

LEAVE_EXTENSION: Final = "dynamo.on_leave"
PUSH_EXTENSION: Final = "dynamo.push"
RESPOND_EXTENSION: Final = "dynamo.respond"
SPLICE_EXTENSION: Final = "dynamo.splice"

HIGH_WATER_BYTES: Final = 64 * 1024  # of a body that the application has not received yet; then the socket is not read

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Application = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

_BAD_NAME: Final = re.compile(rb"[^!#$%&'*+\-.^_`|~0-9A-Za-z]")
_BAD_VALUE: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_CLOSE: Final = (b"connection", b"close")
_CHUNK_HEADS: Final = tuple([b"%x\r\n" % size for size in range(1024)])  # of all chunks but few
_status_lines: dict[int, bytes] = {}


def status_line(status: int) -> bytes:
    """Return the first line of an answer. Any number of three digits: an operator may choose one that has no phrase."""
    line = _status_lines.get(status)
    if line is None:
        phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
        line = _status_lines[status] = f"HTTP/1.1 {status:03d} {phrase}\r\n".encode()
    return line


class Gate:
    """Whether the socket is read and written; `drain` waits for room."""

    __slots__ = ("_room", "_transport", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._room = asyncio.Event()
        self._room.set()
        self.read_paused = self.write_paused = False

    async def drain(self) -> None:
        """Return when the client has read enough, or is gone."""
        await self._room.wait()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._room.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._room.set()


class Cycle:
    """From the head of a request to the end of its answer."""

    __slots__ = (
        "_batch",
        "_body",
        "_changed",
        "_connection",
        "_gate",
        "_leave",
        "_left",
        "disconnected",
        "expects_continue",
        "is_pushable",
        "keep_alive",
        "more_body",
        "response_complete",
        "response_started",
        "scope",
    )

    def __init__(
        self, connection: HttpConnection, gate: Gate, scope: Scope, *, keep_alive: bool, expects_continue: bool = False
    ) -> None:
        self._connection, self._gate = connection, gate
        self._batch = WriteBatch.of_this_loop()
        self._body = b""
        self._changed = asyncio.Event()  # more of the body came, or the client left, or the answer is complete
        self._leave: Callable[[], None] | None = None  # called when the client leaves before its answer is complete
        self._left: int | None = 0  # of the announced content; None: chunked
        self.is_pushable = False
        """Whether a chunk may be pushed if the client keeps up: between the head and the end of a chunked body whose client is there."""
        self.scope = scope
        self.keep_alive, self.expects_continue = keep_alive, expects_continue
        self.more_body = True
        self.disconnected = self.response_started = self.response_complete = False

    # -- the application -----------------------------------------------------------------------------------------

    async def run(self, app: Application) -> None:
        """Let the application answer; one that fails or forgets to is a 500, or a connection that is cut."""
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                logger.error("the application failed while it answered a request", exc_info=error)
            self._give_up()
            if not isinstance(error, Exception):
                raise
        else:
            if not self.response_complete and not self.disconnected:
                logger.error("the application returned without a complete answer; the connection is closed")
                self._give_up()

    def _give_up(self) -> None:
        if self.disconnected or self.response_complete:
            return
        body = b"Internal Server Error"
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body)), _CLOSE]
        if self.response_started or not self._write_whole(500, headers, body):
            self._connection.transport.close()

    async def receive(self) -> Message:
        if self.expects_continue:
            self.expects_continue = False
            if not self._connection.transport.is_closing():
                self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.disconnected and not self.response_complete:
            self._gate.resume_reading()
            await self._changed.wait()
            self._changed.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self._body = self._body, b""
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        if self._gate.write_paused and not self.disconnected:
            await self._gate.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if not self.response_started:
            if kind != "http.response.start":
                raise RuntimeError(f"expected 'http.response.start' from the application, got {kind!r}")
            self._start(message["status"], message.get("headers", ()))
        elif not self.response_complete:
            if kind != "http.response.body":
                raise RuntimeError(f"expected 'http.response.body' from the application, got {kind!r}")
            self._send_body(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"got {kind!r} from the application after its answer was complete")

    def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._connection.transport.write(self._head(status, headers))

    def _head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Write down the head, and note how the body is framed. Raises RuntimeError for a header that is none."""
        default = self._connection.default_headers
        parts = [status_line(status)]
        length: int | None = None
        is_closing = False
        for name, value in (*default, *headers) if default else headers:
            if _BAD_NAME.search(name) or _BAD_VALUE.search(value):
                raise RuntimeError(f"the application sent a header that is none: {name!r}")
            name = name.lower()
            if name == b"content-length":
                length = int(value)
            elif name == b"connection" and value.lower() == b"close":
                is_closing = True
            elif name == b"transfer-encoding":
                continue  # the framing is decided here
            parts.append(b"%b: %b\r\n" % (name, value))
        has_body = status not in (204, 304) and status >= 200
        if length is not None or not has_body or self.scope["method"] == "HEAD":
            self._left = length or 0
        elif self.scope["http_version"] == "1.0":
            self.keep_alive = False  # the end of the body is the end of the connection
            self._left = -1
        else:
            self._left = None
            self.is_pushable = True
            parts.append(b"transfer-encoding: chunked\r\n")
        if is_closing:
            self.keep_alive = False
        elif not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        self.response_started = True
        self.expects_continue = False
        return b"".join(parts)

    def _send_body(self, body: bytes, more: bool) -> None:
        transport, left = self._connection.transport, self._left
        if self.scope["method"] == "HEAD":
            self._left = left = 0
        elif left is None:
            end = b"" if more else b"0\r\n\r\n"
            transport.write(b"%x\r\n%b\r\n%b" % (len(body), body, end) if body else end)
        elif left < 0:
            transport.write(body)
        else:
            if len(body) > left:
                raise RuntimeError("the application sent a longer body than its content-length")
            self._left = left = left - len(body)
            transport.write(body)
        if not more:
            if left is not None and left > 0:
                raise RuntimeError("the application sent a shorter body than its content-length")
            self._complete()

    def _complete(self) -> None:
        self.response_complete = True
        self.is_pushable = False
        self._leave = None
        self._changed.set()
        self.scope.pop("extensions", None)  # else each request were a circle that only the collector could free
        if not self.keep_alive:
            self._connection.close_after_answer()
        self._connection.answered()

    # -- the short ways ------------------------------------------------------------------------------------------

    def extensions(self) -> dict[str, Any]:
        """Return the extensions of ASGI that this listener has beside its own."""
        return {
            PUSH_EXTENSION: self.push,
            SPLICE_EXTENSION: self.splicer,
            RESPOND_EXTENSION: self.respond,
            LEAVE_EXTENSION: self.on_leave,
        }

    def push(self, data: bytes) -> bool:
        """Do what `send` does for one more body chunk, where nothing has to be waited for; the extension `dynamo.push`.

        While a frame of many streams is handed out, the write waits for the end of the frame.
        """
        if not self.is_pushable or self._gate.write_paused:
            return False
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        if self._batch.is_open:
            self._batch.pending.append((self._connection.transport, chunk))
        else:
            self._connection.transport.write(chunk)
        return True

    def splicer(self, opening: bytes, closing: bytes) -> Splicer:
        """Return what pushes body chunks that differ only in their middle; the extension `dynamo.splice`."""
        return Splicer(self, self._connection.transport, self._gate, self._batch, opening, closing)

    def respond(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write a whole answer at once: the second of two writes would be another system call, and often another wake-up of
        the client. The extension `dynamo.respond`; `headers` include the content length."""
        if (
            self._gate.write_paused
            or self.disconnected
            or self.response_started
            or self.scope["method"] == "HEAD"
            or self._connection.default_headers
        ):
            return False
        head = b"".join([b"%b: %b\r\n" % header for header in headers])
        if head.count(b"\n") != len(headers) or head.count(b"\r") != len(headers) or b"\0" in head:
            return False  # `send` names the header that is none
        self.response_started, self.expects_continue = True, False
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        self._connection.transport.write(b"%b%b%b\r\n%b" % (status_line(status), head, closing, body))
        self._complete()
        return True

    def _write_whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        try:
            head = self._head(status, headers)
        except RuntimeError:
            return False  # `send` raises it again
        self._connection.transport.write(head + body if self.scope["method"] != "HEAD" else head)
        self._left = 0
        self._complete()
        return True

    # -- for the connection --------------------------------------------------------------------------------------

    def add_body(self, body: bytes) -> None:
        """Add data of the request's body."""
        if self.response_complete:
            return
        self._body += body
        if len(self._body) > HIGH_WATER_BYTES:
            self._gate.pause_reading()
        self._changed.set()

    def end_body(self) -> None:
        """Complete the request."""
        if not self.response_complete:
            self.more_body = False
            self._changed.set()

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the client leaves before its answer is complete, at once if it has left; the extension
        `dynamo.on_leave`. It takes the place of a task that waits in `receive`: register it once the body is complete."""
        if self.disconnected:
            callback()
        elif not self.response_complete:
            self._leave = callback
            self._gate.resume_reading()  # the end of the connection is read, too

    def disconnect(self) -> None:
        """Handle a client that is gone, or whose further data is not read any more."""
        if not self.response_complete:
            self.disconnected = True
            self.is_pushable = False
            self.scope.pop("extensions", None)
            leave, self._leave = self._leave, None
            if leave is not None:
                leave()
        self._changed.set()


class Splicer:
    """Pushes body chunks that differ only in their middle, one for each token: what never changes is made once, and one object
    has all that a push needs. Valid while its answer is under way."""

    __slots__ = ("_batch", "_closing", "_cycle", "_gate", "_opening", "_size", "_transport", "pushed_at")

    def __init__(
        self,
        cycle: Cycle,
        transport: asyncio.Transport,
        gate: Gate,
        batch: WriteBatch,
        opening: bytes,
        closing: bytes,
    ) -> None:
        self._cycle, self._transport, self._gate, self._batch = cycle, transport, gate, batch
        self._opening, self._closing = opening, closing + b"\r\n"
        self._size = len(opening) + len(closing)
        self.pushed_at = 0.0
        """Loop time of the last push; 0: there was none."""

    def push(self, middle: bytes, now: float) -> bool:
        """Do what `Cycle.push` does for `opening + middle + closing`. `now` is loop time."""
        if not self._cycle.is_pushable or self._gate.write_paused:
            return False
        self.pushed_at = now
        size = self._size + len(middle)
        head = _CHUNK_HEADS[size] if size < 1024 else b"%x\r\n" % size
        chunk = b"".join((head, self._opening, middle, self._closing))
        if self._batch.is_open:
            self._batch.pending.append((self._transport, chunk))
        else:
            self._transport.write(chunk)
        return True
