"""The `mux` wire, sans-io: bytes in, frames out. `docs/wire.md` describes it for writers of other languages.

A connection starts with `MAGIC`, then frames in both directions. A frame is a 12-byte big-endian header and a payload
of at most 64 KiB:

    u32 payload length | u8 kind | u8 flags | u16 reserved (0) | u32 stream id (0: the connection itself)
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from dynamo.runtime.calls.request_plane.base import INITIAL_CREDITS, StreamItem

MAGIC: Final = b"\xffDYNMUX\n"
"""The first bytes of a connection. As the native wire's path length they would announce a path of 65,348 bytes, so
one listener can distinguish the two."""

VERSION: Final = 1
HEADER: Final = struct.Struct(">IBBHI")
MAX_PAYLOAD: Final = 64 * 1024  # a 32k-token prompt travels in pieces, so another stream's token is never behind it
MAX_STREAM_ID: Final = 2**32 - 1


class Kind(enum.IntEnum):
    """Frame kinds. C: caller to worker, W: worker to caller."""

    HELLO = 1  # both: msgpack Hello; the first frame of each side
    PING = 2  # both: 8 opaque bytes
    PONG = 3  # both: the same 8 bytes
    GOAWAY = 4  # both: msgpack {"reason": str}; no new streams, those in flight go on
    OPEN = 5  # C: msgpack [Open, body | nil]; nil: the body follows in BODY frames
    BODY = 6  # C: a piece of the request body; flag END on the last
    CANCEL = 7  # C: one byte, 0 stop, 1 kill
    CREDIT = 8  # C: msgpack [[stream id, credits], ...] on stream 0
    ITEMS = 9  # W: msgpack [item, ...] on stream 0: every item of every stream since the last loop turn
    ITEM_PART = 10  # W: a piece of one item too large for a frame; flag END on the last
    ERROR = 11  # both: msgpack {"message": str}; the connection is closed after it
    STEP = (
        13  # W: msgpack [[stream id, ...], [offset, ...], [token id, ...]] on stream 0; only where HELLO requested it
    )
    AUTH = 12  # C: the caller's proof that it knows the shared secret, in hex; only where the worker requires one


END_FLAG: Final = 1
STEP_CAPABILITY: Final = "steps"
STEP_TOKENS: Final = 4000  # of one frame: 15 bytes each, at most


class ProtocolError(Exception):
    """The peer broke the wire; the connection cannot go on."""


class Hello(msgspec.Struct, omit_defaults=True):
    """The facts of a peer. Unknown keys are ignored, so that later versions may add some."""

    version: int
    capabilities: list[str] = msgspec.field(default_factory=list)
    credits: int = INITIAL_CREDITS  # worker: ignored. caller: the initial window of each of its streams
    auth: str | None = None  # of the shared secret (`secret.py`). caller: its nonce. worker: "NONCE:PROOF"
    agent: str = ""


class Open(msgspec.Struct, omit_defaults=True):
    """The head of a request."""

    path: str
    id: str
    deadline_ms: int | None = None  # time left for the whole request, relative, so that clocks need not agree
    prompt_tokens: int | None = None  # the prompt's length as the client sent it, when a migration made it longer
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    trace: dict[str, str] = msgspec.field(default_factory=dict)  # W3C headers, lower-case names
    size: int = 0  # bytes of a body that follows in BODY frames


_encoder: Final = msgspec.msgpack.Encoder()
pack: Final = _encoder.encode

decode_hello: Final = msgspec.msgpack.Decoder(Hello).decode
decode_open: Final = msgspec.msgpack.Decoder(tuple[Open, bytes | None]).decode
decode_body: Final = msgspec.msgpack.Decoder().decode
decode_credits: Final = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode
decode_items: Final = msgspec.msgpack.Decoder(list[StreamItem]).decode
decode_step: Final = msgspec.msgpack.Decoder(tuple[list[int], list[int], list[int]]).decode
decode_item: Final = msgspec.msgpack.Decoder(StreamItem).decode
decode_message: Final = msgspec.msgpack.Decoder(dict[str, Any]).decode

Frame = tuple[int, int, int, bytes]  # kind, flags, stream id, payload


class FrameDecoder:
    """Cuts a byte stream into frames. Linear in the bytes fed, however they are split; holds at most one frame."""

    __slots__ = ("_buffer", "_needed", "_preface")

    def __init__(self, preface: bytes = b"") -> None:
        """`preface`: the bytes that must come before the first frame."""
        self._buffer = bytearray()
        self._needed = HEADER.size
        self._preface = preface

    def feed(self, data: bytes) -> list[Frame]:
        """Return every frame completed by `data`. Raises ProtocolError for a frame over the limit or another preface."""
        if self._preface:
            taken = min(len(self._preface), len(data))
            if data[:taken] != self._preface[:taken]:
                raise ProtocolError("this connection does not start with the mux magic")
            self._preface = self._preface[taken:]
            data = data[taken:]
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return []
            data = bytes(self._buffer)
            self._buffer.clear()
        frames: list[Frame] = []
        start, size = 0, len(data)
        while size - start >= HEADER.size:
            length, kind, flags, _, stream_id = HEADER.unpack_from(data, start)
            if length > MAX_PAYLOAD:
                raise ProtocolError(f"frame of {length} bytes exceeds the limit of {MAX_PAYLOAD}")
            end = start + HEADER.size + length
            if end > size:
                self._needed = end - start
                break
            frames.append((kind, flags, stream_id, data[start + HEADER.size : end]))
            start = end
        else:
            self._needed = HEADER.size
        if start < size:
            self._buffer += data[start:]
        return frames


def frame(kind: Kind, payload: bytes = b"", *, stream_id: int = 0, flags: int = 0) -> bytes:
    """Encode one frame."""
    return HEADER.pack(len(payload), kind, flags, 0, stream_id) + payload


def fragments(kind: Kind, payload: bytes, stream_id: int) -> list[bytes]:
    """Encode a payload of any size as frames of at most `MAX_PAYLOAD`, the last one flagged END."""
    cuts = range(0, max(len(payload), 1), MAX_PAYLOAD)
    return [
        frame(
            kind,
            payload[at : at + MAX_PAYLOAD],
            stream_id=stream_id,
            flags=END_FLAG if at + MAX_PAYLOAD >= len(payload) else 0,
        )
        for at in cuts
    ]


def items_frames(items: Sequence[tuple[Any, ...]]) -> list[bytes]:
    """Items as they leave one loop turn: one frame, or several when they do not fit in one."""
    payload = pack(items)
    if len(payload) <= MAX_PAYLOAD:
        return [HEADER.pack(len(payload), Kind.ITEMS, 0, 0, 0), payload]
    if len(items) == 1:
        return fragments(Kind.ITEM_PART, pack(items[0]), items[0][0])
    half = len(items) // 2
    return items_frames(items[:half]) + items_frames(items[half:])


def step_frames(stream_ids: list[int], offsets: list[int], token_ids: list[int]) -> list[bytes]:
    """Encode single tokens of choice 0 of many streams, at most one of each stream: a step of continuous batching."""
    return [
        frame(Kind.STEP, pack((stream_ids[at:end], offsets[at:end], token_ids[at:end])))
        for at in range(0, len(stream_ids), STEP_TOKENS)
        for end in (at + STEP_TOKENS,)
    ]
