"""Large bodies of requests: those that are still arriving in pieces, and those with a long list of token ids."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Callable, Generator
from typing import Any, Final, TypeGuard, TypeVar

import msgspec

from dynamo.errors import DynamoException, InvalidArgument, Overloaded
from dynamo.runtime.base.limits import PendingBytes, Refused
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.calls.request_plane.expansion import exceeds_when_decoded
from dynamo.runtime.calls.request_plane.mux.frames import END_FLAG, Open, ProtocolError, decode_body, pack

T = TypeVar("T")
InSlices = Generator[None, None, T]

# A body with a long list of token ids is encoded and decoded a slice at a time.
#
# The encoder and decoder of msgpack hold the interpreter for as long as a message takes: 40 ms for a million ids. Here each
# slice of ids is written with one width, so that a reader can cut it into columns of bytes without reading each id. The
# result is plain msgpack: every reader takes it, and one that knows the layout takes it in slices.
#
#     map of n members | n - 1 members | "token_ids" | array 32, count | slices of SLICE_IDS ids, the last one shorter
#
# `encode_long` and `decode_long` are generators that give way after each slice and return their result.

SLICE_IDS: Final = 65_536  # 1 to 2 ms, either way
LONG_IDS: Final = 2 * SLICE_IDS  # fewer are encoded in 2 ms as a whole
LONG_BODY_BYTES: Final = LONG_IDS  # of a body with so many ids, at the least

BYTES_PER_ID: Final = 40  # in memory: a reference and an int
BYTES_PER_SMALL_ID: Final = 8  # below 256 a reference: the interpreter has one int for all of a value

_KEY: Final = "token_ids"
_MARK: Final = pack(_KEY) + b"\xdd"  # the key, and the tag of an array with a count of four bytes
_WIDTHS: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4}  # unsigned integers by their tag; without one it is one byte below 128
_TYPES: Final = {1: "B", 2: "H", 4: "I"}


class DecodedTooLarge(Exception):
    """A body that would take more memory than one request may."""


def has_long_ids(body: object) -> TypeGuard[dict[str, Any]]:
    """Return whether encoding a body in one piece would take long."""
    if not isinstance(body, dict):
        return False
    ids = body.get(_KEY)
    return isinstance(ids, list) and len(ids) >= LONG_IDS


def encode_long(body: dict[str, Any]) -> InSlices[bytes]:
    """Encode a body that `has_long_ids`. Raises what msgpack's encoder raises."""
    ids = body[_KEY]
    rest = {key: value for key, value in body.items() if key != _KEY}
    parts = [pack({**rest, _KEY: []})[:-1], b"\xdd", len(ids).to_bytes(4, "big")]
    for start in range(0, len(ids), SLICE_IDS):
        try:
            parts.append(_encode_slice(ids[start : start + SLICE_IDS]))
        except (TypeError, ValueError, OverflowError):  # an id that is negative, wider than 32 bits or no integer
            return pack(body)
        yield
    return b"".join(parts)


def decode_long(message: bytes, limit: int) -> InSlices[Any]:
    """Decode a body. Raises DecodedTooLarge where that takes more than `limit` bytes of memory, and what msgpack's decoder
    raises. One that was not written by `encode_long` is decoded in one piece.
    """
    at = message.find(_MARK) if len(message) >= LONG_BODY_BYTES else -1
    start = at + len(_MARK) + 4
    if at >= 0 and start <= len(message):
        count = int.from_bytes(message[start - 4 : start], "big")
        body = _without_ids(message[: start - 5], limit)
        if body is not None:
            ids: list[int] = []
            taken = 0
            while len(ids) < count:
                size = min(SLICE_IDS, count - len(ids))
                width = _width_at(message, start)
                taken += size * (BYTES_PER_ID if width > 1 else BYTES_PER_SMALL_ID)
                if taken > limit:
                    raise DecodedTooLarge
                end = start + size * (width + 1)
                part = _decode_slice(message[start:end], size, width)
                if part is None:
                    break
                ids += part
                start = end
                yield
            if len(ids) == count and start == len(message):
                return {**body, _KEY: ids}
    if exceeds_when_decoded(message, limit):
        raise DecodedTooLarge
    return decode_body(message)


def _without_ids(head: bytes, limit: int) -> dict[str, Any] | None:
    """Decode what stands before the ids; None where that is no map that ends with them, but text that resembles it."""
    whole = head + b"\x90"  # no ids
    if exceeds_when_decoded(whole, limit):
        return None
    try:
        body = decode_body(whole)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) and body.get(_KEY) == [] else None


def _encode_slice(ids: list[int]) -> bytes:
    """Write each id with the width of the largest."""
    largest = max(ids)
    if largest < 0x80:
        return bytes(ids)
    width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
    column = array(_TYPES[width], ids)
    if sys.byteorder == "little":
        column.byteswap()
    raw = column.tobytes()
    out = bytearray(len(ids) * (width + 1))
    out[0 :: width + 1] = _tag(width) * len(ids)
    for place in range(width):
        out[1 + place :: width + 1] = raw[place::width]
    return bytes(out)


def _width_at(message: bytes, at: int) -> int:
    """Return the width of the number that begins there, without its tag; 0 where it is its own tag, or no such number."""
    return _WIDTHS.get(message[at], 0) if at < len(message) else 0


