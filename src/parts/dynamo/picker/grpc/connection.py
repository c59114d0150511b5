"""One connection of HTTP/2 from the server's side: frames, windows, streams. What a stream means is gRPC's matter (`calls`)."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from dynamo.picker.grpc.hpack import BadHeaders, HeaderReader, Headers

logger = logging.getLogger(__name__)

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED = 0x0, 0x1, 0x2, 0x3, 0x5
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 0x6, 0x7, 0x8, 0x9, 0xB
FRAME_BYTES: Final = 16_384  # the default of the protocol; never raised here
WINDOW: Final = 65_535  # likewise, until a peer raises it
STREAM_WINDOW: Final = 1 << 20
CONNECTION_WINDOW: Final = 1 << 26
MAX_STREAMS: Final = 16_384
MAX_BLOCK_BYTES: Final = 64 * 1024  # of headers, compressed
MAX_UNSENT_BYTES: Final = 16 << 20  # of a peer that does not read: the connection ends
MAX_WINDOW: Final = 2**31 - 1
PREFACE_SECONDS: Final = 10.0
_SETTING: Final = struct.Struct("!HI")
_HEAD: Final = struct.Struct("!HBBBI")  # length (its upper 16 bits, its lower 8), kind, flags, stream


def _nothing(*_: object) -> None:
    """Stand where there is no callback."""


class ConnectionBroken(Exception):
    """The peer has broken the protocol: the connection ends with this code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Write a frame."""
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


class Http2Stream:
    """One stream. Its owner gives it the callbacks, and writes; a write never waits, `unsent` shows what does."""

    __slots__ = (
        "_parts",
        "connection",
        "is_closed",
        "is_half_closed",
        "number",
        "on_data",
        "on_end",
        "on_room",
        "window",
    )

    def __init__(self, connection: Http2Connection, number: int, window: int) -> None:
        self.connection, self.number, self.window = connection, number, window
        self.on_data: Callable[[bytes], None] = _nothing
        self.on_end: Callable[[bool], None] = _nothing
        """Called once, when the peer sends no more; with True where the stream is gone as a whole."""
        self.on_room: Callable[[], None] = _nothing
        self._parts: deque[bytes] = deque()  # DATA that waits for a window
        self.is_half_closed = self.is_closed = False

    @property
    def unsent(self) -> bool:
        """Whether data waits for the peer to read."""
        return bool(self._parts)

    def send_headers(self, block: bytes, *, is_last: bool = False) -> None:
        """Send a block of headers, written already. The last one waits for what is unsent: so call it once `unsent` is false."""
        if not self.is_closed:
            self.connection.send(frame(HEADERS, END_HEADERS | (END_STREAM if is_last else 0), self.number, block))
            if is_last:
                self.connection.finish(self)

    def send_data(self, data: bytes) -> None:
        """Send data, as far as the windows let it through; the rest follows."""
        if not self.is_closed:
            self._parts.append(data)
            self.push()

    def push(self) -> None:
        """Send what waits, as far as the windows let it through."""
        connection, parts = self.connection, self._parts
        while parts and self.window > 0 and connection.window > 0:
            room = min(self.window, connection.window, connection.frame_bytes)
            part = parts.popleft()
            if len(part) > room:
                parts.appendleft(part[room:])
                part = part[:room]
            self.window -= len(part)
            connection.window -= len(part)
            connection.send(frame(DATA, 0, self.number, part))
        if parts:
            connection.waiting[self.number] = self
        elif connection.waiting.pop(self.number, None) is not None:
            self.on_room()

    def grant(self, size: int) -> None:
        """Let the peer send so many bytes more."""
        if size and not (self.is_closed or self.is_half_closed):
            self.connection.send(frame(WINDOW_UPDATE, 0, self.number, size.to_bytes(4, "big")))

    def reset(self, code: int) -> None:
        """Break the stream off."""
        if not self.is_closed:
            self.connection.send(frame(RST_STREAM, 0, self.number, code.to_bytes(4, "big")))
            self.lose()

    def lose(self) -> None:
        """Take the loss of the stream: nothing more goes either way. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self._parts.clear()
            self.connection.forget(self)
            self.on_end(True)
            self.let_go()

    def let_go(self) -> None:
        """Forget the owner: the two hold each other, and such a circle would wait for the garbage collector with all of a call."""
        self.on_data = self.on_end = self.on_room = _nothing

    def end_input(self) -> None:
        """Take the end of what the peer sends."""
        if not self.is_half_closed:
            self.is_half_closed = True
            self.on_end(False)


