"""The request plane inside one process: no sockets, the same promises.

Bodies, items and errors cross a msgpack round trip, so neither side can change what the other holds, and whatever could
not travel between processes fails here too. What one side does reaches the other at the next turn of the event loop.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from dynamo.errors import (
    CannotConnect,
    Disconnected,
    DynamoException,
    InvalidArgument,
    ResponseTimeout,
    StreamIncomplete,
    describe,
    revive,
)
from dynamo.runtime.context import Context, on_loop
from dynamo.runtime.request_plane.base import (
    FINISH_SECONDS,
    INITIAL_CREDITS,
    OBJECT_CREDIT_BYTES,
    OBJECT_INDEX,
    Handler,
    Instance,
    OffsetCounter,
    StreamItem,
)
from dynamo.runtime.request_plane.core import ServerCore
from dynamo.runtime.settings import RequestPlaneSettings
from dynamo.runtime.tracing import TraceContext

TRANSPORT: Final = "mem"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class MemoryPlane:
    """Where servers and clients of one event loop meet. Not thread-safe."""

    def __init__(self) -> None:
        self._servers: dict[str, MemoryServer] = {}  # by path

    def server(self, settings: RequestPlaneSettings | None = None) -> MemoryServer:
        """A worker's side; each has limits of its own."""
        return MemoryServer(self, settings)

    def client(self) -> MemoryClient:
        """A caller's side."""
        return MemoryClient(self)


_planes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, MemoryPlane] = weakref.WeakKeyDictionary()


def shared_plane(loop: asyncio.AbstractEventLoop) -> MemoryPlane:
    """The plane that runtimes on the same loop share."""
    plane = _planes.get(loop)
    if plane is None:
        plane = _planes[loop] = MemoryPlane()
    return plane


class MemoryServer:
    """Implements `RequestPlaneServer`."""

    def __init__(self, plane: MemoryPlane, settings: RequestPlaneSettings | None = None) -> None:
        self._plane = plane
        self._paths: set[str] = set()
        self._streams: set[MemoryStream] = set()
        self.core = ServerCore(settings)

    async def start(self) -> None:
        pass

    def register(self, path: str, handler: Handler) -> None:
        owner = self._plane._servers.setdefault(path, self)
        if owner is not self:
            raise ValueError(f"request path {path!r} is already served by another worker of this process")
        self.core.register(path, handler)
        self._paths.add(path)

    def unregister(self, path: str) -> None:
        self.core.unregister(path)  # the path still leads here, so that callers are told why they are declined

    def transport(self, path: str) -> Mapping[str, Any]:
        return {"transport": {TRANSPORT: path}}

    async def close(self) -> None:
        self._leave()
        await self.core.close()

    def crash(self) -> None:
        """What callers see of a worker process that was killed: their streams break, and nobody answers any more."""
        self._leave()
        for stream in list(self._streams):
            stream._lost(Disconnected("Stream ended before generation completed (the worker is gone)"))

    def _leave(self) -> None:
        for path in self._paths:
            self._plane._servers.pop(path, None)
        self._paths.clear()


class MemoryClient:
    """Implements `RequestPlaneClient`."""

    def __init__(self, plane: MemoryPlane) -> None:
        self._plane = plane
        self._streams: set[MemoryStream] = set()
        self._closed = False

    async def open(self, instance: Instance, body: Any, context: Context) -> MemoryStream:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise CannotConnect("the runtime is closed")
        path = instance.transport.get(TRANSPORT)
        server = self._plane._servers.get(path) if path is not None else None
        if path is None or server is None:
            raise CannotConnect(f"instance {instance} cannot be reached: nothing in this process serves it")
        if context.deadline is not None and context.deadline <= loop.time():
            raise ResponseTimeout("the request's deadline passed before it was sent")
        try:
            encoded = _encode(body)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise InvalidArgument(f"the request cannot be encoded: {error}") from error
        headers = context.trace_headers()
        remote = Context(
            context.id(),
            context.metadata.copy() if context.has_metadata else None,
            trace=TraceContext.from_headers(headers) if headers else None,
            deadline=context.deadline,
        )
        remote.prompt_tokens = context.prompt_tokens
        sink = MemorySink(loop, remote, len(encoded))
        # A worker that declines raises here: Overloaded or WorkerUnavailable, as it would cross any other wire.
        try:
            server.core.dispatch(path, _decode(encoded), remote, sink)
        except DynamoException as error:
            raise revive(describe(error)) from None
        stream = sink.stream
        stream._follow(context, (self._streams, server._streams))
        return stream

    async def close(self) -> None:
        self._closed = True
        for stream in list(self._streams):
            stream._lost(Disconnected("Stream ended before generation completed (the caller's runtime is closed)"))


