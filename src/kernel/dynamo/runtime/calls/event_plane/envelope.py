"""Events as bytes, and the discovery records of their publishers: the native forms to the letter. No I/O.

An envelope is a msgpack map. On ZMQ it travels in a frame (version 1, length, envelope) as the last of four parts: topic,
publisher, sequence, frame. On NATS it travels bare.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from dynamo.runtime.calls.event_plane.base import Event, EventScope

FRAME_VERSION: Final = 1
_HEADER: Final = struct.Struct(">BI")  # version, length of the envelope
_U64: Final = struct.Struct(">Q")
PARTS: Final = 4


class BadEvent(ValueError):
    """A message is not a valid event; holds the reason."""


class _Envelope(msgspec.Struct):
    publisher_id: int
    sequence: int
    published_at: int  # unix time, milliseconds
    topic: str
    payload: bytes  # msgpack


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Envelope).decode


def encode_envelope(event: Event) -> bytes:
    return _encode(_Envelope(event.publisher_id, event.sequence, event.published_at_ms, event.topic, event.payload))


def decode_envelope(data: bytes | memoryview) -> Event:
    """Raises BadEvent."""
    try:
        found = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadEvent(f"no envelope: {error}") from error
    if found.publisher_id < 0 or found.sequence < 0:
        raise BadEvent("publisher_id and sequence must not be negative")
    return Event(found.topic, found.publisher_id, found.sequence, found.published_at, found.payload)


def encode_parts(topic: bytes, event: Event) -> list[bytes]:
    """Build the message for ZMQ; `topic` is what subscribers filter by."""
    envelope = encode_envelope(event)
    return [
        topic,
        _U64.pack(event.publisher_id),
        _U64.pack(event.sequence),
        _HEADER.pack(FRAME_VERSION, len(envelope)) + envelope,
    ]


def decode_parts(parts: Sequence[bytes]) -> Event:
    """Raises BadEvent."""
    if len(parts) != PARTS:
        raise BadEvent(f"a message has {PARTS} parts, got {len(parts)}")
    frame = parts[3]
    if len(frame) < _HEADER.size:
        raise BadEvent(f"a frame of {len(frame)} bytes has no header")
    version, length = _HEADER.unpack_from(frame)
    if version != FRAME_VERSION:
        raise BadEvent(f"frame version {version}, expected {FRAME_VERSION}")
    if length != len(frame) - _HEADER.size:
        raise BadEvent(f"the frame says {length} bytes and has {len(frame) - _HEADER.size}")
    return decode_envelope(memoryview(frame)[_HEADER.size :])


def channel_record(scope: EventScope, topic: str, publisher_id: int, transport: Mapping[str, Any]) -> bytes:
    """Build the `v1/event_channels` record of one publisher. `instance_id` holds the publisher's id, despite its
    name.
    """
    record = {
        "type": "EventChannel",
        "scope": scope.to_json(),
        "topic": topic,
        "instance_id": publisher_id,
        "transport": transport,
    }
    return msgspec.json.encode(record)


def zmq_endpoint(record: bytes) -> str | None:
    """Return the address of the publisher of a channel record; None when not on ZMQ. Raises BadEvent."""
    try:
        transport = msgspec.json.decode(record, type=dict[str, Any])["transport"]
        if transport["kind"] != "Zmq":
            return None
        endpoint = transport["config"]["endpoint"]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, RecursionError) as error:
        raise BadEvent(f"no event channel: {error}") from error
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        raise BadEvent(f"no tcp endpoint: {endpoint!r}")
    return endpoint


def zmq_broker(record: bytes) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return (xsub endpoints, xpub endpoints) of a broker's channel record; None for any other record."""
    try:
        transport = msgspec.json.decode(record, type=dict[str, Any])["transport"]
        if transport["kind"] != "ZmqBroker":
            return None
        sides = msgspec.convert(transport["config"], type=_Broker)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        return None
    return tuple(sides.xsub_endpoints), tuple(sides.xpub_endpoints)


class _Broker(msgspec.Struct):
    xsub_endpoints: list[str]
    xpub_endpoints: list[str]