class Http2Connection(asyncio.Protocol):
    """Reads frames, and keeps the streams. `on_stream` gets each new one with its headers."""

    def __init__(
        self, on_stream: Callable[[Http2Stream, Headers], None], opened: Callable[[Http2Connection], bool],
        lost: Callable[[Http2Connection], None],
    ) -> None:  # fmt: skip
        """`opened` is called with a new connection: False, and it is closed. `lost`: with one that has ended."""
        self._on_stream, self._opened, self._lost = on_stream, opened, lost
        self.streams: dict[int, Http2Stream] = {}
        self.waiting: dict[int, Http2Stream] = {}  # those with data that waits for a window
        self.window, self.frame_bytes = WINDOW, FRAME_BYTES
        self._peer = _Peer()
        self._rest = b""  # of a frame that has not come whole
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    # -- the transport -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if not self._opened(self):
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(
            high=1
        )  # else uvloop writes only once all choices of this turn were made
        self._timer = asyncio.get_running_loop().call_later(PREFACE_SECONDS, self._transport.abort)
        settings = (
            _SETTING.pack(0x3, MAX_STREAMS) + _SETTING.pack(0x4, STREAM_WINDOW) + _SETTING.pack(0x6, MAX_BLOCK_BYTES)
        )
        self.send(frame(SETTINGS, 0, 0, settings))
        self.send(frame(WINDOW_UPDATE, 0, 0, (CONNECTION_WINDOW - WINDOW).to_bytes(4, "big")))

    def connection_lost(self, error: Exception | None) -> None:
        transport, self._transport = self._transport, None
        if self._timer is not None:
            self._timer.cancel()
        for stream in list(self.streams.values()):
            stream.lose()
        if transport is not None:
            self._lost(self)

    def send(self, data: bytes) -> None:
        """Send a frame, together with all others of this turn of the loop, or of what is read at the moment."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self.flush)
        self._out.append(data)

    def flush(self) -> None:
        """Send what waits for the end of the turn; and close a connection whose peer has not read for too long."""
        data, self._out = b"".join(self._out), []
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                logger.warning("a gateway does not read what is sent to it: its connection is closed")
                self._transport.abort()

    def go_away(self, code: int = NO_ERROR) -> None:
        """Take no new streams."""
        if not self._peer.is_leaving:
            self._peer.is_leaving = True
            self.send(frame(GOAWAY, 0, 0, struct.pack("!II", self._peer.last_stream, code)))

    def close(self) -> None:
        """Close the connection, with every stream. Idempotent."""
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def finish(self, stream: Http2Stream) -> None:
        """Take the end of an answer: where the peer still sends, the stream is reset."""
        if stream.is_half_closed:
            stream.is_closed = True
            self.forget(stream)
            stream.let_go()
        else:
            stream.reset(NO_ERROR)

    def forget(self, stream: Http2Stream) -> None:
        """Forget a stream that has ended."""
        self.streams.pop(stream.number, None)
        self.waiting.pop(stream.number, None)

    # -- frames --------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        # What can be answered now goes out before the choices, each of which takes the loop for a millisecond: so `send`,
        # which finds this, leaves that to the end of this call.
        self._out.append(b"")
        try:
            self._take_frames(self._rest + data if self._rest else data)
        except ConnectionBroken as broken:
            logger.warning("the connection of a gateway is closed: %s", broken)
            self._rest = b""
            self.go_away(broken.code)
            self.close()
        self.flush()

    def _take_frames(self, data: bytes) -> None:
        self._rest, at, end = data, 0, len(data)
        if self._timer is not None:
            if end < len(PREFACE) and PREFACE.startswith(data):
                return
            if not data.startswith(PREFACE):
                raise ConnectionBroken(PROTOCOL_ERROR, "it does not begin as HTTP/2 does")
            self._timer.cancel()
            self._timer, at = None, len(PREFACE)
        while end - at >= 9:
            high, low, kind, flags, number = _HEAD.unpack_from(data, at)
            size = high << 8 | low
            if size > FRAME_BYTES:
                raise ConnectionBroken(FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            begin, at = at + 9, at + 9 + size
            if at > end:
                at = begin - 9
                break
            if not kind and self._peer.block is None:
                self._take_data(flags, number & MAX_WINDOW, data[begin:at])
            else:
                self._take(kind, flags, number & MAX_WINDOW, data[begin:at])
        self._rest = data[at:]

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        block = self._peer.block
        if block is not None and (kind != CONTINUATION or number != block.number):
            raise ConnectionBroken(PROTOCOL_ERROR, "a block of headers is interrupted")
        match kind:
            case 1:
                payload = _unpadded(flags, payload)
                self._take_block(flags, number, payload[5:] if flags & HAS_PRIORITY else payload)
            case 9:
                if block is None:
                    raise ConnectionBroken(PROTOCOL_ERROR, "a block of headers goes on that has not begun")
                self._take_block(flags | block.flags, number, block.data + payload)
            case 3:
                if (stream := self.streams.get(number)) is not None:
                    stream.lose()
            case 4:
                if not flags & ACK:
                    self._take_settings(payload)
            case 6:
                if len(payload) != 8:
                    raise ConnectionBroken(FRAME_SIZE_ERROR, "a ping without its 8 bytes")
                if not flags & ACK:
                    self.send(frame(PING, ACK, 0, payload))
            case 8:
                self._take_window(number, payload)
            case _:  # a priority, the end of the peer, or what a later version may mean
                pass

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        self._peer.received += len(payload)
        if self._peer.received > CONNECTION_WINDOW // 2:
            self.send(frame(WINDOW_UPDATE, 0, 0, self._peer.received.to_bytes(4, "big")))
            self._peer.received = 0
        stream = self.streams.get(number)
        if stream is None or stream.is_half_closed:
            if number > self._peer.last_stream or not number:
                raise ConnectionBroken(PROTOCOL_ERROR, "data for a stream that was not opened")
            return  # it has just been reset
        if flags & PADDED:
            payload, size = _unpadded(flags, payload), len(payload)
            stream.grant(size - len(payload))  # it counts for the window, and the stream never sees it
        stream.on_data(payload)
        if flags & END_STREAM:
            stream.end_input()

    def _take_block(self, flags: int, number: int, data: bytes) -> None:
        if len(data) > MAX_BLOCK_BYTES:
            raise ConnectionBroken(ENHANCE_YOUR_CALM, f"more than {MAX_BLOCK_BYTES} bytes of headers")
        if not flags & END_HEADERS:
            self._peer.block = _Block(number, flags & END_STREAM, data)
            return
        self._peer.block = None
        try:
            headers = self._peer.headers.read(data)
        except BadHeaders as error:
            raise ConnectionBroken(COMPRESSION_ERROR, str(error)) from error
        stream = self.streams.get(number)
        if stream is None:
            if not number % 2:
                raise ConnectionBroken(PROTOCOL_ERROR, f"a client opened stream {number}")
            if number <= self._peer.last_stream:
                return  # trailers of one that has just been reset
            stream = Http2Stream(self, number, self._peer.window)
            if self._peer.is_leaving or len(self.streams) >= MAX_STREAMS:
                self.send(frame(RST_STREAM, 0, number, REFUSED_STREAM.to_bytes(4, "big")))
                return
            self._peer.last_stream = number
            self.streams[number] = stream
            self._on_stream(stream, headers)
        if flags & END_STREAM:
            stream.end_input()

    def _take_settings(self, payload: bytes) -> None:
        if len(payload) % 6:
            raise ConnectionBroken(FRAME_SIZE_ERROR, "settings are cut off")
        for name, value in _SETTING.iter_unpack(payload):
            if name == 0x4:
                if value > MAX_WINDOW:
                    raise ConnectionBroken(FLOW_CONTROL_ERROR, f"a window of {value}")
                grown, self._peer.window = value - self._peer.window, value
                for stream in list(self.streams.values()):
                    stream.window += grown
                    if stream.unsent:
                        stream.push()
            elif name == 0x5 and FRAME_BYTES <= value < 1 << 24:
                self.frame_bytes = min(value, 1 << 20)
        self.send(frame(SETTINGS, ACK, 0))

    def _take_window(self, number: int, payload: bytes) -> None:
        size = int.from_bytes(payload, "big") & MAX_WINDOW
        if len(payload) != 4 or not size:
            raise ConnectionBroken(PROTOCOL_ERROR, "a window grows by nothing")
        if number:
            if (stream := self.streams.get(number)) is not None:
                stream.window += size
                if stream.window > MAX_WINDOW:
                    stream.reset(FLOW_CONTROL_ERROR)
                elif stream.unsent:
                    stream.push()
            return
        self.window += size
        if self.window > MAX_WINDOW:
            raise ConnectionBroken(FLOW_CONTROL_ERROR, "the window of the connection is too large")
        for stream in list(self.waiting.values()):
            stream.push()


class _Block:
    """Headers of which a part has come."""

    __slots__ = ("data", "flags", "number")

    def __init__(self, number: int, flags: int, data: bytes) -> None:
        self.number, self.flags, self.data = number, flags, data


class _Peer:
    """What is known of the other end."""

    __slots__ = ("block", "headers", "is_leaving", "last_stream", "received", "window")

    def __init__(self) -> None:
        self.headers = HeaderReader()
        self.block: _Block | None = None
        self.window = WINDOW  # of each new stream
        self.last_stream = self.received = 0
        self.is_leaving = False  # this end takes no new streams


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionBroken(PROTOCOL_ERROR, "more padding than there is")
    return payload[1 : len(payload) - payload[0]]
