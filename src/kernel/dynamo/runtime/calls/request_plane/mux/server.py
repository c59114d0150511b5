"""The worker's side of a `mux` connection: frames in, requests out; many streams, one outbox."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import msgspec

from dynamo.errors import DynamoException, InvalidArgument, Overloaded, describe
from dynamo.runtime.base.limits import PendingBytes, Refused, uncounted
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.base.timers import LoopTimer
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import END_INDEX
from dynamo.runtime.calls.request_plane.core import ServerCore
from dynamo.runtime.calls.request_plane.mux.bodies import DecodedTooLarge, HalfSentRequests, InSlices, decode_long
from dynamo.runtime.calls.request_plane.mux.frames import (
    MAGIC,
    STEP_CAPABILITY,
    VERSION,
    Frame,
    FrameDecoder,
    Hello,
    Kind,
    Open,
    ProtocolError,
    decode_credits,
    decode_hello,
    decode_open,
    frame,
    pack,
)
from dynamo.runtime.calls.request_plane.mux.outbox import ItemOutbox
from dynamo.runtime.calls.request_plane.mux.sink import MuxSink
from dynamo.runtime.calls.request_plane.secret import (
    SECRET_CAPABILITY,
    SECRET_SETTING,
    SharedSecret,
    WrongSecret,
    check_nonce,
    new_nonce,
)
from dynamo.runtime.observe.log_rate import LogRate
from dynamo.runtime.observe.tracing import TraceContext

logger = logging.getLogger(__name__)

CAPABILITIES: Final = ["deadline", "credits", "fragments", STEP_CAPABILITY]
MAX_CREDIT: Final = 1 << 20  # a caller may not make one stream buffer more than a million tokens
GOODBYE_SECONDS: Final = 1.0  # how long the last bytes of a closing connection may take to leave

REQUESTS_PER_TURN: Final = 64
"""Requests taken from one connection in one turn of the event loop. What else has arrived on it waits, unread, for the next
turn, so a flood on one connection costs the others a millisecond or two and not the time of the whole flood."""


@dataclass(frozen=True)
class MuxHost:
    """What all `mux` connections of one listener share."""

    core: ServerCore
    settings: RequestPlaneSettings
    pending: PendingBytes
    refused: Refused = uncounted
    secret: SharedSecret | None = None
    connections: set[MuxServerProtocol] = field(default_factory=set)  # the open ones; each adds and removes itself
    strangers: set[MuxServerProtocol] = field(default_factory=set)  # those whose caller has not proven the secret
    log: LogRate = field(default_factory=lambda: LogRate(logger))

    @classmethod
    def of(cls, core: ServerCore, settings: RequestPlaneSettings) -> MuxHost:
        """Make a host with limits of its own and without counters."""
        return cls(core, settings, PendingBytes(settings.pending_bytes, settings.largest_connection_pending_bytes))


class CallerGreeting:
    """What a caller owes before its first request: HELLO, and where there is a shared secret the proof that it knows it."""

    __slots__ = ("_connection", "_host", "_nonces", "_was_heard", "credits", "is_owed")

    def __init__(self, connection: MuxServerProtocol, host: MuxHost) -> None:
        self._connection, self._host = connection, host
        self._nonces = ("", "")  # the caller's and ours
        self._was_heard = False
        self.is_owed = True
        self.credits = 0  # of each stream at its start
        if host.secret is not None:
            host.strangers.add(connection)

    def on_frame(self, kind: int, payload: bytes) -> None:
        """Take a frame while the greeting is owed. Raises ProtocolError and WrongSecret."""
        if self._was_heard:
            self._on_stranger(kind, payload)
        else:
            self._on_hello(kind, payload)
        self.is_owed = not self._was_heard or self._connection in self._host.strangers
        if not self.is_owed:
            self._host.core.shares.joined(self._connection)

    def late_frame(self) -> str | None:
        """Return the frame that is still owed; None when none is."""
        if not self._was_heard:
            return "HELLO"
        return "AUTH" if self._connection in self._host.strangers else None

    def _on_hello(self, kind: int, payload: bytes) -> None:
        if kind != Kind.HELLO:
            raise ProtocolError(f"the first frame must be HELLO, got kind {kind}")
        hello = decode_hello(payload)
        if hello.version < 1:
            raise ProtocolError(f"mux version {hello.version} is not spoken here; versions 1 to {VERSION} are")
        self._was_heard = True
        self.credits = min(max(hello.credits, 1), MAX_CREDIT)
        outbox = self._connection.outbox
        outbox.step.is_read = STEP_CAPABILITY in hello.capabilities
        reply = Hello(version=min(hello.version, VERSION), capabilities=CAPABILITIES, agent="dynamo-unified")
        secret = self._host.secret
        if secret is not None:
            if hello.auth is None:
                raise WrongSecret(f"this worker asks for the shared secret, and the caller has none ({SECRET_SETTING})")
            check_nonce(hello.auth)
            nonces = self._nonces = (hello.auth, new_nonce())
            reply.auth = f"{nonces[1]}:{secret.prove('worker', *nonces)}"
            reply.capabilities = [*CAPABILITIES, SECRET_CAPABILITY]
        outbox.send(frame(Kind.HELLO, pack(reply)))

    def _on_stranger(self, kind: int, payload: bytes) -> None:
        secret = self._host.secret
        if kind == Kind.ERROR:
            self._connection.on_error(0, 0, payload)
        elif kind == Kind.AUTH and secret is not None:
            secret.check(payload.decode("ascii", "replace"), "caller", *self._nonces)
            self._host.strangers.discard(self._connection)
        elif self._connection.takes(kind):
            raise WrongSecret(f"the caller has not proven that it knows the shared secret ({SECRET_SETTING})")


@dataclass(frozen=True, slots=True)
class _Reading:
    """A request whose body is being decoded."""

    host: MuxHost
    sink: MuxSink
    path: str
    body: InSlices[object]

    def go_on(self) -> None:
        """Decode the next slice, or start the request: nearly every one is decoded at once."""
        host, sink = self.host, self.sink
        if sink.ended or sink.context.is_killed():  # given up meanwhile
            return
        try:
            next(self.body)
        except StopIteration as read:
            try:
                host.core.dispatch(self.path, read.value, sink.context, sink, sink.connection)
            except DynamoException as error:
                sink.end(error)
        except DecodedTooLarge:
            host.refused("decoded_size")
            text = f"the request body of {sink.request_bytes} bytes takes more than {host.settings.max_decoded_bytes}"
            sink.end(InvalidArgument(f"{text} once decoded (DYN_TCP_MAX_DECODED_MB)"))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # also text that is no UTF-8, or too deep
            sink.end(InvalidArgument(f"the request body is not msgpack: {error}"))
        else:
            asyncio.get_running_loop().call_soon(self.go_on)


class MuxServerProtocol(asyncio.Protocol):
    """One accepted connection. The listener calls `adopt` after it has seen `MAGIC`."""

    def __init__(self, host: MuxHost) -> None:
        """Where the host has a secret, the caller must prove that it knows it before anything else is done for it."""
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder(preface=MAGIC)
        self._postponed: list[Frame] = []  # read and not handled: this turn's requests were taken
        self._streams: dict[int, MuxSink] = {}
        self._half_sent = HalfSentRequests(host.settings, host.pending, decline=self._decline, refused=host.refused)
        self._greeting = CallerGreeting(self, host)
        self._watch = _PeerWatch(self)
        self.outbox = ItemOutbox(answered=host.core.observers.answered, cut=self._cut, end_stream=self._end_stream)
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            Kind.OPEN: self._on_open,
            Kind.CREDIT: self._on_credit,
            Kind.CANCEL: self._on_cancel,
            Kind.BODY: self._on_body,
            Kind.PING: self._on_ping,
            Kind.PONG: self._on_nothing,
            Kind.GOAWAY: self._on_nothing,
            Kind.HELLO: self._on_second_hello,
            Kind.ERROR: self.on_error,
        }

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        self._transport = self.outbox.transport = cast(asyncio.Transport, transport)
        self._host.connections.add(self)
        self._watch.start(self._host.settings.handshake_timeout_seconds)

    def adopt(self, transport: asyncio.Transport, data: bytes) -> None:
        """Take over a connection whose first bytes (`MAGIC` included) were read by the listener."""
        self.connection_made(transport)
        transport.set_protocol(self)
        self.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._watch.heard_at = self._loop.time()
        try:
            frames = self._decoder.feed(data)
            if self._postponed:
                self._postponed += frames
            else:
                self._handle(frames)
        except (ProtocolError, WrongSecret, msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._broken(error)

    def _handle(self, frames: Sequence[Frame]) -> None:
        requests = 0
        for position, (kind, flags, stream_id, payload) in enumerate(frames):
            if kind == Kind.OPEN:
                if requests >= REQUESTS_PER_TURN:
                    self._postpone(list(frames[position:]))
                    return
                requests += 1
            if self._greeting.is_owed:
                self._greeting.on_frame(kind, payload)
                continue
            handle = self._handlers.get(kind)
            if handle is not None:  # else a later version's frame: skipping it is what lets versions mix
                handle(flags, stream_id, payload)

    def _postpone(self, frames: list[Frame]) -> None:
        """Go on with the next turn of the loop, and read nothing until then."""
        self._postponed = frames
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        frames, self._postponed = self._postponed, []
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._watch.heard_at = self._loop.time()  # it is this side that did not read
        try:
            self._handle(frames)
        except (ProtocolError, WrongSecret, msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._broken(error)
        if not self._postponed and not transport.is_closing():
            transport.resume_reading()

    def _broken(self, error: Exception) -> None:
        self._host.refused("secret" if isinstance(error, WrongSecret) else "malformed")
        self.fail(str(error))

    def eof_received(self) -> bool:
        return False  # a caller that closed its half is a caller that left

    def through(self, stand_in: Callable[[asyncio.Transport], asyncio.Transport]) -> None:
        """Write to what `stand_in` gives for the transport from now on, for fault injection."""
        if self._transport is not None:
            self._transport = self.outbox.transport = stand_in(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._host.connections.discard(self)
        self._host.strangers.discard(self)
        self._host.core.shares.left(self)
        self._watch.stop()
        self.outbox.clear()
        self._half_sent.close()
        streams, self._streams = self._streams, {}
        for sink in streams.values():
            sink.abandon()
            sink.context.kill()
        self._transport = None

    def pause_writing(self) -> None:
        self.outbox.pause()
        self._watch.stalls()

    def resume_writing(self) -> None:
        self._watch.reads()
        self.outbox.resume()

    # -- leaving -------------------------------------------------------------------------------------------------

    def goaway(self, reason: str) -> None:
        """Let the caller open no more streams here; those in flight go on."""
        self.outbox.send(frame(Kind.GOAWAY, pack({"reason": reason})))

    def close(self) -> None:
        """Send what is queued and close; streams still open end with the connection."""
        if self._transport is None or self._transport.is_closing():
            return
        self.outbox.flush()
        self._transport.close()
        # A peer that does not read would keep the last bytes, and this process, alive for ever.
        self._loop.call_later(GOODBYE_SECONDS, self._transport.abort)

    def fail(self, message: str) -> None:
        """Send the caller the error, and close."""
        self._host.log.warn("closing a mux connection", "closing a mux connection: %s", message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(Kind.ERROR, pack({"message": message})))
            self._transport.close()
            self._loop.call_later(GOODBYE_SECONDS, self._transport.abort)  # of what it does not read

    def _cut(self, limit: str) -> None:
        """Drop a caller that does not read; its streams are killed with it."""
        if self._transport is None:
            return
        text = "a caller does not read (%s, %d streams); its connection is dropped and its requests are killed"
        self._host.log.warn("a caller does not read", text, limit, len(self._streams))
        self._host.refused(limit)
        self._transport.abort()

    # -- frames --------------------------------------------------------------------------------------------------

    def _on_second_hello(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ProtocolError("HELLO may be sent once")

    def _on_nothing(self, flags: int, stream_id: int, payload: bytes) -> None:
        pass

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise ProtocolError("PING carries 8 bytes")
        self.outbox.send(frame(Kind.PONG, payload))

    def on_error(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Close: the caller found a mistake of this side."""
        text = "a caller reported a protocol error and leaves: %r"
        self._host.log.warn("a caller reported a protocol error", text, payload[:200])
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
        self._half_sent.forget(stream_id)
        sink = self._streams.get(stream_id)
        if sink is None:
            return  # it has just ended: the two crossed on the wire
        if payload == b"\x01":
            self.outbox.expect_no_answer(stream_id)
            self._end_stream(stream_id)
        else:
            sink.context.stop_generating()

    def _on_open(self, flags: int, stream_id: int, payload: bytes) -> None:
        head, body = decode_open(payload)
        if stream_id == 0 or stream_id in self._streams or stream_id in self._half_sent:
            raise ProtocolError(f"stream id {stream_id} is reserved or in use")
        if self.outbox.is_overfull:
            self._cut("backlog")
        elif body is None:
            self._half_sent.begin(stream_id, head)
        else:
            self._begin(stream_id, head, body)

    def _on_body(self, flags: int, stream_id: int, payload: bytes) -> None:
        request = self._half_sent.add(flags, stream_id, payload)
        if request is not None:
            self._begin(stream_id, *request)

    # -- requests ------------------------------------------------------------------------------------------------

    def _begin(self, stream_id: int, head: Open, raw_body: bytes) -> None:
        host = self._host
        limit = host.settings.max_streams
        if len(self._streams) >= limit:
            host.refused("streams")
            text = f"Server overloaded: more than {limit} streams on one connection (DYN_TCP_MAX_STREAMS)"
            self._decline(stream_id, Overloaded(text))
            return
        deadline = None if head.deadline_ms is None else self._loop.time() + head.deadline_ms / 1000
        trace = TraceContext.from_headers(head.trace) if head.trace else None
        context = Context(head.id, head.metadata or None, trace=trace, deadline=deadline)
        context.prompt_tokens = head.prompt_tokens
        sink = MuxSink(self, self.outbox, stream_id, context, self._greeting.credits)
        self._streams[stream_id] = sink
        self.outbox.expect_answer(stream_id)
        sink.request_bytes = len(raw_body)
        _Reading(host, sink, head.path, decode_long(raw_body, host.settings.max_decoded_bytes)).go_on()

    def _decline(self, stream_id: int, error: DynamoException) -> None:
        self.outbox.add((stream_id, END_INDEX, 0, (), None, describe(error)))

    def _end_stream(self, stream_id: int) -> None:
        """Kill a request that is not answered any more."""
        sink = self._streams.pop(stream_id, None)
        if sink is not None:
            sink.abandon()
            sink.context.kill()

    # -- for the greeting, the sinks and the watch ---------------------------------------------------------------

    def takes(self, kind: int) -> bool:
        """Return whether frames of this kind mean anything here."""
        return kind in self._handlers

    def late_greeting(self) -> str | None:
        """Return the frame that a caller still owes before its first request; None when it owes none."""
        return self._greeting.late_frame()

    def forget(self, stream_id: int) -> None:
        """Forget a sink that has ended by itself."""
        self._streams.pop(stream_id, None)

    def refused(self, limit: str) -> None:
        """Count a refusal."""
        self._host.refused(limit)

    @property
    def settings(self) -> RequestPlaneSettings:
        return self._host.settings

    def call_when_starved(self, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back when a stream that waits for credit now has waited for as long as one may."""
        return self._loop.call_later(self._host.settings.credit_stall_seconds, callback)

    def drop(self, limit: str, text: str, *values: object) -> None:
        """Drop a caller for what a timer found."""
        self._host.refused(limit)
        self._host.log.warn(limit, text, *values)
        if self._transport is not None:
            self._transport.abort()

    def stalled(self) -> None:
        """Close the connection: the caller has read nothing for too long."""
        self._cut("write_stall")


class _PeerWatch:
    """The timers of one connection: whether the caller greets in time, sends, and reads."""

    __slots__ = ("_connection", "_loop", "_stall_timer", "_timer", "heard_at")

    def __init__(self, connection: MuxServerProtocol) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        self._timer: LoopTimer | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        """Check in so many seconds whether the caller is still there."""
        self._timer = LoopTimer(seconds, self._check)

    def stop(self) -> None:
        """Stop: the connection is lost."""
        for timer in (self._timer, self._stall_timer):
            if timer is not None:
                timer.cancel()

    def stalls(self) -> None:
        """Start the stall timer: the caller has stopped reading."""
        seconds = self._connection.settings.write_stall_seconds
        self._stall_timer = self._loop.call_later(seconds, self._connection.stalled)

    def reads(self) -> None:
        """Stop the stall timer: the caller reads again."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check(self) -> None:
        settings = self._connection.settings
        limit = settings.silence_seconds
        missing = self._connection.late_greeting()
        if missing is not None:
            self._connection.refused("handshake_time")
            patience = settings.handshake_timeout_seconds
            self._connection.fail(f"no {missing} within {patience:g} s (DYN_TCP_HANDSHAKE_TIMEOUT_SECS)")
            return
        silence = self._loop.time() - self.heard_at
        if silence >= limit:
            self._connection.drop("idle", "a caller was silent for %.0f s; its connection is dropped", silence)
            return
        self.start(max(limit - silence, limit / 4))  # a short timer leaves no time after a standstill
