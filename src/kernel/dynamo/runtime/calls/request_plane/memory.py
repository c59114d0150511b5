"""The request plane inside one process: no sockets, the same promises.

Bodies, items and errors cross a msgpack round trip, so neither side can change what the other holds, and whatever could
not travel between processes fails here too. What one side does reaches the other at the next turn of the event loop.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Final

import msgspec

from dynamo.errors import (
    CannotConnect,
    Disconnected,
    DynamoException,
    InvalidArgument,
    ResponseTimeout,
    describe,
    revive,
)
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.base.tasks import OneWaiter
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import (
    END_INDEX,
    INITIAL_CREDITS,
    OBJECT_CREDIT_BYTES,
    OBJECT_INDEX,
    Handler,
    Instance,
    OffsetCounter,
    StreamItem,
    TransportMembers,
)
from dynamo.runtime.calls.request_plane.core import ServerCore
from dynamo.runtime.calls.request_plane.sink_record import SinkRecord
from dynamo.runtime.calls.request_plane.stream import StreamBuffer, StreamEvent, StreamState
from dynamo.runtime.observe.tracing import TraceContext

TRANSPORT: Final = "mem"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class MemoryPlane:
    """Where servers and clients of one event loop meet. Not thread-safe."""

    def __init__(self) -> None:
        self._servers: dict[str, MemoryServer] = {}  # by path

    def server(self, settings: RequestPlaneSettings | None = None) -> MemoryServer:
        """Make a worker's side; each has limits of its own."""
        return MemoryServer(self, settings)

    def client(self) -> MemoryClient:
        """Make a caller's side."""
        return MemoryClient(self)


_planes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, MemoryPlane] = weakref.WeakKeyDictionary()


def shared_plane(loop: asyncio.AbstractEventLoop) -> MemoryPlane:
    """Return the plane that runtimes on the same loop share."""
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
        self.core.unregister(path)  # the path still leads here, so that callers receive the reason for a rejection

    def transport(self, path: str) -> TransportMembers:
        return {"transport": {TRANSPORT: path}}

    async def close(self) -> None:
        self._leave()
        await self.core.close()

    def crash(self) -> None:
        """Break all streams and stop answering, as callers see it when a worker process is killed."""
        self._leave()
        for stream in list(self._streams):
            stream.lost(Disconnected("Stream ended before generation completed (the worker is gone)"))

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

    async def open(self, instance: Instance, body: object, context: Context) -> MemoryStream:
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
        stream = sink.stream
        assert stream is not None
        # A worker that declines raises here: Overloaded or WorkerUnavailable, as it would cross any other wire.
        try:
            server.core.dispatch(path, _decode(encoded), remote, sink)
        except DynamoException as error:
            raise revive(describe(error)) from None
        stream.live_in((self._streams, server._streams))
        stream.follow(context)
        return stream

    async def close(self) -> None:
        self._closed = True
        for stream in list(self._streams):
            stream.lost(Disconnected("Stream ended before generation completed (the caller's runtime is closed)"))


class MemoryStream(StreamBuffer):
    """The caller's end."""

    GRANT_AT = 1

    __slots__ = ("__weakref__", "_homes", "_loop", "sink")

    def __init__(self, loop: asyncio.AbstractEventLoop, sink: MemorySink) -> None:
        super().__init__()
        self._loop = loop
        self.sink = sink
        self._homes: tuple[set[MemoryStream], ...] = ()

    def lost(self, error: DynamoException) -> None:
        if self.state in (StreamState.OPEN, StreamState.DRAINING):
            self._loop.call_soon(self.sink.abandon)
        super().lost(error)

    def live_in(self, homes: tuple[set[MemoryStream], ...]) -> None:
        """Add this stream to these sets until it ends."""
        if self.state is StreamState.OPEN:  # a request that was declined or cancelled in the queue has ended by now
            self._homes = homes
            for home in homes:
                home.add(self)

    def _move(self, event: StreamEvent) -> bool:
        moved = super()._move(event)
        if moved and self.state in (StreamState.ENDED, StreamState.CLOSED):
            for home in self._homes:
                home.discard(self)
            self._homes = ()
        return moved

    def _send_stop(self) -> None:
        self._loop.call_soon(self.sink.context.stop_generating)

    def _send_kill(self) -> None:
        self._loop.call_soon(self.sink.abandon)

    def _grant(self, credits: int) -> None:
        self.sink.grant(credits)


class MemorySink(SinkRecord):
    """The worker's end; implements `ResponseSink`."""

    __slots__ = ("_credit", "_offsets", "_waiter", "stream")

    def __init__(self, loop: asyncio.AbstractEventLoop, context: Context, request_bytes: int) -> None:
        super().__init__(context, request_bytes)
        self._credit = INITIAL_CREDITS
        self._offsets = OffsetCounter()
        self._waiter = OneWaiter()
        # None: ended, so that the two do not keep each other.
        self.stream: MemoryStream | None = MemoryStream(loop, self)

    def send_tokens(
        self,
        token_ids: list[int],
        index: int = 0,
        finish_reason: object = None,
        extra: dict[str, object] | None = None,
    ) -> None:
        stream = self.stream
        if stream is None:
            return
        if extra is not None:
            extra = _decode(_encode(extra))
        count = len(token_ids)
        self._credit -= count or 1
        offset = self._offsets.advance(index, count)
        # stream_id 0: there is nothing to distinguish streams by. The ids are copied, as a wire would.
        stream.deliver(StreamItem(0, index, offset, list(token_ids), finish_reason, extra))

    def send_token(self, token_id: int) -> bool:
        self.send_tokens([token_id])
        return self.stream is not None and self.has_credit()

    def send_object(self, envelope: dict[str, object]) -> None:
        stream = self.stream
        if stream is None:
            return
        encoded = _encode(envelope)
        cost = len(encoded) // OBJECT_CREDIT_BYTES + 1
        self._credit -= cost
        self._object_bytes += len(encoded)
        stream.deliver(StreamItem(0, OBJECT_INDEX, cost, [], None, _decode(encoded)))

    @property
    def response_bytes(self) -> int:
        """Of objects, what they would take encoded; tokens are not encoded here, and each counts for one."""
        return self._object_bytes + self._offsets.total

    def has_credit(self) -> bool:
        return self._credit > 0

    async def wait_credit(self) -> None:
        while not (self.ended or self._credit > 0):
            await self._waiter.wait()

    def end(self, error: BaseException | None = None) -> None:
        stream, self.stream = self.stream, None
        if stream is None:
            return
        self.failure = error
        record = _decode(_encode(describe(error))) if error is not None else None
        stream.end_with(StreamItem(0, END_INDEX, self._offsets.total, [], None, record))
        self._waiter.wake()

    @property
    def ended(self) -> bool:
        return self.stream is None

    def grant(self, credits: int) -> None:
        """Add the credits of items that the caller has taken."""
        self._credit += credits
        self._waiter.wake()

    def abandon(self) -> None:
        """Abandon the stream: the caller is gone."""
        self.stream = None
        self._waiter.wake()
        self.context.kill()
