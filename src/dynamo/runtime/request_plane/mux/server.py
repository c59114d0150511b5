"""The worker's side of a `mux` connection: many streams, one outgoing list, one flush per loop turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, cast

import msgspec

from dynamo.errors import Cancelled, DynamoException, InvalidArgument, Overloaded, describe
from dynamo.runtime.context import Context
from dynamo.runtime.limits import PendingBytes, Refused, uncounted
from dynamo.runtime.request_plane.base import END_INDEX, OBJECT_CREDIT_BYTES, OBJECT_INDEX
from dynamo.runtime.request_plane.core import ServerCore
from dynamo.runtime.request_plane.mux.frames import (
    END_FLAG,
    MAGIC,
    VERSION,
    FrameDecoder,
    Hello,
    Kind,
    Open,
    ProtocolError,
    decode_body,
    decode_credits,
    decode_hello,
    decode_open,
    frame,
    items_frames,
    pack,
)
from dynamo.runtime.request_plane.secret import (
    SECRET_CAPABILITY,
    SECRET_SETTING,
    SharedSecret,
    WrongSecret,
    check_nonce,
    new_nonce,
)
from dynamo.runtime.settings import RequestPlaneSettings
from dynamo.runtime.tracing import TraceContext

logger = logging.getLogger(__name__)

CAPABILITIES: Final = ["deadline", "credits", "fragments"]
MAX_PENDING_BODIES: Final = 1024  # requests whose body is still arriving
MAX_CREDIT: Final = 1 << 20  # a caller may not make one stream buffer more than a million tokens
TOKEN_BYTES: Final = 10  # of a one-token chunk in a batch
MAX_BACKLOG_ITEMS: Final = 65_536  # of a caller that does not read: what its own requests may still add
MAX_BACKLOG_BYTES: Final = 1024 * 1024  # the same for the answers to its control frames
GOODBYE_SECONDS: Final = 1.0  # how long the last bytes of a closing connection may take to leave


class MuxSink:
    """One response stream at the worker; implements `ResponseSink`."""

    __slots__ = (
        "_connection",
        "_object_bytes",
        "_others",
        "_out",
        "_stream_id",
        "_waiter",
        "context",
        "credit",
        "ended",
        "failure",
        "offset",
        "request_bytes",
        "total",
    )

    def __init__(self, connection: MuxServerProtocol, stream_id: int, context: Context, credit: int) -> None:
        self._connection = connection
        self._out = connection.out
        self._stream_id = stream_id
        self._waiter: asyncio.Future[None] | None = None
        self._others: dict[int, int] | None = None  # offsets of the choices other than 0
        self.context = context
        self.credit = credit
        self.offset = 0  # of choice 0, nearly always the only one
        self.total = 0
        self.request_bytes = 0
        self.failure: BaseException | None = None  # what `end` was given
        self._object_bytes = 0
        self.ended = False

    @property
    def connection(self) -> MuxServerProtocol:
        """For fault injection."""
        return self._connection

    def send_tokens(
        self,
        token_ids: list[int],
        index: int = 0,
        finish_reason: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        if self.ended:
            return
        count = len(token_ids)
        if index == 0:
            offset = self.offset
            self.offset = offset + count
        else:
            offset = self._advance(index, count)
        self.total += count
        self.credit -= count or 1
        # A plain tuple: encoding it costs half of what a Struct instance would, and nobody keeps it.
        if finish_reason is None and extra is None:
            self._out.append((self._stream_id, index, offset, token_ids))
        else:
            self._out.append((self._stream_id, index, offset, token_ids, finish_reason, extra))
        connection = self._connection
        if not connection.flush_scheduled:
            connection.schedule_flush()

    def _advance(self, index: int, count: int) -> int:
        if self._others is None:
            self._others = {}
        offset = self._others.get(index, 0)
        self._others[index] = offset + count
        return offset

    def send_object(self, envelope: dict[str, Any]) -> None:
        if self.ended:
            return
        # Encoded here, so that a value that cannot travel is this stream's error and not the whole batch's.
        encoded = msgspec.Raw(pack(envelope))
        cost = len(encoded) // OBJECT_CREDIT_BYTES + 1
        self.credit -= cost
        self._object_bytes += len(encoded)
        self._out.append((self._stream_id, OBJECT_INDEX, cost, (), None, encoded))
        if not self._connection.flush_scheduled:
            self._connection.schedule_flush()

    def has_credit(self) -> bool:
        return self.credit > 0 and not self._connection.paused

    async def wait_credit(self) -> None:
        while not (self.ended or self.has_credit()):
            self._waiter = asyncio.get_running_loop().create_future()
            self._connection.waiting.add(self)
            starved = self._connection.call_when_starved(self._starved)
            try:
                await self._waiter
            finally:
                starved.cancel()
                self._waiter = None
                self._connection.waiting.discard(self)

    def _starved(self) -> None:
        """The caller has read nothing of this stream for too long: its place in the engine is needed elsewhere."""
        self._connection.refused("credit_stall")
        self.end(Cancelled("the caller did not read its stream for longer than DYN_TCP_CREDIT_STALL_SECS allows"))
        self.context.kill()

    def wake(self) -> None:
        """Let a producer that waits for credit look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self, error: BaseException | None = None) -> None:
        if self.ended:
            return
        self.ended = True
        self.failure = error
        record = describe(error) if error is not None else None
        self._out.append((self._stream_id, END_INDEX, self.total, (), None, record))
        self._connection.forget(self._stream_id)
        self.wake()
        if not self._connection.flush_scheduled:
            self._connection.schedule_flush()

    @property
    def response_bytes(self) -> int:
        """Encoded bytes sent so far: exact for objects; token chunks are encoded many streams at a time, so each token
        counts for what a chunk of one token takes."""
        return self._object_bytes + TOKEN_BYTES * self.total

    def abandon(self) -> None:
        """The caller is gone: nothing more is sent."""
        self.ended = True
        self.wake()


