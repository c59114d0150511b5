"""The TCP wire of ai-dynamo 1.6: bytes in, values out. No socket, no clock.

A caller sends request frames over a pooled connection and gets one ACK each, in order. The answer travels over a
second connection, which the worker opens to the caller ("call-home"), as two-part frames::

    request     u16 path length, path | u16 headers length, JSON headers | u32 payload length, payload
    ACK         u32 length, text                          empty: accepted
    two-part    u64 header length, u64 data length, u64 checksum, header, data

All numbers are big-endian. The payload of a request is itself a two-part frame (JSON control message, body); a two-part
frame with a header only is a control frame, one with data only is an item of the stream. The checksum is written as 0 and
never verified: release builds of 1.6 do the same.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from dynamo.errors import DynamoException, Overloaded, WorkerUnavailable

MAX_MESSAGE_BYTES: Final = 32 * 1024 * 1024  # a whole request frame; DYN_TCP_MAX_MESSAGE_SIZE
MAX_CONTROL_BYTES: Final = 128 * 1024  # the header of a two-part frame
MAX_U16: Final = 0xFFFF  # path and headers: the width of their length field

_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
PREFIX: Final = struct.Struct(">QQQ")

Codec = Literal["json", "msgpack"]

UNREADABLE: Final = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)  # what decoding hostile bytes raises


class MalformedFrame(Exception):
    """The peer does not speak this wire, or broke a limit: the connection is beyond repair."""


# -- request frames -----------------------------------------------------------------------------------------------


class RequestFrame(NamedTuple):
    """One request, as it is framed: where to, with which headers, carrying what."""

    path: str
    headers: dict[str, str]
    payload: bytes


def encode_request(path: str, headers: Mapping[str, str], payload: bytes) -> bytes:
    """Encode the frame of one request. Raises ValueError when a part is too long for its length field."""
    raw_path, raw_headers = path.encode(), _compact(headers)
    if len(raw_path) > MAX_U16 or len(raw_headers) > MAX_U16:
        raise ValueError(f"path and headers are limited to {MAX_U16} bytes, got {len(raw_path)} and {len(raw_headers)}")
    return b"".join(
        (_U16.pack(len(raw_path)), raw_path, _U16.pack(len(raw_headers)), raw_headers, _U32.pack(len(payload)), payload)
    )


class RequestDecoder:
    """Cuts a byte stream into request frames."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._buffer = bytearray()
        self._max_message_bytes = max_message_bytes

    def feed(self, data: bytes) -> None:
        """Take what arrived."""
        self._buffer += data

    @property
    def held_bytes(self) -> int:
        """Of a frame that is not complete."""
        return len(self._buffer)

    def next_frame(self) -> RequestFrame | None:
        """Return the next complete frame, or None when more bytes are needed. Raises `MalformedFrame`; then close."""
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        path_end = 2 + _U16.unpack_from(buffer)[0]
        if len(buffer) < path_end + 2:
            return None
        headers_at = path_end + 2
        headers_end = headers_at + _U16.unpack_from(buffer, path_end)[0]
        if len(buffer) < headers_end + 4:
            return None
        payload_at = headers_end + 4
        end = payload_at + _U32.unpack_from(buffer, headers_end)[0]
        if end > self._max_message_bytes:
            raise MalformedFrame(f"message of {end} bytes exceeds the limit of {self._max_message_bytes}")
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            raw_path, raw_headers = bytes(view[2:path_end]), bytes(view[headers_at:headers_end])
            payload = bytes(view[payload_at:end])
        del buffer[:end]
        try:
            path = raw_path.decode()
        except UnicodeDecodeError as error:
            raise MalformedFrame(f"path is not UTF-8: {error}") from error
        return RequestFrame(path, _headers(raw_headers), payload)


def _headers(raw: bytes) -> dict[str, str]:
    if not raw:  # 1.6 tolerates a missing set
        return {}
    try:
        return msgspec.json.decode(raw, type=dict[str, str])
    except UNREADABLE as error:
        raise MalformedFrame(f"headers are not a JSON object of strings: {error}") from error


# -- ACK ----------------------------------------------------------------------------------------------------------

ACCEPTED: Final = _U32.pack(0)


