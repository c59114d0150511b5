"""Calls of gRPC over the streams of HTTP/2: a handler reads messages and writes messages, in a task or as they come."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import quote

from dynamo.picker.grpc.connection import INTERNAL_ERROR, STREAM_WINDOW, Http2Stream
from dynamo.picker.grpc.hpack import Headers, write_headers
from dynamo.runtime.base.tasks import Background

logger = logging.getLogger(__name__)

T = TypeVar("T")

OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 3, 8, 12, 13
READ_AHEAD: Final = 16  # messages of one stream
_TYPE: Final = write_headers([(b"content-type", b"application/grpc")])
_BEGIN: Final = b"\x88" + _TYPE  # status 200
_DONE: Final = write_headers([(b"grpc-status", b"0")])


def _nothing() -> None:
    """Stand where there is no callback."""


def failure_of(task: asyncio.Task[Any]) -> BaseException | None:
    """Return what a task that is done has raised, its cancellation included; None: nothing."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()


class CallFailed(Exception):
    """The call ends with this status of gRPC."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class GrpcCall:
    """One call: messages as bytes, both ways."""

    __slots__ = (
        "_has_begun",
        "_messages",
        "_most",
        "_owed",
        "_received",
        "_stream",
        "_waiter",
        "is_ended",
        "is_gone",
        "on_event",
        "task",
    )

    def __init__(self, stream: Http2Stream, most: int) -> None:
        """`most`: bytes of a message."""
        self._stream, self._most = stream, most
        self._received = bytearray()
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._owed = 0  # bytes of the stream's window that were not granted again
        self._has_begun = False
        self.is_ended = self.is_gone = False
        """Whether the peer sends no more messages, and whether nothing goes either way."""
        self.on_event: Callable[[], None] = _nothing
        """Called with each message, when what was sent has gone out, and at the end of what the peer sends."""
        self.task: asyncio.Task[Any] | None = None
        stream.on_data, stream.on_end, stream.on_room = self._take, self._end, self._wake

    async def read(self) -> bytes | None:
        """Return the next message; None: there are no more. Raises CallFailed for what is no message."""
        while (message := self.next_message()) is None and not self.is_ended:
            await self._wait()
        return message

    def next_message(self) -> bytes | None:
        """Return the next message that is here; None: there is none."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        if self._owed >= STREAM_WINDOW // 2:
            self._grant()
        return message

    async def write(self, *messages: bytes) -> None:
        """Send messages, and return when the peer's window has let them through."""
        self.send(messages)
        while self.unsent:
            await self._wait()

    def send(self, messages: Sequence[bytes]) -> None:
        """Send messages, as far as the peer's window lets them through; the rest follows."""
        if not self._has_begun:
            self._has_begun = True
            self._stream.send_headers(_BEGIN)
        self._stream.send_data(b"".join([b"\0" + len(each).to_bytes(4, "big") + each for each in messages]))

    def send_now(self, messages: Sequence[bytes]) -> None:
        """Send messages in this turn of the loop."""
        self.send(messages)
        self._stream.connection.flush()

    @property
    def unsent(self) -> bool:
        """Whether something waits for the peer to read, and for nothing else."""
        return self._stream.unsent and not self._stream.is_closed

    def finish(self, status: int = OK, message: str = "") -> None:
        """End the call."""
        block = _DONE
        if status != OK:
            block = write_headers(
                [(b"grpc-status", b"%d" % status), (b"grpc-message", quote(message, safe=" ").encode())]
            )
        self._stream.send_headers(block if self._has_begun else _BEGIN + block, is_last=True)

    def fail(self, error: BaseException) -> None:
        """End the call after an error of its handler."""
        if isinstance(error, CallFailed):
            self.finish(error.status, str(error))
        elif isinstance(error, asyncio.CancelledError):
            self._stream.reset(INTERNAL_ERROR)  # the client has gone, or this process ends
        else:  # the boundary: one call must not end the others of its connection
            logger.error("a call failed", exc_info=error)
            self.finish(INTERNAL, "the picker failed")

    def cancel(self) -> None:
        """Break off what the call does."""
        if self.task is not None:
            self.task.cancel()

    def ended(self, task: asyncio.Task[Any]) -> None:
        """End the call as the task of its handler has ended."""
        self.let_go()
        if (error := failure_of(task)) is not None:
            self.fail(error)
        else:
            self.finish()

    def let_go(self) -> None:
        """Forget the task and the callback of the handler: both hold the call, which holds them."""
        self.task, self.on_event = None, _nothing

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self.on_event()

    def _take(self, data: bytes) -> None:
        """Take data of the stream."""
        self._owed += len(data)
        received = self._received
        if not received and data[:1] == b"\0" and int.from_bytes(data[1:5], "big") + 5 == len(data) <= self._most:
            self._messages.append(data[5:])  # one whole message, as nearly always
            if self._owed >= STREAM_WINDOW // 2:
                self._grant()
            self._wake()
            return
        received += data
        while len(received) >= 5:
            size = int.from_bytes(received[1:5], "big")
            if received[0] or size > self._most:
                why = "a compressed message" if received[0] else f"a message of {size} bytes"
                received.clear()
                self._fail(CallFailed(UNIMPLEMENTED if "compressed" in why else RESOURCE_EXHAUSTED, why))
                self._end(is_gone=False)
                return
            if len(received) < 5 + size:
                break
            self._messages.append(bytes(received[5 : 5 + size]))
            del received[: 5 + size]
        self._grant()
        self._wake()

    def _grant(self) -> None:
        if self._owed >= STREAM_WINDOW // 2 and len(self._messages) < READ_AHEAD:
            self._stream.grant(self._owed)
            self._owed = 0

    def _fail(self, error: CallFailed) -> None:
        self.cancel()
        self.fail(error)

    def _end(self, is_gone: bool) -> None:
        self.is_ended, self.is_gone = True, is_gone
        if is_gone:
            self.cancel()
        self._wake()


CallHandler = Callable[[GrpcCall], Coroutine[Any, Any, None] | None]
"""Serves a call in a task, or where it returns None by the events of the call."""


class CallTable:
    """Begins each call, by its path."""

    def __init__(self, handlers: Mapping[str, CallHandler], most: int) -> None:
        """`handlers` by path, such as /package.Service/Method; `most`: bytes of a message."""
        self._handlers = {path.encode(): handler for path, handler in handlers.items()}
        self._most = most
        self._running = Background()

    def __len__(self) -> int:
        """Return how many calls run."""
        return len(self._running)

    def start(self, work: Coroutine[None, None, T], name: str) -> asyncio.Task[T]:
        """Begin a task, whose end the caller follows. Raises RuntimeError after `aclose`."""
        return self._running.start(work, name, is_awaited=True)

    async def aclose(self) -> None:
        """Break off what runs. Idempotent."""
        await self._running.close()

    def open(self, stream: Http2Stream, headers: Headers) -> None:
        """Begin a call."""
        named = dict(headers)
        call, handler = GrpcCall(stream, self._most), self._handlers.get(named.get(b":path", b""))
        if self._running.is_closed:
            stream.reset(INTERNAL_ERROR)
            return
        if handler is None or not named.get(b"content-type", b"").startswith(b"application/grpc"):
            call.finish(UNIMPLEMENTED, "there is no such method")
            return
        if (work := handler(call)) is not None:
            call.task = self.start(work, "a call of gRPC")
            call.task.add_done_callback(call.ended)
