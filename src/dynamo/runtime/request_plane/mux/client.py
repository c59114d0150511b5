"""The caller's side of `mux`: one connection per worker process, all streams of all requests on it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, cast

import msgspec

from dynamo.errors import (
    CannotConnect,
    Disconnected,
    DynamoException,
    InvalidArgument,
    ResponseTimeout,
    StreamIncomplete,
    revive,
)
from dynamo.runtime.context import Context, on_loop
from dynamo.runtime.request_plane.base import (
    END_INDEX,
    FINISH_SECONDS,
    INITIAL_CREDITS,
    Instance,
    OffsetCounter,
    StreamItem,
    split_tcp,
)
from dynamo.runtime.request_plane.mux.frames import (
    END_FLAG,
    MAGIC,
    MAX_PAYLOAD,
    MAX_STREAM_ID,
    VERSION,
    FrameDecoder,
    Hello,
    Kind,
    Open,
    ProtocolError,
    decode_hello,
    decode_item,
    decode_items,
    decode_message,
    frame,
    pack,
)
from dynamo.runtime.request_plane.secret import (
    SECRET_CAPABILITY,
    SECRET_SETTING,
    WrongSecret,
    check_nonce,
    new_nonce,
)
from dynamo.runtime.request_plane.security import PlaneSecurity
from dynamo.runtime.tls import handshake_text

logger = logging.getLogger(__name__)

WITHOUT_TLS: Final = "if it has a certificate, calls to it need DYN_TCP_TLS_CA_CERT_PATH"
WITH_TLS: Final = "if it asks for a certificate, it must accept that of DYN_TCP_TLS_CLIENT_CERT_PATH"

CONNECT_TIMEOUT_SECONDS: Final = 5.0  # DYN_TCP_CONNECT_TIMEOUT
PING_SECONDS: Final = 20.0  # also what keeps a stateful firewall's entry alive
SILENCE_SECONDS: Final = 60.0  # an engine may block its worker's loop for longer than one would think
IDLE_SECONDS: Final = 300.0  # a connection without streams is closed after this long
MAX_QUEUED_BODY_BYTES: Final = 256 * 1024 * 1024  # request bodies waiting for a full socket, per connection
MAX_BUFFERED_ITEMS: Final = 2 * INITIAL_CREDITS + 64  # of one stream; an honest worker stays below half of it
MAX_ITEM_BYTES: Final = 64 * 1024 * 1024  # one object item (an image, say)
INLINE_BODY_BYTES: Final = MAX_PAYLOAD - 8 * 1024  # leaves room for the head in the same frame


class MuxStream:
    """One response stream at the caller; implements `ResponseStream`."""

    __slots__ = (
        "_connection",
        "_consumed",
        "_draining",
        "_error",
        "_forget",
        "_next_offset",
        "_others",
        "_parts",
        "_parts_bytes",
        "_waiter",
        "buffer",
        "has_ended",
        "listener",
        "stream_id",
        "touched",
    )

    def __init__(self, connection: MuxConnection, stream_id: int) -> None:
        self._connection = connection
        self.buffer: list[StreamItem] = []
        self._waiter: asyncio.Future[None] | None = None
        self._next_offset = 0  # of choice 0, nearly always the only one
        self._others: OffsetCounter | None = None
        self._consumed = 0
        self._draining: asyncio.TimerHandle | None = None  # only the END is awaited, and nobody reads it
        self.has_ended = False  # END was read, or the stream was killed or lost
        self._error: DynamoException | None = None
        self._forget: Callable[[], None] | None = None
        self.listener: Callable[[], None] | None = None
        self.touched = False  # on the connection's list of streams whose listener is to be called
        self._parts: list[bytes] | None = None
        self._parts_bytes = 0
        self.stream_id = stream_id

    async def next_batch(self) -> list[StreamItem]:
        while True:
            batch = self.take()
            if batch is None:
                return []
            if batch:
                return batch
            self._waiter = self._connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def take(self) -> list[StreamItem] | None:
        batch = self.buffer
        if not batch:
            if not self.has_ended:
                return batch
            if self._error is not None:
                raise self._error
            return None
        self.buffer = []
        consumed = 0
        for item in batch:
            index = item.index
            if index >= 0:
                count = len(item.token_ids)
                if index == 0:
                    expected = self._next_offset
                    self._next_offset = expected + count
                else:
                    expected = self._advance(index, count)
                if item.offset != expected:
                    self._broken(f"choice {index} jumped to token {item.offset}")
                    return batch[: batch.index(item)] or self.take()
                consumed += count or 1
            elif index == END_INDEX:
                self._finish(item)
                batch.pop()  # nothing follows an END
                return batch or self.take()
            else:
                consumed += item.offset  # an object item carries its cost there
        self._consumed += consumed
        if self._consumed >= INITIAL_CREDITS // 2:
            self._connection.grant(self.stream_id, self._consumed)
            self._consumed = 0
        return batch

    def _advance(self, index: int, count: int) -> int:
        if self._others is None:
            self._others = OffsetCounter()
        return self._others.advance(index, count)

    def listen(self, arrived: Callable[[], None] | None) -> None:
        self.listener = arrived
        if arrived is not None and (self.buffer or self.has_ended):
            self._connection.touch(self)
            self._connection.loop.call_soon(self._connection.call_listeners)

    def _finish(self, item: StreamItem) -> None:
        self.has_ended = True
        if item.extra is not None:
            self._error = revive(item.extra)
        else:
            arrived = self._next_offset + (0 if self._others is None else self._others.total)
            if item.offset != arrived:
                self._error = StreamIncomplete(f"the worker sent {item.offset} tokens, {arrived} of them arrived")

    def _broken(self, what: str) -> None:
        self.kill()
        self._error = StreamIncomplete(f"the stream is not whole: {what}")

    def deliver(self, item: StreamItem) -> None:
        """An item has arrived. Called by the connection, many times before the reader runs once."""
        if self._draining is not None:
            if item.index == END_INDEX:
                self._settle()
            return
        buffer = self.buffer
        buffer.append(item)
        if len(buffer) > MAX_BUFFERED_ITEMS:
            raise ProtocolError(f"stream {self.stream_id} was sent more than its credit allows")
        if self.listener is not None:
            if not self.touched:
                self._connection.touch(self)
            return
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def _wake(self) -> None:
        """The stream ended without an item: whoever reads should look."""
        if self.listener is not None:
            self._connection.touch(self)
            self._connection.loop.call_soon(self._connection.call_listeners)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def assemble(self, payload: bytes, last: bool) -> StreamItem | None:
        """Add a piece of an item too large for one frame; the item once its last piece is there."""
        if self._parts is None:
            self._parts = []
            self._parts_bytes = 0
        self._parts.append(payload)
        self._parts_bytes += len(payload)
        if self._parts_bytes > MAX_ITEM_BYTES:
            raise ProtocolError(f"an item of more than {MAX_ITEM_BYTES} bytes")
        if not last:
            return None
        whole, self._parts = b"".join(self._parts), None
        return decode_item(whole)

    def lost(self, error: DynamoException) -> None:
        """The connection is gone."""
        if self.has_ended:
            return
        if self._draining is not None:
            self._settle()
            return
        if self.buffer and self.buffer[-1].index == END_INDEX:
            return  # everything had arrived
        self.has_ended = True
        self._error = error
        self._wake()

    def stop(self) -> None:
        if not self.has_ended:
            self._connection.cancel(self.stream_id, kill=False)

    def kill(self) -> None:
        if self.has_ended:
            return
        self._settle()
        self.buffer.clear()
        self._connection.drop(self.stream_id)
        self._wake()

    def _settle(self) -> None:
        self.has_ended = True
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None

    def finish(self) -> None:
        self._unfollow()
        if self.has_ended or self._draining is not None:
            return
        if self.buffer and self.buffer[-1].index == END_INDEX:
            self.has_ended = True
        else:
            self._draining = self._connection.loop.call_later(FINISH_SECONDS, self.kill)
        self.buffer.clear()

    def close(self) -> None:
        self._unfollow()
        if self._draining is None:
            self.kill()

    def _unfollow(self) -> None:
        if self._forget is not None:
            self._forget()
            self._forget = None

    def follow(self, context: Context) -> None:
        """Pass a stop or kill of the caller's context on to the worker."""
        self._forget = context.on_cancel(on_loop(self._connection.loop, self._cancelled))

    def _cancelled(self, killed: bool) -> None:
        if killed:
            self.kill()
        else:
            self.stop()