class _PendingBody:
    """A request whose body is still arriving in pieces."""

    __slots__ = ("began", "head", "parts", "received")

    def __init__(self, head: Open, began: float) -> None:
        self.head = head
        self.began = began
        self.parts: list[bytes] = []
        self.received = 0


class MuxServerProtocol(asyncio.Protocol):
    """One accepted connection. The listener calls `adopt` after it has seen `MAGIC`."""

    def __init__(
        self,
        core: ServerCore,
        *,
        settings: RequestPlaneSettings | None = None,
        connections: set[MuxServerProtocol] | None = None,
        pending: PendingBytes | None = None,
        refused: Refused = uncounted,
        secret: SharedSecret | None = None,
        strangers: set[MuxServerProtocol] | None = None,
    ) -> None:
        """`connections` is the listener's set of open ones; this one adds and removes itself. `pending` is shared by all
        connections of a listener, and `refused` counts. With a `secret` the caller must prove that it knows it; until then
        this one is among the `strangers`."""
        self._core = core
        self._connections = connections if connections is not None else set()
        self._settings = settings = settings or RequestPlaneSettings()
        self._pending = pending or PendingBytes(settings.pending_bytes)
        self.refused = refused
        self._backlog_bytes = 0  # of control frames, since the caller stopped reading
        self._stall_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._decoder = FrameDecoder()
        self._magic_left = len(MAGIC)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, MuxSink] = {}
        self._unanswered: dict[int, float] = {}  # streams that sent nothing yet: when they arrived
        self._bodies: dict[int, _PendingBody] = {}
        self._hello: Hello | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_heard = self._check_at = self._loop.time()
        self._control: list[bytes] = []
        self.out: list[tuple[Any, ...]] = []
        self.flush_scheduled = False
        self.paused = False
        self.waiting: set[MuxSink] = set()
        self._secret = secret
        self._strangers = strangers if strangers is not None else set()
        self._nonces = ("", "")  # the caller's and ours
        self._dispatch: dict[int, Callable[[int, int, bytes], None]] = self._handlers()
        if secret is not None:  # no frame of a caller that is known pays for this
            self._strangers.add(self)
            self._dispatch = dict.fromkeys(self._dispatch, self._on_stranger)
            self._dispatch |= {Kind.AUTH: self._on_auth, Kind.ERROR: self._on_error}

    def _handlers(self) -> dict[int, Callable[[int, int, bytes], None]]:
        return {
            Kind.OPEN: self._on_open,
            Kind.CREDIT: self._on_credit,
            Kind.CANCEL: self._on_cancel,
            Kind.BODY: self._on_body,
            Kind.PING: self._on_ping,
            Kind.PONG: self._on_nothing,
            Kind.GOAWAY: self._on_nothing,
            Kind.HELLO: self._on_second_hello,
            Kind.ERROR: self._on_error,
        }

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._watch(self._settings.handshake_timeout_seconds)

    def adopt(self, transport: asyncio.Transport, data: bytes) -> None:
        """Take over a connection whose first bytes (`MAGIC` included) were read by the listener."""
        self.connection_made(transport)
        transport.set_protocol(self)
        self.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._last_heard = self._loop.time()
        if self._magic_left:
            seen = len(MAGIC) - self._magic_left
            if not MAGIC.startswith(data[: self._magic_left], seen):
                self._fail("this connection does not start with the mux magic")
                return
            taken = min(self._magic_left, len(data))
            self._magic_left -= taken
            data = data[taken:]
        try:
            for kind, flags, stream_id, payload in self._decoder.feed(data):
                if self._hello is None:
                    self._on_hello(kind, payload)
                    continue
                handle = self._dispatch.get(kind)
                if handle is None:
                    continue  # a later version's frame: skipping it is what lets versions mix
                handle(flags, stream_id, payload)
        except WrongSecret as error:
            self.refused("secret")
            self._fail(str(error))
        except (ProtocolError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.refused("malformed")
            self._fail(str(error))

    def eof_received(self) -> bool:
        return False  # a caller that closed its half is a caller that left

    def through(self, stand_in: Callable[[asyncio.Transport], asyncio.Transport]) -> None:
        """For fault injection: write to what `stand_in` gives for the transport from now on."""
        if self._transport is not None:
            self._transport = stand_in(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._strangers.discard(self)
        for timer in (self._timer, self._stall_timer, self._body_timer):
            if timer is not None:
                timer.cancel()
        self.out.clear()
        self._control.clear()
        for stream_id in list(self._bodies):
            self._forget_body(stream_id)
        streams, self._streams = self._streams, {}
        self._unanswered.clear()
        for sink in streams.values():
            sink.abandon()
            sink.context.kill()
        self._transport = None

    def pause_writing(self) -> None:
        self.paused = True
        self._stall_timer = self._loop.call_later(self._settings.write_stall_seconds, self._cut, "write_stall")

    def resume_writing(self) -> None:
        self.paused = False
        self._backlog_bytes = 0
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        for sink in list(self.waiting):
            sink.wake()
        if self.out:
            self.schedule_flush()

    # -- leaving -------------------------------------------------------------------------------------------------

    def goaway(self, reason: str) -> None:
        """Ask the caller to open no more streams here; those in flight go on."""
        self._send_control(frame(Kind.GOAWAY, pack({"reason": reason})))

    def close(self) -> None:
        """Send what is queued and close; streams still open end with the connection."""
        if self._transport is None or self._transport.is_closing():
            return
        self._flush()
        self._transport.close()
        transport = self._transport
        # A peer that does not read would keep the last bytes, and this process, alive for ever.
        self._loop.call_later(GOODBYE_SECONDS, transport.abort)

    # -- frames --------------------------------------------------------------------------------------------------

    def _on_hello(self, kind: int, payload: bytes) -> None:
        if kind != Kind.HELLO:
            raise ProtocolError(f"the first frame must be HELLO, got kind {kind}")
        hello = decode_hello(payload)
        if hello.version < 1:
            raise ProtocolError(f"mux version {hello.version} is not spoken here; versions 1 to {VERSION} are")
        self._hello = hello
        reply = Hello(version=min(hello.version, VERSION), capabilities=CAPABILITIES, agent="dynamo-unified")
        if self._secret is not None:
            if hello.auth is None:
                raise WrongSecret(f"this worker asks for the shared secret, and the caller has none ({SECRET_SETTING})")
            check_nonce(hello.auth)
            nonces = self._nonces = (hello.auth, new_nonce())
            reply.auth = f"{nonces[1]}:{self._secret.prove('worker', *nonces)}"
            reply.capabilities = [*CAPABILITIES, SECRET_CAPABILITY]
        self._send_control(frame(Kind.HELLO, pack(reply)))

    def _on_stranger(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise WrongSecret(f"the caller has not proven that it knows the shared secret ({SECRET_SETTING})")

    def _on_auth(self, flags: int, stream_id: int, payload: bytes) -> None:
        assert self._secret is not None
        self._secret.check(payload.decode("ascii", "replace"), "caller", *self._nonces)
        self._strangers.discard(self)
        self._dispatch = self._handlers()

    def _on_second_hello(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ProtocolError("HELLO may be sent once")

    def _on_nothing(self, flags: int, stream_id: int, payload: bytes) -> None:
        pass

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise ProtocolError("PING carries 8 bytes")
        self._send_control(frame(Kind.PONG, payload))

    def _on_error(self, flags: int, stream_id: int, payload: bytes) -> None:
        logger.warning("a caller reported a protocol error and leaves: %r", payload[:200])
        if self._transport is not None:
            self._transport.close()

    def _on_credit(self, flags: int, stream_id: int, payload: bytes) -> None:
        for target, amount in decode_credits(payload):
            sink = self._streams.get(target)
            if sink is None:
                continue
            if amount < 0:
                raise ProtocolError("credits may not be negative")
            sink.credit = min(sink.credit + amount, MAX_CREDIT)
            sink.wake()

    def _on_cancel(self, flags: int, stream_id: int, payload: bytes) -> None:
        if payload not in (b"\x00", b"\x01"):
            raise ProtocolError("CANCEL carries one byte, 0 or 1")
        self._forget_body(stream_id)
        sink = self._streams.get(stream_id)
        if sink is None:
            return  # it has just ended: the two crossed on the wire
        if payload == b"\x01":
            self._streams.pop(stream_id, None)
            self._unanswered.pop(stream_id, None)
            sink.abandon()
            sink.context.kill()
        else:
            sink.context.stop_generating()

    def _on_open(self, flags: int, stream_id: int, payload: bytes) -> None:
        head, body = decode_open(payload)
        if stream_id == 0 or stream_id in self._streams or stream_id in self._bodies:
            raise ProtocolError(f"stream id {stream_id} is reserved or in use")
        if self.paused and len(self.out) > MAX_BACKLOG_ITEMS:
            self._cut("backlog")
            return
        if body is not None:
            self._begin(stream_id, head, body)
            return
        if head.size > self._settings.max_message_bytes:
            self.refused("body_size")
            self._decline(stream_id, InvalidArgument(_too_large(head.size, self._settings.max_message_bytes)))
            return
        if len(self._bodies) >= MAX_PENDING_BODIES:
            self.refused("pending_bodies")
            raise ProtocolError(f"more than {MAX_PENDING_BODIES} requests are half sent")
        self._bodies[stream_id] = _PendingBody(head, self._loop.time())
        if self._body_timer is None:
            self._body_timer = self._loop.call_later(self._settings.message_timeout_seconds, self._check_bodies)

    def _on_body(self, flags: int, stream_id: int, payload: bytes) -> None:
        pending = self._bodies.get(stream_id)
        if pending is None:
            return  # declined or cancelled meanwhile: the rest of its body is of no interest
        if not self._pending.take(len(payload)):
            self._forget_body(stream_id)
            self.refused("pending_bodies")
            text = "Server overloaded: the requests under way exceed DYN_TCP_PENDING_BODIES_LIMIT_MB"
            self._decline(stream_id, Overloaded(text))
            return
        pending.received += len(payload)
        if pending.received > pending.head.size:
            raise ProtocolError(f"stream {stream_id} sent more than the {pending.head.size} bytes it announced")
        pending.parts.append(payload)
        if flags & END_FLAG:
            self._forget_body(stream_id)
            if pending.received != pending.head.size:
                raise ProtocolError(f"stream {stream_id} sent fewer bytes than it announced")
            self._begin(stream_id, pending.head, b"".join(pending.parts))

    def _begin(self, stream_id: int, head: Open, raw_body: bytes) -> None:
        assert self._hello is not None
        limit = self._settings.max_streams
        if len(self._streams) >= limit:
            self.refused("streams")
            text = f"Server overloaded: more than {limit} streams on one connection (DYN_TCP_MAX_STREAMS)"
            self._decline(stream_id, Overloaded(text))
            return
        try:
            body = decode_body(raw_body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # also text that is no UTF-8, or too deep
            self._decline(stream_id, InvalidArgument(f"the request body is not msgpack: {error}"))
            return
        deadline = None if head.deadline_ms is None else self._loop.time() + head.deadline_ms / 1000
        context = Context(
            head.id,
            head.metadata or None,
            trace=TraceContext.from_headers(head.trace) if head.trace else None,
            deadline=deadline,
        )
        context.prompt_tokens = head.prompt_tokens
        credit = min(max(self._hello.credits, 1), MAX_CREDIT)
        sink = MuxSink(self, stream_id, context, credit)
        self._streams[stream_id] = sink
        self._unanswered[stream_id] = perf_counter()
        try:
            sink.request_bytes = len(raw_body)
            self._core.dispatch(head.path, body, context, sink)
        except DynamoException as error:
            sink.end(error)

    def _forget_body(self, stream_id: int) -> None:
        """A body is complete, or of no interest any more."""
        pending = self._bodies.pop(stream_id, None)
        if pending is not None:
            self._pending.take(-pending.received)

    def _check_bodies(self) -> None:
        """Decline the requests whose body has been arriving for too long."""
        self._body_timer = None
        limit, now = self._settings.message_timeout_seconds, self._loop.time()
        for stream_id, pending in list(self._bodies.items()):
            if now - pending.began < limit:
                self._body_timer = self._loop.call_at(pending.began + limit, self._check_bodies)
                return  # the others came later
            self._forget_body(stream_id)
            self.refused("message_time")
            text = f"the request did not arrive within {limit:g} s (DYN_TCP_MESSAGE_TIMEOUT_SECS)"
            self._decline(stream_id, InvalidArgument(text))

    def call_when_starved(self, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back when a stream that waits for credit now has waited for as long as one may."""
        return self._loop.call_later(self._settings.credit_stall_seconds, callback)

    def _cut(self, limit: str) -> None:
        """Drop a caller that does not read; its streams are killed with it."""
        if self._transport is None:
            return
        logger.warning("a caller does not read (%s, %d streams); dropping its connection", limit, len(self._streams))
        self.refused(limit)
        self._transport.abort()

    def _decline(self, stream_id: int, error: DynamoException) -> None:
        self.out.append((stream_id, END_INDEX, 0, (), None, describe(error)))
        self.schedule_flush()

    def forget(self, stream_id: int) -> None:
        """A sink has ended by itself."""
        self._streams.pop(stream_id, None)

    # -- writing -------------------------------------------------------------------------------------------------

    def schedule_flush(self) -> None:
        """Flush at the next turn of the loop: whatever else is produced until then travels in the same frame."""
        if not self.flush_scheduled:
            self.flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _send_control(self, data: bytes) -> None:
        self._control.append(data)
        self.schedule_flush()

    def _flush(self) -> None:
        self.flush_scheduled = False
        transport = self._transport
        if transport is None or transport.is_closing():
            self.out.clear()
            self._control.clear()
            return
        parts = self._control
        self._control = []
        if parts and self.paused:  # these overtake the data; whoever reads neither may not ask for ever more of them
            self._backlog_bytes += sum([len(part) for part in parts])
            if self._backlog_bytes > MAX_BACKLOG_BYTES:
                self._cut("backlog")
                return
        # Data waits while the socket is full (each stream's credit bounds it); control frames do not.
        if self.out and not self.paused:
            items = self.out.copy()
            self.out.clear()  # the sinks hold a reference to this very list
            if self._unanswered:
                self._note_first(items)
            parts += self._encode(items)
        if parts:
            transport.writelines(parts)

    def _note_first(self, items: list[tuple[Any, ...]]) -> None:
        """Time the first item of each stream. Here and not where it is made: a token of a stream under way pays nothing."""
        now, unanswered = perf_counter(), self._unanswered
        for item in items:
            arrived = unanswered.pop(item[0], None)
            if arrived is not None and item[1] != END_INDEX:
                self._core.answered(now - arrived)

    def _encode(self, items: list[tuple[Any, ...]]) -> list[bytes]:
        try:
            return items_frames(items)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError):
            pass
        # One chunk holds a value that msgpack cannot carry. Its stream ends there, the others must not notice.
        parts: list[bytes] = []
        failed: set[int] = set()
        for item in items:
            stream_id = item[0]
            if stream_id in failed:
                continue
            try:
                parts += items_frames([item])
            except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
                failed.add(stream_id)
                failure = InvalidArgument(f"the engine produced a value that cannot be encoded: {error}")
                logger.error("stream %d: %s", stream_id, failure)
                parts += items_frames([(stream_id, END_INDEX, 0, (), None, describe(failure))])
                sink = self._streams.pop(stream_id, None)
                if sink is not None:
                    sink.abandon()
                    sink.context.kill()
        return parts

    def _fail(self, message: str) -> None:
        logger.warning("closing a mux connection: %s", message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(Kind.ERROR, pack({"message": message})))
            self._transport.close()
            self._loop.call_later(GOODBYE_SECONDS, self._transport.abort)  # of what it does not read

    def _watch(self, seconds: float) -> None:
        """Look in so many seconds whether the caller is still there."""
        self._check_at = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._check_at, self._check_peer)

    def _check_peer(self) -> None:
        limit = self._settings.silence_seconds
        if self._loop.time() - self._check_at >= limit / 4:
            # Late by so much: this process stood still, and what the caller said meanwhile is yet to be read.
            self._watch(limit)
            return
        if self._hello is None or self in self._strangers:
            patience = self._settings.handshake_timeout_seconds
            self.refused("handshake_time")
            said = "HELLO" if self._hello is None else "AUTH"
            self._fail(f"no {said} within {patience:g} s (DYN_TCP_HANDSHAKE_TIMEOUT_SECS)")
            return
        silence = self._loop.time() - self._last_heard
        if silence >= limit:
            self.refused("idle")
            logger.warning("a caller was silent for %.0f s; dropping its connection", silence)
            if self._transport is not None:
                self._transport.abort()
            return
        self._watch(limit - silence)


def _too_large(size: int, limit: int) -> str:
    return f"the request body of {size} bytes exceeds the limit of {limit} (DYN_TCP_MAX_MESSAGE_SIZE)"
