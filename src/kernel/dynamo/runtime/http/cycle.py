"""One request and its answer on an HTTP connection: ASGI's `receive` and `send`, and two shorter ways to write."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from dynamo.runtime.base.write_batch import WriteBatch
from dynamo.runtime.http.head import CHUNKED, TO_THE_END, status_line, write_head

if TYPE_CHECKING:
    from dynamo.runtime.http.connection import HttpConnection
    from dynamo.runtime.http.flow import Gate

logger = logging.getLogger(__name__)

HIGH_WATER_BYTES: Final = 64 * 1024  # of a body that the application has not received yet; then the socket is not read


class RequestBody(Struct, eq=False):
    """What has arrived of a body, until its request is answered or its client has left."""

    _transport: asyncio.Transport
    _gate: Gate
    expects_continue: bool
    """Whether the client waits for a word before it sends the body. Once an answer has begun, it gets none."""
    _arrived: bytes = b""  # and not received yet
    _is_complete: bool = False
    _is_closed: bool = False
    _has_news: bool = False  # more of the body came, or its end, or it was closed: `receive` need not wait
    _news: asyncio.Event | None = None  # made by a `receive` that waits; few have to

    async def receive(self) -> MutableMapping[str, object]:
        """Wait for more of the body, or for its end, or the client's: ASGI's `receive`."""
        if self.expects_continue:
            self.expects_continue = False
            if not self._transport.is_closing():
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._is_closed:
            if self._gate.read_paused:
                self._gate.resume_reading()
            if not self._has_news:
                if self._news is None:
                    self._news = asyncio.Event()
                await self._news.wait()
            self._has_news = False
        if self._is_closed:
            return {"type": "http.disconnect"}
        body, self._arrived = self._arrived, b""
        return {"type": "http.request", "body": body, "more_body": not self._is_complete}

    def add(self, data: bytes) -> None:
        """Take more of the body."""
        if self._is_closed:
            return
        self._arrived += data
        if len(self._arrived) > HIGH_WATER_BYTES:
            self._gate.pause_reading()
        self._wake()

    def end(self) -> None:
        """Complete the body."""
        if not self._is_closed:
            self._is_complete = True
            self._wake()

    def close(self) -> None:
        """Let `receive` report from now on that the client has gone; so it does after a complete answer, too."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        self._has_news = True
        if self._news is not None:
            self._news.set()
            self._news = None


CUT_MESSAGE: Final = "dynamo.http.cut"
"""The type of a message to `send` that ends the connection in place of an answer that has begun and cannot be finished."""
FIRST_BODY: Final = "dynamo.first_body"
"""A member of the message that starts an answer: the first data, and whether more comes. Both are one write then."""

LEAVE_EXTENSION: Final = "dynamo.on_leave"
PUSH_EXTENSION: Final = "dynamo.push"
RESPOND_EXTENSION: Final = "dynamo.respond"
SPLICE_EXTENSION: Final = "dynamo.splice"