def encode_ack(text: str = "") -> bytes:
    """Empty: accepted. `Server overloaded: ...` and `Server unavailable: ...` make the caller fail at once."""
    body = text.encode()
    return _U32.pack(len(body)) + body


class AckDecoder:
    """The caller's side of ACKs."""

    def __init__(self, max_bytes: int = MAX_CONTROL_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> None:
        """Take what arrived."""
        self._buffer += data

    def next_ack(self) -> str | None:
        """Return the text of the next ACK, or None when more bytes are needed. Raises `MalformedFrame`."""
        buffer = self._buffer
        if len(buffer) < 4:
            return None
        end = 4 + _U32.unpack_from(buffer)[0]
        if end > self._max_bytes:
            raise MalformedFrame(f"ACK of {end} bytes exceeds the limit of {self._max_bytes}")
        if len(buffer) < end:
            return None
        text = buffer[4:end].decode(errors="replace")
        del buffer[:end]
        return text


OVERLOADED: Final = "Server overloaded:"
UNAVAILABLE: Final = "Server unavailable:"
"""The two beginnings of an ACK that a 1.6 caller understands; it takes any other text for an acceptance."""


def declined(ack: str) -> DynamoException | None:
    """Return the error of an ACK; None for an acceptance.

    Any text but the two known ones is a refusal of an older version or a broken connection: no answer will come for it.
    """
    if not ack:
        return None
    return Overloaded(ack) if ack.startswith(OVERLOADED) else WorkerUnavailable(ack)


# -- two-part frames ----------------------------------------------------------------------------------------------


class TwoPart(NamedTuple):
    """A header, data, or both."""

    header: bytes
    data: bytes


def encode_two_part(header: bytes, data: bytes = b"") -> bytes:
    """Encode one two-part frame."""
    return PREFIX.pack(len(header), len(data), 0) + header + data


class TwoPartDecoder:
    """Cuts a byte stream into two-part frames."""

    def __init__(self, max_data_bytes: int = MAX_MESSAGE_BYTES, max_header_bytes: int = MAX_CONTROL_BYTES) -> None:
        self._buffer = bytearray()
        self._max_data_bytes, self._max_header_bytes = max_data_bytes, max_header_bytes

    def rest(self, max_data_bytes: int = 2 * MAX_MESSAGE_BYTES) -> TwoPartDecoder:
        """Make a decoder with other limits that goes on from here: bytes that were fed and not yet cut are handed
        over.
        """
        following = TwoPartDecoder(max_data_bytes)
        following._buffer, self._buffer = self._buffer, bytearray()
        return following

    def feed(self, data: bytes) -> None:
        """Take what arrived."""
        self._buffer += data

    def take(self, data: bytes) -> list[tuple[bytes | bytearray, bytes | bytearray]]:
        """Take what arrived; return header and data of every frame that is complete now.

        For a reader of many small frames: they are cut in one pass, and one that came alone does not pass through the
        buffer. A frame over a limit is a `MalformedFrame` once those before it were returned: call again, with b"", until
        nothing is returned.
        """
        if not self._buffer:
            if not data:
                return []
            if len(data) > PREFIX.size:
                header_bytes, data_bytes, _ = PREFIX.unpack_from(data)
                if not header_bytes and data_bytes == len(data) - PREFIX.size <= self._max_data_bytes:
                    return [(b"", data[PREFIX.size :])]
        self._buffer += data
        buffer, at = self._buffer, 0
        found: list[tuple[bytes | bytearray, bytes | bytearray]] = []
        unpack, have = PREFIX.unpack_from, len(buffer) - PREFIX.size
        while at <= have:
            header_bytes, data_bytes, _ = unpack(buffer, at)
            if header_bytes > self._max_header_bytes or data_bytes > self._max_data_bytes:
                break
            data_at = at + PREFIX.size + header_bytes
            end = data_at + data_bytes
            if end > len(buffer):
                break
            found.append((buffer[at + PREFIX.size : data_at], buffer[data_at:end]))
            at = end
        if found:
            del buffer[:at]
        else:
            self.next_frame()  # raises, where it is not only that more bytes are needed
        return found

    def next_frame(self) -> TwoPart | None:
        """Return the next complete frame, or None when more bytes are needed. Raises `MalformedFrame`; then close."""
        buffer = self._buffer
        if len(buffer) < PREFIX.size:
            return None
        header_bytes, data_bytes, _ = PREFIX.unpack_from(buffer)
        if header_bytes > self._max_header_bytes or data_bytes > self._max_data_bytes:
            raise MalformedFrame(
                f"frame with {header_bytes} bytes of header and {data_bytes} of data exceeds the limits of "
                f"{self._max_header_bytes} and {self._max_data_bytes}"
            )
        data_at = PREFIX.size + header_bytes
        end = data_at + data_bytes
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            frame = TwoPart(bytes(view[PREFIX.size : data_at]), bytes(view[data_at:end]))
        del buffer[:end]
        return frame


def decode_payload(payload: bytes) -> TwoPart:
    """Decode the two-part frame that fills a request's payload exactly. Raises `MalformedFrame`."""
    decoder = TwoPartDecoder(max_data_bytes=len(payload))
    decoder.feed(payload)
    frame = decoder.next_frame()
    if frame is None or PREFIX.size + len(frame.header) + len(frame.data) != len(payload):
        raise MalformedFrame(f"payload of {len(payload)} bytes is not one two-part frame")
    return frame


# -- the control message of a request -----------------------------------------------------------------------------


class ConnectionInfo(msgspec.Struct):
    """How the answer finds its way back; `info` is a JSON text whose shape depends on `transport`."""

    transport: str
    info: str


class ControlMessage(msgspec.Struct, omit_defaults=True):
    """The header of a request's payload. Unknown fields are tolerated."""

    id: str
    request_type: str
    response_type: str
    connection_info: ConnectionInfo
    payload_codec: str = "json"
    metadata: dict[str, str] | None = None
    request_stream_connection_info: ConnectionInfo | None = None  # many_in: where the requests are to be fetched
    frontend_send_ts_ns: int | None = None


class CallHome(msgspec.Struct):
    """The `info` of a `tcp_server` connection: where the caller awaits the answer, and under which name."""

    address: str
    subject: str
    context: str
    stream_type: str

    def host_and_port(self) -> tuple[str, int]:
        """Raises `MalformedFrame` unless the address is HOST:PORT (an IPv6 host in brackets)."""
        host, colon, port = self.address.rpartition(":")
        if (
            not colon
            or not host
            or not (port.isascii() and port.isdigit() and len(port) <= 5)
            or not 0 < int(port) <= MAX_U16
        ):
            raise MalformedFrame(f"call-home address {self.address!r} is not HOST:PORT")
        return host.removeprefix("[").removesuffix("]"), int(port)


def encode_call(control: ControlMessage, body: bytes) -> bytes:
    """Encode the payload of a request: its control message and its body."""
    return encode_two_part(msgspec.json.encode(control), body)


def response_at(address: str, subject: str, request_id: str) -> ConnectionInfo:
    """Return where the caller awaits the answer ("HOST:PORT", an IPv6 host in brackets), and under which name."""
    call_home = CallHome(address=address, subject=subject, context=request_id, stream_type="response")
    return ConnectionInfo("tcp_server", msgspec.json.encode(call_home).decode())


def encode_body(body: Any, codec: Codec) -> bytes:
    """Encode the body of a request. Raises TypeError (or another error of the encoder) for what the codec cannot
    carry.
    """
    return _REQUEST.encode(body) if codec == "msgpack" else JSON.encode(bytes_as_lists(body))


PROMPT_TOKENS_HEADER: Final = "x-dynamo-prompt-tokens"
"""Ours: the prompt's length as the client sent it, of a request that has moved. The native wire has no place for it and
tolerates unknown headers."""


def decode_control(header: bytes) -> ControlMessage:
    """Raises `MalformedFrame` naming the field."""
    try:
        return msgspec.json.decode(header, type=ControlMessage)
    except UNREADABLE as error:
        raise MalformedFrame(f"control message: {error}") from error


def decode_call_home(control: ControlMessage) -> CallHome:
    """Decode where the answer to a request goes. Raises `MalformedFrame` for anything but a TCP response stream."""
    return _call_home(control, "connection_info", control.connection_info, "response")


def decode_request_stream(control: ControlMessage) -> CallHome:
    """Decode where the requests of a `many_in` call are to be fetched. Raises `MalformedFrame` likewise."""
    info = control.request_stream_connection_info
    if info is None:
        raise MalformedFrame("request_stream_connection_info is missing in a many_in call")
    return _call_home(control, "request_stream_connection_info", info, "request")


def _call_home(control: ControlMessage, name: str, connection: ConnectionInfo, stream_type: str) -> CallHome:
    if connection.transport != "tcp_server":
        raise MalformedFrame(
            f"response transport {connection.transport!r} is not supported; use the tcp response plane"
        )
    try:
        call_home = msgspec.json.decode(connection.info, type=CallHome)
    except UNREADABLE as error:
        raise MalformedFrame(f"{name}.info: {error}") from error
    if call_home.context != control.id:
        raise MalformedFrame(f"{name} names context {call_home.context!r}, the request is {control.id!r}")
    if call_home.stream_type != stream_type:
        raise MalformedFrame(f"{name}.stream_type is {call_home.stream_type!r}, expected {stream_type!r}")
    return call_home


def decode_body(data: bytes, codec: str) -> Any:
    """Decode the body of a request. Raises `MalformedFrame`."""
    try:
        if codec == "msgpack":
            return msgspec.msgpack.decode(data)
        if codec == "json":
            return msgspec.json.decode(data)
    except UNREADABLE as error:
        raise MalformedFrame(f"body is not {codec}: {error}") from error
    raise MalformedFrame(f"payload_codec {codec!r} is neither json nor msgpack")


# -- the response stream ------------------------------------------------------------------------------------------

STOP: Final = encode_two_part(b'"stop"')
KILL: Final = encode_two_part(b'"kill"')
SENTINEL: Final = encode_two_part(b'"sentinel"')
PROLOGUE_OK: Final = encode_two_part(b'{"error":null}')

ControlWord = Literal["stop", "kill"]


def handshake(subject: str, stream_type: str = "response") -> bytes:
    """Encode the first frame of a call-home connection."""
    return encode_two_part(_compact({"subject": subject, "stream_type": stream_type}))


def prologue(error: str | None = None) -> bytes:
    """Encode the second frame: null, or why the stream could not be set up."""
    return PROLOGUE_OK if error is None else encode_two_part(_compact({"error": error}))


def control_word(frame: TwoPart) -> ControlWord:
    """Decode a caller's word on a call-home connection. Raises `MalformedFrame` for anything but stop and kill."""
    if not frame.data:
        try:
            word = msgspec.json.decode(frame.header)
        except UNREADABLE:
            word = None
        if word == "stop":
            return "stop"
        if word == "kill":
            return "kill"
    raise MalformedFrame("a caller may only say stop or kill on a response stream")


class Handshake(msgspec.Struct):
    """The first frame of a call-home connection: which stream it carries."""

    subject: str
    stream_type: str


class _Prologue(msgspec.Struct):
    error: str | None = None


def decode_handshake(frame: TwoPart) -> Handshake:
    """Raises `MalformedFrame`."""
    if frame.data:
        raise MalformedFrame("the first frame of a call-home connection carries data")
    try:
        return msgspec.json.decode(frame.header, type=Handshake)
    except UNREADABLE as error:
        raise MalformedFrame(f"call-home handshake: {error}") from error


def decode_prologue(frame: TwoPart) -> str | None:
    """Decode why the stream could not be set up; None when it was. Raises `MalformedFrame`."""
    if frame.data:
        raise MalformedFrame("the stream began without a prologue")
    try:
        return msgspec.json.decode(frame.header, type=_Prologue).error
    except UNREADABLE as error:
        raise MalformedFrame(f"prologue: {error}") from error


_REQUEST: Final = msgspec.msgpack.Encoder(uuid_format="bytes")  # 1.6.1 refuses a request with a UUID as text
JSON: Final = msgspec.json.Encoder()


def bytes_as_lists(value: Any) -> Any:
    """Convert bytes to lists of numbers, as in 1.6: the JSON codec has no binary."""
    if isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    if isinstance(value, Mapping):
        return {key: bytes_as_lists(member) for key, member in value.items()}
    if isinstance(value, list | tuple) and not _all_numbers(value):
        return [bytes_as_lists(member) for member in value]
    return value


def _all_numbers(values: list[Any] | tuple[Any, ...]) -> bool:
    # Token ids are by far the longest lists there are; a homogeneous one is not rebuilt.
    return set(map(type, values)) <= {int, float}


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