def _decode_slice(part: bytes, count: int, width: int) -> list[int] | None:
    """Read `count` numbers of one width; None where they are not that."""
    if len(part) != count * (width + 1):
        return None
    if width == 0:
        return list(part) if part.isascii() else None
    if part[0 :: width + 1] != _tag(width) * count:
        return None
    raw = bytearray(count * width)
    for place in range(width):
        raw[place::width] = part[1 + place :: width + 1]
    column = array(_TYPES[width], bytes(raw))
    if sys.byteorder == "little":
        column.byteswap()
    return column.tolist()


def _tag(width: int) -> bytes:
    return bytes([0xCB + width.bit_length()])  # 0xcc, 0xcd, 0xce for 1, 2 and 4


# Requests of one `mux` connection whose body is still arriving in pieces.

MAX_HALF_SENT: Final = 1024  # requests of one connection
NO_ROOM: Final = (
    "Server overloaded: the requests under way exceed DYN_TCP_PENDING_BODIES_LIMIT_MB (of one connection: "
    "DYN_TCP_CONNECTION_BODIES_LIMIT_MB)"
)


class _HalfSent:
    __slots__ = ("began", "head", "parts", "received")

    def __init__(self, head: Open, began: float) -> None:
        self.head, self.began = head, began
        self.parts: list[bytes] = []
        self.received = 0


class HalfSentRequests:
    """By stream. Their bytes are bounded with those of all connections, their number and their time here."""

    __slots__ = ("_by_stream", "_decline", "_loop", "_pending", "_refused", "_settings", "_timer")

    def __init__(
        self,
        settings: RequestPlaneSettings,
        pending: PendingBytes,
        *,
        decline: Callable[[int, DynamoException], None],
        refused: Refused,
    ) -> None:
        """`decline` ends a stream whose request is not taken; `refused` counts why."""
        self._settings, self._pending, self._decline, self._refused = settings, pending, decline, refused
        self._loop = asyncio.get_running_loop()
        self._by_stream: dict[int, _HalfSent] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._by_stream

    def begin(self, stream_id: int, head: Open) -> None:
        """Await the body of a request. Raises ProtocolError for more half-sent requests than a connection may have."""
        limit = self._settings.max_message_bytes
        if head.size > limit:
            self._refused("body_size")
            text = f"the request body of {head.size} bytes exceeds the limit of {limit} (DYN_TCP_MAX_MESSAGE_SIZE)"
            self._decline(stream_id, InvalidArgument(text))
            return
        if len(self._by_stream) >= MAX_HALF_SENT:
            self._refused("pending_bodies")
            raise ProtocolError(f"more than {MAX_HALF_SENT} requests are half sent")
        self._by_stream[stream_id] = _HalfSent(head, self._loop.time())
        if self._timer is None:
            self._timer = self._loop.call_later(self._settings.message_timeout_seconds, self._check)

    def add(self, flags: int, stream_id: int, piece: bytes) -> tuple[Open, bytes] | None:
        """Add a piece; the request once its last piece is there. Raises ProtocolError for a size that was announced wrong."""
        found = self._by_stream.get(stream_id)
        if found is None:
            return None  # declined or cancelled meanwhile: the rest of its body is of no interest
        if not self._pending.take(self, len(piece)):
            self._decline_half_sent(stream_id)
            return None
        found.received += len(piece)
        if found.received > found.head.size:
            raise ProtocolError(f"stream {stream_id} sent more than the {found.head.size} bytes it announced")
        found.parts.append(piece)
        if not flags & END_FLAG:
            return None
        self.forget(stream_id)
        if found.received != found.head.size:
            raise ProtocolError(f"stream {stream_id} sent fewer bytes than it announced")
        return found.head, b"".join(found.parts)

    def shed_body(self) -> None:
        """Decline the newest request: a connection that holds less than this one needs the room."""
        self._decline_half_sent(next(stream_id for stream_id in reversed(self._by_stream) if self._holds(stream_id)))

    def _holds(self, stream_id: int) -> bool:
        return self._by_stream[stream_id].received > 0

    def _decline_half_sent(self, stream_id: int) -> None:
        self.forget(stream_id)
        self._refused("pending_bodies")
        self._decline(stream_id, Overloaded(NO_ROOM))

    def forget(self, stream_id: int) -> None:
        """Forget a body that is complete or not needed any more; absent is fine."""
        found = self._by_stream.pop(stream_id, None)
        if found is not None and found.received:
            self._pending.take(self, -found.received)

    def close(self) -> None:
        """Give everything back: the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
        for stream_id in list(self._by_stream):
            self.forget(stream_id)

    def _check(self) -> None:
        """Decline the requests whose body has been arriving for too long."""
        self._timer = None
        limit, now = self._settings.message_timeout_seconds, self._loop.time()
        for stream_id, found in list(self._by_stream.items()):
            if now - found.began < limit:
                self._timer = self._loop.call_at(found.began + limit, self._check)
                return  # the others came later
            self.forget(stream_id)
            self._refused("message_time")
            text = f"the request did not arrive within {limit:g} s (DYN_TCP_MESSAGE_TIMEOUT_SECS)"
            self._decline(stream_id, InvalidArgument(text))
