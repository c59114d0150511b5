"""The worker's side of the native TCP wire: request connections in, call-home connections out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final, cast

from dynamo.errors import DynamoException, Overloaded
from dynamo.runtime.context import Context
from dynamo.runtime.limits import PendingBytes, Refused, uncounted
from dynamo.runtime.request_plane.core import ServerCore
from dynamo.runtime.request_plane.native.frames import (
    ACCEPTED,
    OVERLOADED,
    PROMPT_TOKENS_HEADER,
    UNAVAILABLE,
    Codec,
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
from dynamo.runtime.request_plane.native.request_stream import NativeRequestStream
from dynamo.runtime.request_plane.native.sink import NativeSink
from dynamo.runtime.request_plane.security import PlaneSecurity
from dynamo.runtime.settings import RequestPlaneSettings
from dynamo.runtime.tracing import TraceContext

logger = logging.getLogger(__name__)

GOODBYE_SECONDS: Final = 1.0  # how long, at close, the last bytes of a stream may take to leave


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
        self.pending = pending or PendingBytes(settings.pending_bytes)
        self.refused = refused
        self._connections: set[RequestConnection] = set()
        self._sinks: set[NativeSink] = set()
        self._dials: set[asyncio.Task[None]] = set()
        self.security = PlaneSecurity()  # set by the listener when it starts
        self._no_streams: asyncio.Future[None] | None = None  # awaited by `close`

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

    async def close(self) -> None:
        """Close every connection; what the streams had queued still leaves, within `GOODBYE_SECONDS`."""
        for connection in list(self._connections):
            connection.close()
        if self._dials:
            await asyncio.wait(self._dials, timeout=GOODBYE_SECONDS)
        for sink in list(self._sinks):
            sink.close()
        if self._sinks:
            self._no_streams = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._no_streams], timeout=GOODBYE_SECONDS)
        for dial in list(self._dials):
            dial.cancel()
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

    def serve(self, frame: RequestFrame) -> bytes:
        """Start one request and return its ACK. The ACK and the call-home do not wait for each other."""
        if self.security.server is not None and self.security.client is None:
            # Requests that came over TLS must not be answered in plain text.
            return encode_ack(f"{UNAVAILABLE} its answers would have no TLS: DYN_TCP_TLS_CA_CERT_PATH is not set there")
        refusal = self.begin(frame.path, frame.headers, frame.payload)
        return ACCEPTED if refusal is None else encode_ack(refusal)

    def begin(
        self, path: str, headers: Mapping[str, str], payload: bytes, *, answers_declined: bool = False
    ) -> str | None:
        """Start one request; the text of its ACK when it is declined, else None.

        `answers_declined`: a request that is declined is told so on its response stream, and None is returned, because
        whoever carries requests here has no ACK that says why.
        """
        try:
            control_header, raw_body = decode_payload(payload)
            control = decode_control(control_header)
            call_home = decode_call_home(control)
            host, port = call_home.host_and_port()
            match control.request_type:
                case "single_in":
                    requests = None
                    body = decode_body(raw_body, control.payload_codec)
                case "many_in" if self._core.takes_one(path):
                    raise MalformedFrame("this endpoint takes one request, not a stream of them (many_in)")
                case "many_in":
                    requests = decode_request_stream(control)
                    requests_host, requests_port = requests.host_and_port()
                case other:
                    raise MalformedFrame(f"request_type {other!r} is not supported; use single_in or many_in")
        except MalformedFrame as error:
            logger.warning("declined a request for %s: %s", path, error)
            return f"{UNAVAILABLE} malformed request: {error}"
        codec: Codec = "msgpack" if control.payload_codec == "msgpack" else "json"
        context = Context(control.id, control.metadata, trace=TraceContext.from_headers(dict(headers)))
        grown_from = headers.get(PROMPT_TOKENS_HEADER, "")
        if grown_from.isascii() and grown_from.isdigit() and len(grown_from) <= 10:
            context.prompt_tokens = int(grown_from)
        if requests is not None:
            body = NativeRequestStream(requests.subject, codec, context)
        sink = NativeSink(
            call_home.subject,
            codec,
            context,
            request_bytes=len(raw_body),
            on_closed=self._stream_closed,
            write_stall_seconds=self.settings.write_stall_seconds,
            refused=self.refused,
        )
        try:
            self._core.dispatch(path, body, context, sink)
        except DynamoException as error:
            sink.end(error)  # where it never connects, this only lets go of the context
            if requests is not None:
                body.close()
                requests = None
            if not answers_declined:
                return _declined(error)
        self._sinks.add(sink)
        # The handler starts meanwhile: the sink buffers.
        self._call_home(sink, host, port, control.id)
        if requests is not None:
            self._call_home(body, requests_host, requests_port, control.id)
        return None

    def _call_home(self, stream: NativeSink | NativeRequestStream, host: str, port: int, request_id: str) -> None:
        # Held by `_dials` and awaited by `close`.
        dial = asyncio.get_running_loop().create_task(self._dial(stream, host, port), name=f"call-home {request_id}")
        self._dials.add(dial)
        dial.add_done_callback(self._dials.discard)

    def _stream_closed(self, sink: NativeSink) -> None:
        self._sinks.discard(sink)
        if not self._sinks and self._no_streams is not None and not self._no_streams.done():
            self._no_streams.set_result(None)

    async def _dial(self, stream: NativeSink | NativeRequestStream, host: str, port: int) -> None:
        try:
            async with asyncio.timeout(self.settings.connect_timeout_seconds):
                # asyncio and uvloop both set TCP_NODELAY on every TCP transport.
                await asyncio.get_running_loop().create_connection(
                    lambda: stream, host, port, **self.security.connect_options(host)
                )
        except (OSError, ValueError) as error:
            logger.warning("cannot connect back to a caller at %s:%s: %s", host, port, error or type(error).__name__)
            stream.not_connected()
        except asyncio.CancelledError:
            stream.not_connected()
            raise


class RequestConnection(asyncio.Protocol):
    """One caller's request connection: frames in, ACKs out in the same order."""

    def __init__(self, server: NativeServer) -> None:
        self._server = server
        self._settings = server.settings
        self._loop = asyncio.get_running_loop()
        self._decoder = RequestDecoder(server.settings.max_message_bytes)
        self._transport: asyncio.Transport | None = None
        self._held_bytes = 0  # of the half frame, as `pending` was told
        self._heard_at = self._frame_began = self._loop.time()
        self._paused_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        self._transport = cast(asyncio.Transport, transport)
        self._server.joined(self)
        self._arm()

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._heard_at = self._loop.time()
        self._decoder.feed(data)
        acks: list[bytes] = []
        try:
            while (frame := self._decoder.next_frame()) is not None:
                acks.append(self._server.serve(frame))
        except MalformedFrame as error:
            logger.warning("closing a request connection: %s", error)
            self._leave("malformed", f"Read error: {error}", acks)
            return
        if acks:
            transport.write(b"".join(acks))
        held = self._decoder.held_bytes
        if held or self._held_bytes:
            self._hold(held, is_new=bool(acks) or not self._held_bytes)

    def _hold(self, held: int, *, is_new: bool) -> None:
        """Keep account of a frame that is still arriving."""
        if not self._server.pending.take(held - self._held_bytes):
            text = f"{OVERLOADED} the requests under way exceed DYN_TCP_PENDING_BODIES_LIMIT_MB"
            self._leave("pending_bodies", text)
            return
        self._held_bytes = held
        if is_new:
            self._frame_began = self._heard_at
            self._arm()

    def _leave(self, limit: str, text: str, acks: Sequence[bytes] = ()) -> None:
        self._server.refused(limit)
        if self._transport is not None:
            self._transport.write(b"".join([*acks, encode_ack(text)]))
            self._transport.close()
            self._loop.call_later(GOODBYE_SECONDS, self._transport.abort)  # of what it does not read

    def _due(self) -> float:
        settings = self._settings
        due = self._heard_at + settings.idle_seconds
        if self._held_bytes:
            due = min(due, self._frame_began + settings.message_timeout_seconds)
        if self._paused_at is not None:
            due = self._paused_at + settings.write_stall_seconds  # it is us who do not read
        return due

    def _arm(self) -> None:
        due = self._due()
        if self._timer is not None:
            if self._timer.when() <= due:
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
            limit = self._settings.message_timeout_seconds
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
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        # Its requests go on: their streams are connections of their own, and say themselves when the caller leaves.
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._server.pending.take(-self._held_bytes)
        self._held_bytes = 0
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
