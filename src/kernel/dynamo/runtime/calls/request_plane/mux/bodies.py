"""Requests of one `mux` connection whose body is still arriving in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dynamo.errors import DynamoException, InvalidArgument, Overloaded
from dynamo.runtime.base.limits import PendingBytes, Refused
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.calls.request_plane.mux.frames import END_FLAG, Open, ProtocolError

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
