"""Calls of gRPC over the streams of HTTP/2: a handler reads messages and writes messages."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final
from urllib.parse import quote

from dynamo.picker.grpc.connection import INTERNAL_ERROR, STREAM_WINDOW, Http2Stream
from dynamo.picker.grpc.hpack import Headers, write_headers
from dynamo.runtime.base.tasks import Background

logger = logging.getLogger(__name__)

OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 3, 8, 12, 13
READ_AHEAD: Final = 16  # messages of one stream
_TYPE: Final = write_headers([(b"content-type", b"application/grpc")])
_BEGIN: Final = b"\x88" + _TYPE  # status 200
_DONE: Final = write_headers([(b"grpc-status", b"0")])


def _nothing() -> None:
    """Stand where there is no callback."""


class CallFailed(Exception):
    """The call ends with this status of gRPC."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class GrpcCall:
    """One call: messages as bytes, both ways."""

    __slots__ = (
        "_has_begun",
        "_is_ended",
        "_messages",
        "_most",
        "_owed",
        "_received",
        "_stream",
        "_waiter",
        "on_half_close",
        "task",
    )

    def __init__(self, stream: Http2Stream, most: int) -> None:
        """`most`: bytes of a message."""
        self._stream, self._most = stream, most
        self._received = bytearray()
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._owed = 0  # bytes of the stream's window that were not granted again
        self._has_begun = self._is_ended = False
        self.on_half_close: Callable[[], None] = _nothing
        """Called when the peer sends no more messages."""
        self.task: asyncio.Task[None] | None = None
        stream.on_data, stream.on_end, stream.on_room = self._take, self._end, self._wake

    async def read(self) -> bytes | None:
        """Return the next message; None: there are no more. Raises CallFailed for what is no message."""
        while not self._messages:
            if self._is_ended:
                return None
            await self._wait()
        message = self._messages.popleft()
        self._grant()
        return message

    async def write(self, *messages: bytes) -> None:
        """Send messages, and return when the peer's window has let them through."""
        stream = self._stream
        if not self._has_begun:
            self._has_begun = True
            stream.send_headers(_BEGIN)
        stream.send_data(b"".join(b"\0" + len(each).to_bytes(4, "big") + each for each in messages))
        while stream.unsent and not stream.is_closed:
            await self._wait()

    def finish(self, status: int = OK, message: str = "") -> None:
        """End the call."""
        block = _DONE
        if status != OK:
            block = write_headers(
                [(b"grpc-status", b"%d" % status), (b"grpc-message", quote(message, safe=" ").encode())]
            )
        self._stream.send_headers(block if self._has_begun else _BEGIN + block, is_last=True)

    def cancel(self) -> None:
        """Break off what the call does."""
        if self.task is not None:
            self.task.cancel()

    def reset(self) -> None:
        """Break the call off."""
        self._stream.reset(INTERNAL_ERROR)

    def let_go(self) -> None:
        """Forget the task and the callback of the handler: both hold the call, which holds them."""
        self.task, self.on_half_close = None, _nothing

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self, data: bytes) -> None:
        """Take data of the stream."""
        received = self._received
        received += data
        self._owed += len(data)
        while len(received) >= 5:
            size = int.from_bytes(received[1:5], "big")
            if received[0] or size > self._most:
                why = "a compressed message" if received[0] else f"a message of {size} bytes"
                received.clear()
                self._end(is_gone=False)
                self._fail(CallFailed(UNIMPLEMENTED if "compressed" in why else RESOURCE_EXHAUSTED, why))
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
        self.finish(error.status, str(error))

    def _end(self, is_gone: bool) -> None:
        self._is_ended = True
        if is_gone:
            self.cancel()
        else:
            self.on_half_close()
        self._wake()


CallHandler = Callable[[GrpcCall], Coroutine[Any, Any, None]]


class CallTable:
    """Begins a task for each call, by its path."""

    def __init__(self, handlers: Mapping[str, CallHandler], most: int) -> None:
        """`handlers` by path, such as /package.Service/Method; `most`: bytes of a message."""
        self._handlers = {path.encode(): handler for path, handler in handlers.items()}
        self._most = most
        self._running = Background()

    def __len__(self) -> int:
        """Return how many calls run."""
        return len(self._running)

    async def aclose(self) -> None:
        """Break off what runs. Idempotent."""
        await self._running.close()

    def open(self, stream: Http2Stream, headers: Headers) -> None:
        """Begin a call."""
        named = dict(headers)
        call, handler = GrpcCall(stream, self._most), self._handlers.get(named.get(b":path", b""))
        if self._running.is_closed:
            call.reset()
            return
        if handler is None or not named.get(b"content-type", b"").startswith(b"application/grpc"):
            call.finish(UNIMPLEMENTED, "there is no such method")
            return
        call.task = self._running.start(self._run(call, handler), "a call of gRPC")

    @staticmethod
    async def _run(call: GrpcCall, handler: CallHandler) -> None:
        try:
            await handler(call)
        except CallFailed as error:
            call.finish(error.status, str(error))
        except asyncio.CancelledError:
            call.reset()  # the client has gone, or this process ends
        except Exception:  # the boundary: one call must not end the others of its connection
            logger.exception("a call failed")
            call.finish(INTERNAL, "the picker failed")
        else:
            call.finish()
        finally:
            call.let_go()
