"""One `mux` connection of a caller to a worker process: all streams of all requests on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, cast

import msgspec

from dynamo.errors import CannotConnect, Disconnected, InvalidArgument, ResponseTimeout
from dynamo.runtime.context import Context
from dynamo.runtime.request_plane.base import END_INDEX, StreamItem
from dynamo.runtime.request_plane.dial import Dialled
from dynamo.runtime.request_plane.mux.frames import (
    END_FLAG,
    MAX_PAYLOAD,
    MAX_STREAM_ID,
    Frame,
    FrameDecoder,
    Kind,
    Open,
    ProtocolError,
    decode_hello,
    decode_items,
    decode_message,
    decode_step,
    frame,
    pack,
)
from dynamo.runtime.request_plane.mux.greeting import Greeting
from dynamo.runtime.request_plane.mux.outflow import Outflow
from dynamo.runtime.request_plane.mux.stream import MAX_BUFFERED_ITEMS, MuxStream
from dynamo.runtime.request_plane.security import PlaneSecurity
from dynamo.runtime.request_plane.stream import StreamState
from dynamo.runtime.tls import handshake_text
from dynamo.runtime.write_batch import WriteBatch

__all__ = ["MuxConnection"]

logger = logging.getLogger(__name__)

PING_SECONDS: Final = 20.0  # also what keeps a stateful firewall's entry alive
SILENCE_SECONDS: Final = 60.0  # an engine may block its worker's loop for longer than one would think
IDLE_SECONDS: Final = 300.0  # a connection without streams is closed after this long
INLINE_BODY_BYTES: Final = MAX_PAYLOAD - 8 * 1024  # leaves room for the head in the same frame


class MuxConnection(Dialled):
    """Delivers received items to the streams, and sends the streams' frames."""

    def __init__(
        self,
        address: str,
        *,
        on_lost: Callable[[MuxConnection], None],
        security: PlaneSecurity | None = None,
    ) -> None:
        self.address = address
        self.usable = True  # False: no new streams (GOAWAY, closing, lost)
        self.greeting = Greeting(security)
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._batch = WriteBatch.of_this_loop()
        self._decoder = FrameDecoder()
        self._streams: dict[int, MuxStream] = {}
        self._touched: list[MuxStream] = []  # their listeners are to be called
        self._lanes: list[MuxStream] = []  # these have token ids to pass on
        self._next_stream_id = 1
        self._outflow = Outflow(self._streams.__contains__)
        self._failure: str | None = None
        self._heartbeat = _Heartbeat(self)

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        self._outflow.transport = cast(asyncio.Transport, transport)
        self._outflow.transport.write(self.greeting.first_bytes())
        self._heartbeat.start()

    def data_received(self, data: bytes) -> None:
        self._heartbeat.heard_at = self._loop.time()
        batch = self._batch
        batch.is_open = True
        try:
            try:
                self._on_frames(self._decoder.feed(data))
            except (ProtocolError, msgspec.MsgspecError, ValueError, RecursionError) as error:
                self._fail(f"{self.address} broke the wire: {error}")
            if self._lanes:
                lanes, self._lanes = self._lanes, []
                for stream in lanes:
                    stream.pass_tokens()
            if self._touched:
                self._call_listeners()
        finally:
            batch.flush()

    def _on_frames(self, frames: list[Frame]) -> None:
        # Several steps in one read: this process is behind. The tokens of a stream then become one event, which costs less.
        is_behind = len(frames) > 1 and [frame[0] for frame in frames].count(Kind.STEP) > 1
        for kind, flags, stream_id, payload in frames:
            if kind == Kind.STEP:
                columns = decode_step(payload)
                if len({len(column) for column in columns}) != 1:
                    raise ProtocolError("the columns of a step differ in length")
                if is_behind:
                    self._on_items(
                        [StreamItem(id, 0, offset, [token]) for id, offset, token in zip(*columns, strict=True)]
                    )
                else:
                    self._on_step(*columns)
            elif kind == Kind.ITEMS:
                self._on_items(decode_items(payload))
            else:
                self._on_frame(kind, flags, stream_id, payload)

    def _on_step(self, stream_ids: list[int], offsets: list[int], token_ids: list[int]) -> None:
        """Hand out one token for each of many streams: the hottest loop of a frontend."""
        find, now, grant_at = self._streams.get, self._heartbeat.heard_at, MuxStream.GRANT_AT
        others: list[StreamItem] = []
        for stream_id, offset, token_id in zip(stream_ids, offsets, token_ids, strict=True):
            stream = find(stream_id)
            if stream is None:
                continue
            lane = stream.lane
            if lane is None or offset != stream.next_offset or stream.items or stream.lane_ids is not None:
                others.append(StreamItem(stream_id, 0, offset, [token_id]))
                continue
            stream.next_offset = offset + 1
            stream.consumed += 1
            if stream.consumed >= grant_at:
                stream.renew_credit()
            try:
                if lane.take_token(token_id, now):
                    continue
            except BaseException as error:
                stream.close_lane(error)
            else:
                stream.close_lane(None)
        if others:
            self._on_items(others)

    def _on_items(self, items: list[StreamItem]) -> None:
        find, touched, lanes = self._streams.get, self._touched, self._lanes
        for item in items:
            stream = find(item.stream_id)
            if stream is None:
                continue
            if (
                stream.lane is not None
                and item.index == 0
                and item.finish_reason is None
                and item.extra is None
                and item.offset == stream.next_offset
                and not stream.items
            ):  # nearly every token: it is counted here, and passed on with what else came for its stream
                ids = item.token_ids
                stream.next_offset += len(ids)
                stream.consumed += len(ids) or 1
                if stream.lane_ids is None:
                    stream.lane_ids = ids
                    lanes.append(stream)
                else:
                    stream.lane_ids += ids
                continue
            if stream.lane_ids is not None:
                stream.pass_tokens()
            if item.index == END_INDEX:
                self._ended(item.stream_id)
                stream.end_with(item)
            elif stream.listener is not None:  # `deliver`, without the call: nearly every token
                items = stream.items
                items.append(item)
                if not stream.touched:
                    stream.touched = True
                    touched.append(stream)
                elif len(items) > MAX_BUFFERED_ITEMS:
                    raise ProtocolError(f"stream {item.stream_id} was sent more than its credit allows")
            else:
                stream.deliver(item)

    def touch(self, stream: MuxStream) -> None:
        """Call this stream's listener: when everything that has arrived is handed out, or in the next turn of the loop."""
        if not stream.touched:
            stream.touched = True
            self._touched.append(stream)
            self._loop.call_soon(self._call_listeners)

    def _call_listeners(self) -> None:
        """Let every stream that got something tell its reader; each once, however much it got."""
        touched, self._touched = self._touched, []
        ended = StreamState.ENDED
        for stream in touched:
            stream.touched = False
            if stream.listener is not None:  # the reader may have left by now
                stream.listener()
                if stream.state is ended and stream.listener is not None:  # the end came together with what it took
                    stream.listener()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._heartbeat.stop()
        streams = list(self._streams.values())
        self._streams.clear()
        self._outflow.clear()
        reason = self._failure or (str(exc) if exc else "the connection was closed")
        if not self.greeting.is_over and self._failure is None:
            tls = "" if exc is None else f" ({handshake_text(exc)})"
            reason = f"it hung up before it said anything{tls}; {self.greeting.hint}"
        self._failure = reason  # a later request for this connection fails for the same reason
        self.greeting.failed(self.address, reason)
        for stream in streams:
            stream.lost(Disconnected(f"Stream ended before generation completed ({self.address}: {reason})"))
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._outflow.paused = True

    def resume_writing(self) -> None:
        self._outflow.paused = False
        self._outflow.schedule()

    # -- streams -------------------------------------------------------------------------------------------------

    @property
    def stream_count(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    def open(self, path: str, body: bytes, context: Context) -> MuxStream:
        """Begin one stream; the request leaves at the next turn of the loop."""
        if not self.usable:  # lost between its first byte and this turn of the loop: nothing else would end the stream
            raise CannotConnect(f"{self.address} closed the connection at once: {self._failure or 'no reason given'}")
        if self._next_stream_id > MAX_STREAM_ID - 2:
            self.usable = False
            raise CannotConnect(f"the connection to {self.address} ran out of stream ids; try again")
        head = self._head(path, context)
        head_bytes = len(pack(head))
        inline = len(body) + head_bytes <= INLINE_BODY_BYTES
        if not inline:
            if head_bytes > INLINE_BODY_BYTES:
                raise InvalidArgument("the request's metadata does not fit in one frame of 64 KiB")
            self._outflow.check_room(body, self.address)
            head.size = len(body)
        stream_id = self._next_stream_id
        self._next_stream_id += 2
        stream = MuxStream(self, stream_id)
        self._streams[stream_id] = stream
        self._outflow.send(frame(Kind.OPEN, pack((head, body if inline else None)), stream_id=stream_id))
        if not inline:
            self._outflow.send_body(stream_id, body)
        return stream

    def _head(self, path: str, context: Context) -> Open:
        deadline_ms = None
        if context.deadline is not None:
            deadline_ms = round((context.deadline - self._loop.time()) * 1000)
            if deadline_ms <= 0:
                raise ResponseTimeout("the request's deadline passed before it was sent")
        return Open(
            path=path,
            id=context.id(),
            deadline_ms=deadline_ms,
            prompt_tokens=context.prompt_tokens,
            metadata=context.metadata.copy() if context.has_metadata else {},
            trace=context.trace_headers() or {},
        )

    def grant(self, stream_id: int, credits: int) -> None:
        """Give a stream's producer room."""
        self._outflow.grant(stream_id, credits)

    def cancel(self, stream_id: int, *, kill: bool) -> None:
        """Pass a stop or kill on."""
        if stream_id in self._streams:
            self._outflow.send(frame(Kind.CANCEL, b"\x01" if kill else b"\x00", stream_id=stream_id))

    def drop(self, stream_id: int) -> None:
        """Kill a stream and forget it: what still arrives for it is ignored."""
        self.cancel(stream_id, kill=True)
        self._ended(stream_id)

    def _ended(self, stream_id: int) -> None:
        self._streams.pop(stream_id, None)
        if not self._streams:
            self._heartbeat.idle_since = self._loop.time()

    # -- frames --------------------------------------------------------------------------------------------------

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        match kind:
            case Kind.ITEM_PART:
                stream = self._streams.get(stream_id)
                item = stream.assemble(payload, bool(flags & END_FLAG)) if stream is not None else None
                if stream is not None and item is not None:
                    if item.index == END_INDEX:
                        self._ended(stream_id)
                    stream.deliver(item)
            case Kind.PING:
                self._outflow.send(frame(Kind.PONG, payload))
            case Kind.GOAWAY:
                self.usable = False
                if not self._streams:
                    self.close()
            case Kind.HELLO:
                reply = self.greeting.answered(decode_hello(payload))
                if reply is not None:
                    self._outflow.send(reply)
            case Kind.ERROR:
                message = decode_message(payload).get("message")
                self._fail(f"{self.address} closed the connection: {message}", tell=False)
            case _:
                pass  # PONG, or a later version's frame

    def _fail(self, message: str, *, tell: bool = True) -> None:
        logger.warning("%s", message)
        self._failure = message
        self.usable = False
        transport = self._outflow.transport
        if transport is not None:
            if tell:
                transport.write(frame(Kind.ERROR, pack({"message": message})))
            transport.close()

    # -- leaving -------------------------------------------------------------------------------------------------

    def ping(self) -> None:
        """Let the worker know that this caller is there."""
        self._outflow.send(frame(Kind.PING, b"\0" * 8))

    def abandon(self, reason: str) -> None:
        """Drop the connection now."""
        self._failure = reason
        if self._outflow.transport is not None:
            self._outflow.transport.abort()

    def close(self) -> None:
        """Leave; streams still open end with `Disconnected`."""
        self.usable = False
        transport = self._outflow.transport
        if transport is not None and not transport.is_closing():
            transport.close()


class _Heartbeat:
    """Pings the worker, drops a silent one, and closes a connection that has not been used for long."""

    __slots__ = ("_connection", "_loop", "_tick_at", "_timer", "heard_at", "idle_since")

    def __init__(self, connection: MuxConnection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.heard_at = self.idle_since = self._tick_at = self._loop.time()

    def start(self) -> None:
        """Look again in `PING_SECONDS`."""
        self._tick_at = self._loop.time() + PING_SECONDS
        self._timer = self._loop.call_at(self._tick_at, self._tick)

    def stop(self) -> None:
        """Stop: the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        # Late by so much: this process stood still, and what the worker sent meanwhile may be yet to be read.
        stood_still = now - self._tick_at >= PING_SECONDS / 2
        if now - self.heard_at >= SILENCE_SECONDS and not stood_still:
            self._connection.abandon(f"silent for {SILENCE_SECONDS:.0f} s")
            return
        if not self._connection.stream_count and now - self.idle_since >= IDLE_SECONDS:
            self._connection.close()
            return
        # Also where the worker sends all the time: it drops a silent caller, and a slow stream needs no credits for minutes.
        self._connection.ping()
        self.start()