class MuxConnection(asyncio.Protocol):
    """One connection to one worker process."""

    def __init__(
        self,
        address: str,
        *,
        on_lost: Callable[[MuxConnection], None],
        security: PlaneSecurity | None = None,
    ) -> None:
        """With a `security` that asks for anything, `greeting` tells when the worker has proven who it is."""
        self.address = address
        self.loop = asyncio.get_running_loop()
        self.usable = True  # False: no new streams (GOAWAY, closing, lost)
        self._on_lost = on_lost
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, MuxStream] = {}
        self._touched: list[MuxStream] = []
        self._next_stream_id = 1
        self._control: list[bytes] = []
        self._credits: list[tuple[int, int]] = []
        self._bodies: deque[tuple[int, bytes, int]] = deque()  # stream id, body, bytes of it already sent
        self._queued_body_bytes = 0
        self._flush_scheduled = False
        self._paused = False
        self._failure: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_heard = self._idle_since = self._tick_at = self.loop.time()
        self._ping_sent = False
        self._secret = None if security is None else security.secret
        self._nonce = "" if self._secret is None else new_nonce()
        self._was_greeted = False
        self._hint = WITHOUT_TLS if security is None or security.client is None else WITH_TLS
        is_guarded = security is not None and (security.client is not None or security.secret is not None)
        self.greeting: asyncio.Future[None] | None = self.loop.create_future() if is_guarded else None

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        transport = self._transport = cast(asyncio.Transport, transport)
        hello = Hello(version=VERSION, credits=INITIAL_CREDITS, agent=f"dynamo-unified pid {os.getpid()}")
        if self._secret is not None:
            hello.capabilities, hello.auth = [SECRET_CAPABILITY], self._nonce
        transport.write(MAGIC + frame(Kind.HELLO, pack(hello)))
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._last_heard = self.loop.time()
        try:
            for kind, flags, stream_id, payload in self._decoder.feed(data):
                if kind == Kind.ITEMS:
                    find, touched = self._streams.get, self._touched
                    for item in decode_items(payload):
                        stream = find(item.stream_id)
                        if stream is None:
                            continue
                        if stream.listener is not None:  # `deliver`, without the call: nearly every token
                            buffer = stream.buffer
                            buffer.append(item)
                            if not stream.touched:
                                stream.touched = True
                                touched.append(stream)
                            elif len(buffer) > MAX_BUFFERED_ITEMS:
                                raise ProtocolError(f"stream {item.stream_id} was sent more than its credit allows")
                        else:
                            stream.deliver(item)
                        if item.index == END_INDEX:
                            self._ended(item.stream_id)
                else:
                    self._on_frame(kind, flags, stream_id, payload)
        except (ProtocolError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._fail(f"{self.address} broke the wire: {error}")
        if self._touched:
            self.call_listeners()

    def touch(self, stream: MuxStream) -> None:
        """Call this stream's listener when everything that has arrived is handed out."""
        if not stream.touched:
            stream.touched = True
            self._touched.append(stream)

    def call_listeners(self) -> None:
        """Let every stream that got something tell its reader; each once, however much it got."""
        touched, self._touched = self._touched, []
        for stream in touched:
            stream.touched = False
            if stream.listener is not None:  # nobody may listen by now
                stream.listener()
                if stream.has_ended and stream.listener is not None:  # the end came together with what it took
                    stream.listener()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._timer is not None:
            self._timer.cancel()
        streams, self._streams = self._streams, {}
        self._bodies.clear()
        self._queued_body_bytes = 0
        self._transport = None
        reason = self._failure or (str(exc) if exc else "the connection was closed")
        if not self._was_greeted and self._failure is None:
            reason = (
                f"it hung up before it said anything{'' if exc is None else f' ({handshake_text(exc)})'}; {self._hint}"
            )
        self._failure = reason  # a request may still come for this connection, and is told the same
        if self.greeting is not None and not self.greeting.done():
            self.greeting.set_exception(CannotConnect(f"{self.address} is not who it should be: {reason}"))
        for stream in streams.values():
            stream.lost(Disconnected(f"Stream ended before generation completed ({self.address}: {reason})"))
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._schedule_flush()

    # -- streams -------------------------------------------------------------------------------------------------

    @property
    def stream_count(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    def open(self, path: str, body: bytes, context: Context) -> MuxStream:
        """Begin one stream; the request leaves at the next turn of the loop."""
        if not self.usable:  # lost between its first byte and this turn of the loop: nobody would end the stream
            raise CannotConnect(f"{self.address} closed the connection at once: {self._failure or 'no reason given'}")
        if self._next_stream_id > MAX_STREAM_ID - 2:
            self.usable = False
            raise CannotConnect(f"the connection to {self.address} ran out of stream ids; try again")
        deadline_ms = None
        if context.deadline is not None:
            deadline_ms = round((context.deadline - self.loop.time()) * 1000)
            if deadline_ms <= 0:
                raise ResponseTimeout("the request's deadline passed before it was sent")
        head = Open(
            path=path,
            id=context.id(),
            deadline_ms=deadline_ms,
            prompt_tokens=context.prompt_tokens,
            metadata=context.metadata.copy() if context.has_metadata else {},
            trace=context.trace_headers() or {},
        )
        head_bytes = pack(head)
        inline = len(body) + len(head_bytes) <= INLINE_BODY_BYTES
        if not inline:
            if len(head_bytes) > INLINE_BODY_BYTES:
                raise InvalidArgument("the request's metadata does not fit in one frame of 64 KiB")
            if self._queued_body_bytes + len(body) > MAX_QUEUED_BODY_BYTES:
                raise CannotConnect(f"{self.address} does not read: its send queue is full")
            head.size = len(body)
        stream_id = self._next_stream_id
        self._next_stream_id += 2
        stream = MuxStream(self, stream_id)
        self._streams[stream_id] = stream
        if inline:
            self._send(frame(Kind.OPEN, pack((head, body)), stream_id=stream_id))
        else:
            self._send(frame(Kind.OPEN, pack((head, None)), stream_id=stream_id))
            self._bodies.append((stream_id, body, 0))
            self._queued_body_bytes += len(body)
        return stream

    def grant(self, stream_id: int, credits: int) -> None:
        """Give a stream's producer room; all grants of a loop turn travel in one frame."""
        self._credits.append((stream_id, credits))
        self._schedule_flush()

    def cancel(self, stream_id: int, *, kill: bool) -> None:
        """Pass a stop or kill on."""
        if stream_id in self._streams:
            self._send(frame(Kind.CANCEL, b"\x01" if kill else b"\x00", stream_id=stream_id))

    def drop(self, stream_id: int) -> None:
        """Kill a stream and forget it: what still arrives for it is ignored."""
        self.cancel(stream_id, kill=True)
        self._ended(stream_id)

    def _ended(self, stream_id: int) -> None:
        self._streams.pop(stream_id, None)
        if not self._streams:
            self._idle_since = self.loop.time()

    # -- frames --------------------------------------------------------------------------------------------------

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        match kind:
            case Kind.ITEM_PART:
                stream = self._streams.get(stream_id)
                item = stream.assemble(payload, bool(flags & END_FLAG)) if stream is not None else None
                if stream is not None and item is not None:
                    self._deliver(stream, item)
            case Kind.PING:
                self._send(frame(Kind.PONG, payload))
            case Kind.GOAWAY:
                self.usable = False
                if not self._streams:
                    self.close()
            case Kind.HELLO:
                hello = decode_hello(payload)
                if not 1 <= hello.version <= VERSION:
                    raise ProtocolError(f"it answered with mux version {hello.version}, which we did not offer")
                self._greeted(hello)
            case Kind.ERROR:
                message = decode_message(payload).get("message")
                self._fail(f"{self.address} closed the connection: {message}", tell=False)
            case _:
                pass  # PONG, or a later version's frame

    def _greeted(self, hello: Hello) -> None:
        """The worker has answered; prove that we know the secret once it has."""
        if self._secret is not None:
            nonce, _, proof = (hello.auth or "").partition(":")
            try:
                check_nonce(nonce)
                self._secret.check(proof, "worker", self._nonce, nonce)
            except WrongSecret as error:
                text = f"the worker has none ({SECRET_SETTING})" if hello.auth is None else str(error)
                raise ProtocolError(f"the shared secret is asked for: {text}") from None
            proof = self._secret.prove("caller", self._nonce, nonce)
            self._send(frame(Kind.AUTH, proof.encode()))
        self._was_greeted = True
        if self.greeting is not None and not self.greeting.done():
            self.greeting.set_result(None)

    def _deliver(self, stream: MuxStream, item: StreamItem) -> None:
        stream.deliver(item)
        if item.index == END_INDEX:
            self._ended(stream.stream_id)

    def _fail(self, message: str, *, tell: bool = True) -> None:
        logger.warning("%s", message)
        self._failure = message
        self.usable = False
        if self._transport is not None:
            if tell:
                self._transport.write(frame(Kind.ERROR, pack({"message": message})))
            self._transport.close()

    # -- writing -------------------------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        self._control.append(data)
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        transport = self._transport
        if transport is None or transport.is_closing():
            self._control.clear()
            self._credits.clear()
            return
        parts = self._control
        self._control = []
        if self._credits:
            for at in range(0, len(self._credits), 4096):  # 4,096 grants fit in a frame with room to spare
                parts.append(frame(Kind.CREDIT, pack(self._credits[at : at + 4096])))
            self._credits = []
        if parts:
            transport.writelines(parts)
        # Large bodies go out in turns, one piece each, so that a long prompt does not hold up the one behind it;
        # whatever control frame comes up meanwhile is written before the next piece.
        if self._bodies and not self._paused:
            stream_id, body, sent = self._bodies.popleft()
            if stream_id in self._streams:
                end = min(sent + MAX_PAYLOAD, len(body))
                last = end == len(body)
                flags = END_FLAG if last else 0
                transport.write(frame(Kind.BODY, body[sent:end], stream_id=stream_id, flags=flags))
                if not last:
                    self._bodies.append((stream_id, body, end))
                else:
                    self._queued_body_bytes -= len(body)
            else:
                self._queued_body_bytes -= len(body)
            self._schedule_flush()

    # -- being alive ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._tick_at = self.loop.time() + PING_SECONDS
        self._timer = self.loop.call_at(self._tick_at, self._tick)

    def _tick(self) -> None:
        now = self.loop.time()
        # Late by so much: this process stood still, and what the worker said meanwhile may be yet to be read.
        stood_still = now - self._tick_at >= PING_SECONDS / 2
        if now - self._last_heard >= SILENCE_SECONDS and not stood_still:
            self._failure = f"silent for {SILENCE_SECONDS:.0f} s"
            if self._transport is not None:
                self._transport.abort()
            return
        if not self._streams and now - self._idle_since >= IDLE_SECONDS:
            self.close()
            return
        # Also where the worker speaks all the time: it wants to hear of us, and a slow stream needs no credits for minutes.
        self._send(frame(Kind.PING, b"\0" * 8))
        self._watch()

    def close(self) -> None:
        """Leave; streams still open end with `Disconnected`."""
        self.usable = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()


class MuxClient:
    """Every `mux` connection of a process; implements `RequestPlaneClient`."""

    def __init__(
        self,
        *,
        connect_timeout: float = CONNECT_TIMEOUT_SECONDS,
        waited: Callable[[float], object] | None = None,
        security: PlaneSecurity | None = None,
    ) -> None:
        """`waited` is told how many seconds each request waited for a connection; 0 where there was one."""
        self._connect_timeout = connect_timeout
        self._waited = waited
        self._security = security or PlaneSecurity()
        self._connections: dict[tuple[str, int], MuxConnection] = {}
        self._dialling: dict[tuple[str, int], asyncio.Task[MuxConnection]] = {}
        self._closed = False

    async def open(self, instance: Instance, body: Any, context: Context) -> MuxStream:
        if instance.mux is None or "tcp" not in instance.transport:
            raise CannotConnect(f"instance {instance} does not speak mux")
        try:
            host, port, path = split_tcp(instance.transport["tcp"])
        except ValueError as error:
            raise CannotConnect(f"instance {instance}: {error}") from error
        try:
            encoded = pack(body)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise InvalidArgument(f"the request cannot be encoded: {error}") from error
        connection = self._connections.get((host, port))
        waited = 0.0
        if connection is None or not connection.usable:
            began = perf_counter()
            connection = await self._connect(host, port)
            waited = perf_counter() - began
        if self._waited is not None:
            self._waited(waited)
        stream = connection.open(path, encoded, context)
        stream.follow(context)
        return stream

    async def _connect(self, host: str, port: int) -> MuxConnection:
        if self._closed:
            raise CannotConnect("the runtime is closed")
        where = (host, port)
        task = self._dialling.get(where)
        if task is None:
            # Awaited below by everybody who wants this connection; it ends by itself within the time limit.
            task = asyncio.get_running_loop().create_task(self._dial(host, port), name=f"dial {host}:{port}")
            self._dialling[where] = task
            task.add_done_callback(lambda done: self._dialled(where, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise CannotConnect("the runtime is closed") from None  # only `close` cancels a dial

    def _dialled(self, where: tuple[str, int], task: asyncio.Task[MuxConnection]) -> None:
        self._dialling.pop(where, None)
        if task.cancelled() or task.exception() is not None:
            return  # whoever waits sees it; nobody waiting is fine too
        if self._closed:
            task.result().close()
        elif task.result().usable:
            self._connections[where] = task.result()

    async def _dial(self, host: str, port: int) -> MuxConnection:
        loop = asyncio.get_running_loop()
        address, security = f"{host}:{port}", self._security
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: MuxConnection(address, on_lost=self._lost, security=security),
                    host,
                    port,
                    **security.connect_options(host),
                )
                if connection.greeting is not None:
                    await connection.greeting
        except TimeoutError as error:
            raise CannotConnect(f"{address} did not accept within {self._connect_timeout:g} s") from error
        except OSError as error:
            raise security.not_connected(address, error) from error
        return connection

    def _lost(self, connection: MuxConnection) -> None:
        for where, known in list(self._connections.items()):
            if known is connection:
                del self._connections[where]

    async def close(self) -> None:
        self._closed = True
        for task in list(self._dialling.values()):
            task.cancel()
        for connection in list(self._connections.values()):
            connection.close()
        await asyncio.sleep(0)  # let the transports see their close
