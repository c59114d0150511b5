"""What leaves on one `mux` connection of a caller: control frames at once, grants together, large bodies in turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from dynamo.errors import CannotConnect
from dynamo.runtime.calls.request_plane.mux.frames import END_FLAG, MAX_PAYLOAD, Kind, frame, pack

MAX_QUEUED_BODY_BYTES: Final = 256 * 1024 * 1024  # request bodies waiting for a full socket, per connection
GRANTS_PER_FRAME: Final = 4096  # fit in a frame with room to spare


class Outflow:
    """The sending half of a caller's connection."""

    __slots__ = (
        "_bodies", "_body_bytes", "_control", "_flush_scheduled", "_grants", "_is_wanted", "_loop", "paused",
        "transport",
    )  # fmt: skip

    def __init__(self, is_wanted: Callable[[int], bool]) -> None:
        """`is_wanted`: whether a stream still is; the rest of its body is dropped otherwise."""
        self._loop = asyncio.get_running_loop()
        self._is_wanted = is_wanted
        self._control: list[bytes] = []
        self._grants: list[tuple[int, int]] = []
        self._bodies: deque[tuple[int, bytes, int]] = deque()  # stream id, body, bytes of it already sent
        self._body_bytes = 0
        self._flush_scheduled = False
        self.paused = False
        self.transport: asyncio.Transport | None = None

    def begin(self, transport: asyncio.Transport, greeting: bytes) -> None:
        """Send the greeting; from now on frames leave."""
        # uvloop writes at once beyond this, else only once all that is ready in this turn has run. With 0 TLS pauses for ever.
        transport.set_write_buffer_limits(high=1)
        transport.write(greeting)
        self.transport = transport

    def send(self, data: bytes) -> None:
        """Send a frame, the first of a turn at once: the worker begins while the other requests of the turn are prepared."""
        transport = self.transport
        if self._flush_scheduled or transport is None or transport.is_closing():
            self._control.append(data)
        else:  # nothing waits before it
            transport.write(data)
        self.schedule()

    def grant(self, stream_id: int, credits: int) -> None:
        """Give a stream's producer room; all grants of a loop turn travel in one frame."""
        self._grants.append((stream_id, credits))
        self.schedule()

    def check_room(self, body: bytes, address: str) -> None:
        """Raise `CannotConnect` when a body would be one too many for a peer that does not read."""
        if self._body_bytes + len(body) > MAX_QUEUED_BODY_BYTES:
            raise CannotConnect(f"{address} does not read: its send queue is full")

    def send_body(self, stream_id: int, body: bytes) -> None:
        """Send a body in pieces."""
        self._bodies.append((stream_id, body, 0))
        self._body_bytes += len(body)
        self.schedule()

    def schedule(self) -> None:
        """Flush at the next turn of the loop."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def clear(self) -> None:
        """Drop everything: the connection is lost."""
        self.transport = None
        self._bodies.clear()
        self._body_bytes = 0

    def _flush(self) -> None:
        self._flush_scheduled = False
        transport, parts = self.transport, self._take()
        if transport is None or transport.is_closing():
            return
        if parts:
            transport.write(b"".join(parts))
        if self._bodies and not self.paused:
            self._send_piece(transport)
            self.schedule()

    def _take(self) -> list[bytes]:
        parts, self._control = self._control, []
        for at in range(0, len(self._grants), GRANTS_PER_FRAME):
            parts.append(frame(Kind.CREDIT, pack(self._grants[at : at + GRANTS_PER_FRAME])))
        self._grants.clear()
        return parts

    def _send_piece(self, transport: asyncio.Transport) -> None:
        """Send the next piece of the next body, so that a long one holds up neither other bodies nor control frames."""
        stream_id, body, sent = self._bodies.popleft()
        end = min(sent + MAX_PAYLOAD, len(body))
        is_wanted = self._is_wanted(stream_id)
        if is_wanted:
            flags = END_FLAG if end == len(body) else 0
            transport.write(frame(Kind.BODY, body[sent:end], stream_id=stream_id, flags=flags))
        if is_wanted and end < len(body):
            self._bodies.append((stream_id, body, end))
        else:
            self._body_bytes -= len(body)
