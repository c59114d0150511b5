"""The worker's side of the native TCP wire: request connections in, call-home connections out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast

from dynamo.errors import DynamoException, Overloaded
from dynamo.runtime.base.limits import PendingBytes, Refused, uncounted, within_descriptors
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.base.timers import due_of
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.core import ServerCore
from dynamo.runtime.calls.request_plane.expansion import exceeds_when_decoded
from dynamo.runtime.calls.request_plane.native.call_home import SETTING as CALL_HOME_SETTING
from dynamo.runtime.calls.request_plane.native.call_home import CallHomePolicy
from dynamo.runtime.calls.request_plane.native.frames import (
    ACCEPTED,
    OVERLOADED,
    PROMPT_TOKENS_HEADER,
    UNAVAILABLE,
    CallHome,
    Codec,
    ControlMessage,
    MalformedFrame,
    RequestDecoder,
    RequestFrame,
    decode_body,
    decode_call_home,
    decode_control,
    decode_payload,
    decode_request_stream,
    encode_ack,
)
from dynamo.runtime.calls.request_plane.native.request_stream import NativeRequestStream
from dynamo.runtime.calls.request_plane.native.sink import NativeSink
from dynamo.runtime.calls.request_plane.security import PlaneSecurity
from dynamo.runtime.observe.log_rate import LogRate
from dynamo.runtime.observe.tracing import TraceContext

logger = logging.getLogger(__name__)

DIALS_AT_ONCE: Final = 64  # answer connections being opened for one request connection; further ones wait
REQUESTS_PER_TURN: Final = 64  # of one connection, as on `mux`
SPARE_DESCRIPTORS: Final = 128  # for files, logs and the store

GOODBYE_SECONDS: Final = 1.0  # how long, at close, the last bytes of a stream may take to leave


NO_ROOM: Final = (
    f"{OVERLOADED} the requests under way exceed DYN_TCP_PENDING_BODIES_LIMIT_MB (of one connection: "
    "DYN_TCP_CONNECTION_BODIES_LIMIT_MB)"
)


class _OpenSinks(set[NativeSink]):
    """Response streams whose connection is open or being opened."""

    def __init__(self) -> None:
        super().__init__()
        self._is_empty: asyncio.Event | None = None  # while `wait_empty` waits

    def discard(self, sink: object) -> None:
        super().discard(sink)
        if not self and self._is_empty is not None:
            self._is_empty.set()

    async def wait_empty(self, seconds: float) -> None:
        """Return when there is none, or after `seconds`."""
        if not self:
            return
        self._is_empty = asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_empty.wait()


class NativeServer:
    """All native connections of one listener. It accepts none itself: the listener hands them over."""

    def __init__(
        self,
        core: ServerCore,
        settings: RequestPlaneSettings,
        *,
        pending: PendingBytes | None = None,
        refused: Refused = uncounted,
    ) -> None:
        """`pending` is shared by all connections of a listener, and `refused` counts."""
        self._core = core
        self.settings = settings
        self.pending = pending or PendingBytes(settings.pending_bytes, settings.largest_connection_pending_bytes)
        self.refused = refused
        self.log = LogRate(logger)
        self._policy = CallHomePolicy(settings.call_home_networks)
        self._max_streams = within_descriptors(settings.max_streams, spare=SPARE_DESCRIPTORS, share=0.5)
        self._connections: set[RequestConnection] = set()
        self._sinks = _OpenSinks()
        self._dials = Background()
        self.security = PlaneSecurity()  # set by the listener when it starts
        self._nats_dials = asyncio.Semaphore(DIALS_AT_ONCE)

    @property
    def connections(self) -> int:
        """Open request connections."""
        return len(self._connections)

    @property
    def streams(self) -> int:
        """Response streams whose connection is open or being opened."""
        return len(self._sinks)

    def adopt(self, transport: asyncio.Transport, data: bytes) -> None:
        """Take over a connection whose first bytes were read by the listener."""
        connection = RequestConnection(self)
        connection.connection_made(transport)
        transport.set_protocol(connection)
        connection.data_received(data)

    def refusal(self, text: str, *, is_overload: bool = False) -> bytes:
        """Return the rejection of a caller as bytes of this wire."""
        return encode_ack(f"{OVERLOADED if is_overload else UNAVAILABLE} {text}")

    async def close(self) -> None:
        """Close every connection; what the streams had queued still leaves, within `GOODBYE_SECONDS`."""
        for connection in list(self._connections):
            connection.close()
        await self._dials.wait(GOODBYE_SECONDS)
        for sink in list(self._sinks):
            sink.close()
        await self._sinks.wait_empty(GOODBYE_SECONDS)
        await self._dials.close()
        for sink in list(self._sinks):
            sink.abort()
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)  # an aborted transport reports its loss on the next turn

    # -- for the connections -------------------------------------------------------------------------------------

    def joined(self, connection: RequestConnection) -> None:
        self._connections.add(connection)

    def left(self, connection: RequestConnection) -> None:
        self._connections.discard(connection)

    def serve(self, frame: RequestFrame, connection: RequestConnection) -> bytes:
        """Start one request and return its ACK. The ACK and the call-home do not wait for each other."""
        if self.security.server is not None and self.security.client is None:
            # Requests that came over TLS must not be answered in plain text.
            return encode_ack(f"{UNAVAILABLE} its answers would have no TLS: DYN_TCP_TLS_CA_CERT_PATH is not set there")
        refusal = self.begin(frame.path, frame.headers, frame.payload, connection)
        return ACCEPTED if refusal is None else encode_ack(refusal)

    def begin(
        self, path: str, headers: Mapping[str, str], payload: bytes, connection: RequestConnection | None = None
    ) -> str | None:
        """Start one request; the text of its ACK when it is declined, else None.

        `connection` None: requests come over NATS, whose ACK has no room for a reason. There a declined request gets its
        error on its response stream, and None is returned.
        """
        try:
            call = self._decode(path, payload, None if connection is None else connection.peer)
        except MalformedFrame as error:
            self.log.warn("declined malformed native requests", "declined a request for %s: %s", path, error)
            return f"{UNAVAILABLE} malformed request: {error}"
        if len(self._sinks) >= self._max_streams:
            self.refused("streams")
            return f"{OVERLOADED} more than {self._max_streams} answers on their way (DYN_TCP_MAX_STREAMS)"
        return self._start(call, path, headers, connection)

    def _decode(self, path: str, payload: bytes, caller: str | None) -> _Call:
        """Read a request, and check where its answer is to go. Raises `MalformedFrame`."""
        control_header, raw_body = decode_payload(payload)
        control = decode_control(control_header)
        home = decode_call_home(control)
        self._check_home(home, caller)
        requests: CallHome | None = None
        body: Any = None
        match control.request_type:
            case "single_in":
                body = self._decode_body(raw_body, control.payload_codec)
            case "many_in" if self._core.takes_one(path):
                raise MalformedFrame("this endpoint takes one request, not a stream of them (many_in)")
            case "many_in":
                requests = decode_request_stream(control)
                self._check_home(requests, caller)
            case other:
                raise MalformedFrame(f"request_type {other!r} is not supported; use single_in or many_in")
        return _Call(control, home, requests, body, len(raw_body))

    def _check_home(self, home: CallHome, caller: str | None) -> None:
        host, _ = home.host_and_port()
        if not self._policy.permits(host, caller):
            self.refused("call_home")
            raise MalformedFrame(
                f"it asks for its answer at {host}, and it came from {caller or 'NATS'}; "
                f"{CALL_HOME_SETTING} allows further networks"
            )

    def _decode_body(self, raw_body: bytes, codec: str) -> Any:
        limit = self.settings.max_decoded_bytes
        if exceeds_when_decoded(raw_body, limit, codec):
            self.refused("decoded_size")
            raise MalformedFrame(
                f"body of {len(raw_body)} bytes takes more than {limit} once decoded (DYN_TCP_MAX_DECODED_MB)"
            )
        return decode_body(raw_body, codec)

    def _start(
        self, call: _Call, path: str, headers: Mapping[str, str], connection: RequestConnection | None
    ) -> str | None:
        control = call.control
        codec: Codec = "msgpack" if control.payload_codec == "msgpack" else "json"
        context = Context(control.id, control.metadata, trace=TraceContext.from_headers(dict(headers)))
        grown_from = headers.get(PROMPT_TOKENS_HEADER, "")
        if grown_from.isascii() and grown_from.isdigit() and len(grown_from) <= 10:
            context.prompt_tokens = int(grown_from)
        requests = None
        if call.requests is not None:
            limit = self.settings.max_decoded_bytes
            requests = NativeRequestStream(call.requests.subject, codec, context, self.log, limit)
        sink = NativeSink(
            call.home.subject,
            codec,
            context,
            request_bytes=call.body_bytes,
            on_closed=self._sinks.discard,
            write_stall_seconds=self.settings.write_stall_seconds,
            refused=self.refused,
            log=self.log,
        )
        body = call.body if requests is None else requests
        try:
            self._core.dispatch(path, body, context, sink, connection)
        except DynamoException as error:
            sink.end(error)  # where it never connects, this only lets go of the context
            if requests is not None:
                requests.close()
                requests = None
            if connection is not None:
                return _declined(error)
        self._sinks.add(sink)
        # The handler starts meanwhile: the sink buffers.
        slots = self._nats_dials if connection is None else connection.dials
        self._call_home(sink, call.home, slots, control.id)
        if requests is not None and call.requests is not None:
            self._call_home(requests, call.requests, slots, control.id)
        return None

    def _call_home(
        self, stream: NativeSink | NativeRequestStream, home: CallHome, slots: asyncio.Semaphore, request_id: str
    ) -> None:
        if self._dials.is_closed:
            stream.not_connected()
            return
        self._dials.start(self._dial(stream, home, slots), f"call-home {request_id}")

    async def _dial(self, stream: NativeSink | NativeRequestStream, home: CallHome, slots: asyncio.Semaphore) -> None:
        host, port = home.host_and_port()
        try:
            async with slots, asyncio.timeout(self.settings.connect_timeout_seconds):
                # asyncio and uvloop both set TCP_NODELAY on every TCP transport.
                await asyncio.get_running_loop().create_connection(
                    lambda: stream, host, port, **self.security.connect_options(host)
                )
        except (OSError, ValueError) as error:
            text = "cannot connect back to a caller at %s:%s: %s; its request is killed"
            self.log.warn("callers that cannot be connected back to", text, host, port, error or type(error).__name__)
            stream.not_connected()
        except asyncio.CancelledError:
            stream.not_connected()
            raise


@dataclass(frozen=True, slots=True)
class _Call:
    """One decoded request."""

    control: ControlMessage
    home: CallHome
    requests: CallHome | None  # many_in: where they are fetched, in place of a body
    body: Any
    body_bytes: int


class RequestConnection(asyncio.Protocol):
    """One caller's request connection: frames in, ACKs out in the same order."""

    def __init__(self, server: NativeServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._decoder = RequestDecoder(server.settings.max_message_bytes)
        self._transport: asyncio.Transport | None = None
        self.peer: str | None = None  # the caller's address
        self.dials = asyncio.Semaphore(DIALS_AT_ONCE)
        self._held_bytes = 0  # of the half frame, as `pending` counts it
        self._heard_at = self._frame_began = self._loop.time()
        self._paused_at: float | None = None
        self._is_postponed = False  # the rest of what was read is served in the next turn
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) else ""  # "": of no network; nothing is brought there
        self._server.joined(self)
        self._arm()

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._heard_at = self._loop.time()
        self._decoder.feed(data)
        if not self._is_postponed:
            self._serve(transport)

    def _serve(self, transport: asyncio.Transport) -> None:
        """Serve what has arrived, so many requests in one turn of the loop."""
        acks: list[bytes] = []
        try:
            while len(acks) < REQUESTS_PER_TURN and (frame := self._decoder.next_frame()) is not None:
                acks.append(self._server.serve(frame, self))
        except MalformedFrame as error:
            self._server.log.warn("closing native request connections", "closing a request connection: %s", error)
            self._leave("malformed", f"Read error: {error}", acks)
            return
        if acks:
            transport.write(b"".join(acks))
        if len(acks) == REQUESTS_PER_TURN:
            self._is_postponed = True
            transport.pause_reading()
            self._loop.call_soon(self._go_on)
            return
        held = self._decoder.held_bytes
        if held or self._held_bytes:
            self._hold(held, is_new=bool(acks) or not self._held_bytes)

    def _go_on(self) -> None:
        self._is_postponed = False
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._serve(transport)
        if not self._is_postponed and self._paused_at is None and not transport.is_closing():
            transport.resume_reading()

    def _hold(self, held: int, *, is_new: bool) -> None:
        """Keep account of a frame that is still arriving."""
        if not self._server.pending.take(self, held - self._held_bytes):
            self._leave("pending_bodies", NO_ROOM)
            return
        self._held_bytes = held
        if is_new:
            self._frame_began = self._heard_at
            self._arm()

    def shed_body(self) -> None:
        """Give up the request that is arriving: a connection that holds less than this one needs the room."""
        self._give_back()
        self._leave("pending_bodies", NO_ROOM)

    def _give_back(self) -> None:
        held, self._held_bytes = self._held_bytes, 0
        if held:
            self._server.pending.take(self, -held)

    def _leave(self, limit: str, text: str, acks: Sequence[bytes] = ()) -> None:
        self._server.refused(limit)
        if self._transport is not None:
            self._transport.write(b"".join([*acks, encode_ack(text)]))
            self._transport.close()
            self._loop.call_later(GOODBYE_SECONDS, self._transport.abort)  # of what it does not read

    def _due(self) -> float:
        settings = self._server.settings
        due = self._heard_at + settings.idle_seconds
        if self._held_bytes:
            due = min(due, self._frame_began + settings.message_timeout_seconds)
        if self._paused_at is not None:
            due = self._paused_at + settings.write_stall_seconds  # it is this side that does not read
        return due

    def _arm(self) -> None:
        due = self._due()
        if self._timer is not None:
            if due_of(self._timer) <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._due() > self._loop.time():
            self._arm()
        elif self._paused_at is not None:
            self._server.refused("write_stall")
            transport.abort()
        elif self._held_bytes:
            limit = self._server.settings.message_timeout_seconds
            text = f"{UNAVAILABLE} the request did not arrive within {limit:g} s (DYN_TCP_MESSAGE_TIMEOUT_SECS)"
            self._leave("message_time", text)
        else:
            self._server.refused("idle")
            transport.close()

    def pause_writing(self) -> None:
        # A caller that sends requests without reading its ACKs gets no more of them served.
        self._paused_at = self._loop.time()
        if self._transport is not None:
            self._transport.pause_reading()
            self._arm()

    def resume_writing(self) -> None:
        self._paused_at = None
        self._frame_began = self._loop.time()
        if self._transport is not None and not self._transport.is_closing() and not self._is_postponed:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        # Its requests go on: their streams are connections of their own, and report themselves when the caller leaves.
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._give_back()
        self._server.left(self)

    def close(self) -> None:
        """Stop reading requests; ACKs already written still leave."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Drop the connection now."""
        if self._transport is not None:
            self._transport.abort()


def _declined(error: DynamoException) -> str:
    text = str(error)
    if text.startswith((OVERLOADED, UNAVAILABLE)):
        return text
    return f"{OVERLOADED if isinstance(error, Overloaded) else UNAVAILABLE} {text}"