Respond = Callable[[int, Sequence[tuple[bytes, bytes]], bytes], bool]
"""What the extension `dynamo.respond` is: it writes a whole answer (status, headers, body) at once, or returns False without
writing anything."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_CLOSE: Final = (b"connection", b"close")
_CHUNK_HEADS: Final = tuple([b"%x\r\n" % size for size in range(1024)])  # of all chunks but few


class Cycle:
    """From the head of a request to the end of its answer. What arrives of the request is `request`; the rest is the answer."""

    __slots__ = (
        "_batch", "_connection", "_gate", "_leave", "_left", "disconnected", "is_pushable", "keep_alive", "request",
        "response_complete", "response_started", "scope",
    )  # fmt: skip

    def __init__(
        self, connection: HttpConnection, gate: Gate, scope: Scope, *, keep_alive: bool, expects_continue: bool = False
    ) -> None:
        self._connection, self._gate = connection, gate
        self._batch = gate.batch
        self._leave: Callable[[], None] | None = None  # called when the client leaves before its answer is complete
        self._left: int | None = 0  # bytes of the announced content that are still to come, or CHUNKED, or TO_THE_END
        self.is_pushable = False
        """Whether a chunk may be pushed if the client keeps up: between the head and the end of a chunked body whose client is there."""
        self.scope = scope
        self.keep_alive = keep_alive
        self.request = RequestBody(connection.transport, gate, expects_continue=expects_continue)
        self.disconnected = self.response_started = self.response_complete = False

    # -- the application -----------------------------------------------------------------------------------------

    async def run(self, app: Application) -> None:
        """Let the application answer; one that fails or forgets to is a 500, or a connection that is cut."""
        try:
            await app(self.scope, self.request.receive, self.send)
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
        if not self.response_started:
            with contextlib.suppress(RuntimeError):  # a header of all answers is not valid
                self._send_body(body, False, self._head(500, headers))
                return
        self._connection.transport.close()

    def _cut(self) -> None:
        self._leave = None  # no client has left
        self._connection.transport.close()
        self.disconnect()

    async def send(self, message: Message) -> None:
        if self._gate.write_paused and not self.disconnected:
            await self._gate.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if not self.response_started:
            if kind != "http.response.start":
                raise RuntimeError(f"expected 'http.response.start' from the application, got {kind!r}")
            head, first = self._head(message["status"], message.get("headers", ())), message.get(FIRST_BODY)
            if first is None:
                self._connection.transport.write(head)
            else:
                self._send_body(first[0], first[1], head)
        elif not self.response_complete:
            if kind == CUT_MESSAGE:
                self._cut()
                return
            if kind != "http.response.body":
                raise RuntimeError(f"expected 'http.response.body' from the application, got {kind!r}")
            self._send_body(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"got {kind!r} from the application after its answer was complete")

    def _head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Write down the head, and note how the body is framed. Raises RuntimeError for a header that is not valid."""
        default, scope = self._connection.default_headers, self.scope
        head, self._left, self.keep_alive = write_head(
            status,
            (*default, *headers) if default else headers,
            method=scope["method"],
            http_version=scope["http_version"],
            keep_alive=self.keep_alive,
        )
        self.is_pushable = self._left is CHUNKED
        self.response_started = True
        self.request.expects_continue = False
        return head

    def _send_body(self, body: bytes, more: bool, head: bytes = b"") -> None:
        left = self._left
        if self.scope["method"] == "HEAD":
            self._left, left, body = 0, 0, b""
        elif left is CHUNKED:
            end = b"" if more else b"0\r\n\r\n"
            body = b"%x\r\n%b\r\n%b" % (len(body), body, end) if body else end
        elif left != TO_THE_END:
            if len(body) > left:
                raise RuntimeError("the application sent a longer body than its content-length")
            self._left = left = left - len(body)
        self._connection.transport.write(head + body)  # without a head that is no copy
        if not more:
            if left is not None and left > 0:
                raise RuntimeError("the application sent a shorter body than its content-length")
            self._complete()

    def _complete(self) -> None:
        self.response_complete = True
        self.is_pushable = False
        self._leave = None
        self.request.close()
        self.scope.pop("extensions", None)  # else each request were a circle that only the collector could free
        if not self.keep_alive:
            self._connection.close_after_answer()
        self._connection.answered()

    # -- the short ways ------------------------------------------------------------------------------------------

    def extensions(self) -> dict[str, object]:
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
        self.response_started, self.request.expects_continue = True, False
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        self._connection.transport.write(b"%b%b%b\r\n%b" % (status_line(status), head, closing, body))
        self._complete()
        return True

    # -- for the connection --------------------------------------------------------------------------------------

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the client leaves before its answer is complete, at once if it has left; the extension
        `dynamo.on_leave`. It takes the place of a task that waits in `receive`: register it once the body is complete."""
        if self.disconnected:
            callback()
        elif not self.response_complete:
            self._leave = callback
            if self._gate.read_paused:
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
            self.request.close()


class Splicer:
    """Pushes body chunks that differ only in their middle, one for each token: what never changes is made once, and one object
    has all that a push needs. Valid while its answer is under way."""

    __slots__ = ("_batch", "_closing", "_cycle", "_gate", "_opening", "_size", "_transport", "pushed_at")

    def __init__(
        self, cycle: Cycle, transport: asyncio.Transport, gate: Gate, batch: WriteBatch, opening: bytes, closing: bytes
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

    @staticmethod
    def push_each(splicers: Sequence[Splicer], middles: Sequence[bytes], now: float) -> list[int]:
        """Do what `push` does for several answers of one loop; return the places of those that take no chunk now."""
        refused: list[int] = []
        batch = splicers[0]._batch
        write = batch.pending.append if batch.is_open else _write
        for place, (splicer, middle) in enumerate(zip(splicers, middles, strict=True)):
            if splicer._cycle.is_pushable and not splicer._gate.write_paused:
                splicer.pushed_at = now
                size = splicer._size + len(middle)
                head = _CHUNK_HEADS[size] if size < 1024 else b"%x\r\n" % size
                write((splicer._transport, b"".join((head, splicer._opening, middle, splicer._closing))))
            else:
                refused.append(place)
        return refused


def _write(write: tuple[asyncio.Transport, bytes]) -> None:
    transport, data = write
    transport.write(data)