class MemoryStream:
    """The caller's end; implements `ResponseStream`."""

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_draining",
        "_ended",
        "_error",
        "_forget",
        "_homes",
        "_is_called",
        "_listener",
        "_loop",
        "_offsets",
        "_sink",
        "_total",
        "_waiter",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, sink: MemorySink) -> None:
        self._loop = loop
        self._sink = sink
        self._buffer: list[StreamItem] = []
        self._waiter: asyncio.Future[None] | None = None
        self._offsets = OffsetCounter()
        self._draining: asyncio.TimerHandle | None = None  # only the end is awaited, and nobody reads it
        self._ended = False  # nothing will be added to the buffer any more
        self._error: DynamoException | None = None
        self._total: int | None = None  # tokens the worker says it sent; None: there was no clean end
        self._forget: Callable[[], None] | None = None
        self._listener: Callable[[], None] | None = None
        self._is_called = False  # the listener is about to be called
        self._homes: tuple[set[MemoryStream], ...] = ()

    async def next_batch(self) -> list[StreamItem]:
        while True:
            batch = self.take()
            if batch is None:
                return []
            if batch:
                return batch
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def take(self) -> list[StreamItem] | None:
        if not self._buffer:
            if not self._ended:
                return []
            if self._error is None and self._total is not None and self._total != self._offsets.total:
                self._error = StreamIncomplete(
                    f"the worker sent {self._total} tokens, {self._offsets.total} of them arrived"
                )
            if self._error is not None:
                raise self._error
            return None
        batch, self._buffer = self._buffer, []
        consumed = 0
        for position, item in enumerate(batch):
            if item.index == OBJECT_INDEX:
                consumed += item.offset  # an object item carries its cost there
                continue
            count = len(item.token_ids)
            if self._offsets.advance(item.index, count) != item.offset:
                self.kill()
                self._error = StreamIncomplete(
                    f"the stream is not whole: choice {item.index} jumped to token {item.offset}"
                )
                return batch[:position] or self.take()
            consumed += count or 1
        self._sink._grant(consumed)
        return batch

    def listen(self, arrived: Callable[[], None] | None) -> None:
        self._listener = arrived
        if arrived is not None and (self._buffer or self._ended):
            self._wake()

    def stop(self) -> None:
        if not self._ended:
            self._loop.call_soon(self._sink.context.stop_generating)

    def kill(self) -> None:
        if not self._ended:
            self._buffer.clear()
            self._finish()
            self._loop.call_soon(self._sink._abandon)

    def finish(self) -> None:
        self._unfollow()
        self._buffer.clear()
        if not self._ended and self._draining is None:
            self._draining = self._loop.call_later(FINISH_SECONDS, self.kill)

    def close(self) -> None:
        if self._draining is None:
            self.kill()
            self._release()

    def _deliver(self, item: StreamItem) -> None:
        if not self._ended and self._draining is None:
            self._buffer.append(item)
            self._wake()

    def _end(self, record: Any, total: int) -> None:
        if not self._ended:
            if record is not None:
                self._error = revive(record)
            else:
                self._total = total
            self._finish()

    def _lost(self, error: DynamoException) -> None:
        if not self._ended:
            self._error = error
            self._finish()
            self._loop.call_soon(self._sink._abandon)

    def _finish(self) -> None:
        self._ended = True
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None
        self._release()
        self._wake()

    def _follow(self, context: Context, homes: tuple[set[MemoryStream], ...]) -> None:
        if not self._ended:  # a request that was declined or cancelled in the queue has ended by now
            self._homes = homes
            for home in homes:
                home.add(self)
            self._forget = context.on_cancel(on_loop(self._loop, self._cancelled))

    def _cancelled(self, killed: bool) -> None:
        if killed:
            self.kill()
        else:
            self.stop()

    def _unfollow(self) -> None:
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()

    def _release(self) -> None:
        self._unfollow()
        for home in self._homes:
            home.discard(self)
        self._homes = ()

    def _wake(self) -> None:
        if self._listener is not None:
            # Not from inside the producer's call: the two sides of a plane must not run in each other's stack.
            if not self._is_called:
                self._is_called = True
                self._loop.call_soon(self._call_listener)
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _call_listener(self) -> None:
        self._is_called = False
        if self._listener is not None:
            self._listener()
            if self._ended and self._listener is not None:  # the end came together with what it took
                self._listener()


class MemorySink:
    """The worker's end; implements `ResponseSink`."""

    __slots__ = (
        "_credit",
        "_ended",
        "_object_bytes",
        "_offsets",
        "_waiter",
        "context",
        "failure",
        "request_bytes",
        "stream",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, context: Context, request_bytes: int) -> None:
        self._credit = INITIAL_CREDITS
        self._ended = False
        self._offsets = OffsetCounter()
        self._waiter: asyncio.Future[None] | None = None
        self.context = context
        self.failure: BaseException | None = None  # what `end` was given
        self.request_bytes = request_bytes
        self._object_bytes = 0
        self.stream = MemoryStream(loop, self)

    def send_tokens(
        self,
        token_ids: list[int],
        index: int = 0,
        finish_reason: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        if self._ended:
            return
        if extra is not None:
            extra = _decode(_encode(extra))
        count = len(token_ids)
        self._credit -= count or 1
        offset = self._offsets.advance(index, count)
        # stream_id 0: there is nothing to tell streams apart by. The ids are copied, as a wire would.
        self.stream._deliver(StreamItem(0, index, offset, list(token_ids), finish_reason, extra))

    def send_object(self, envelope: dict[str, Any]) -> None:
        if self._ended:
            return
        encoded = _encode(envelope)
        cost = len(encoded) // OBJECT_CREDIT_BYTES + 1
        self._credit -= cost
        self._object_bytes += len(encoded)
        self.stream._deliver(StreamItem(0, OBJECT_INDEX, cost, [], None, _decode(encoded)))

    @property
    def response_bytes(self) -> int:
        """Of objects, what they would take encoded; tokens are not encoded here, and each counts for one."""
        return self._object_bytes + self._offsets.total

    def has_credit(self) -> bool:
        return self._credit > 0

    async def wait_credit(self) -> None:
        while not (self._ended or self._credit > 0):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def end(self, error: BaseException | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        self.failure = error
        record = _decode(_encode(describe(error))) if error is not None else None
        self.stream._end(record, self._offsets.total)
        self._wake()

    @property
    def ended(self) -> bool:
        return self._ended

    def _grant(self, credits: int) -> None:
        self._credit += credits
        self._wake()

    def _abandon(self) -> None:
        """The caller is gone."""
        self._ended = True
        self._wake()
        self.context.kill()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
