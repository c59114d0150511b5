"""The flow control and the clock of one HTTP connection."""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING, Final, cast

from dynamo.runtime.base.timers import due_of
from dynamo.runtime.base.write_batch import WriteBatch
from dynamo.runtime.http.limits import LINGER_LIMIT_SECONDS, LINGER_SECONDS

if TYPE_CHECKING:
    from dynamo.runtime.http.connection import HttpConnection


class Gate:
    """Whether the socket is read and written; `drain` waits for room. `batch`: the writes of this loop that wait for others."""

    __slots__ = ("_room", "_transport", "batch", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.batch = WriteBatch.of_this_loop()
        self._room = asyncio.Event()
        self._room.set()
        self.read_paused = self.write_paused = False

    async def drain(self) -> None:
        """Return when the client has read enough, or is gone."""
        await self._room.wait()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._room.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._room.set()


# The clock of one HTTP connection: what it is doing, since when, and whether the client reads.

LOOKS_PER_LIMIT: Final = 4  # how many times within the write stall limit a connection is checked


class ConnectionPhase(enum.Enum):
    """What a connection is doing, from the listener's side."""

    WAITING = enum.auto()  # for the first byte of a request
    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWERING = enum.auto()  # the request is complete
    LEAVING = enum.auto()  # refused: reads and drops until the client has left


class Watch:
    """One timer, moved forward only when a deadline begins that is nearer than what it waits for: a request that arrives in
    one read moves nothing."""

    __slots__ = ("_began", "_connection", "_end", "_loop", "_paused_at", "_timer", "_unread", "_unread_since", "phase")

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.phase = ConnectionPhase.WAITING
        self._began = self._unread_since = self._end = self._loop.time()
        self._paused_at: float | None = None  # since when the client has not read enough
        self._unread = 0  # bytes in the write buffer at the last check
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, phase: ConnectionPhase) -> None:
        self.phase = phase
        self._began = self._loop.time()

    def leave(self) -> None:
        """Begin to wait for a refused client to leave."""
        self.enter(ConnectionPhase.LEAVING)
        self._end = self._began + LINGER_LIMIT_SECONDS
        self.arm()

    def drop(self) -> None:
        """Wait on: a refused client that is still sending reads the refusal after that."""
        self._began = min(self._loop.time(), self._end - LINGER_SECONDS)

    def pause_writing(self) -> None:
        self._paused_at = self._loop.time()
        self.arm()

    def resume_writing(self) -> None:
        self._paused_at = None

    def stop(self) -> None:
        """Stop watching: the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._connection = cast("HttpConnection", None)  # no circle is left to the collector

    def arm(self) -> None:
        """Set the timer so that it fires in time for the nearest deadline."""
        due = self._due()
        if self._timer is not None:
            if due_of(self._timer) <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._look)

    def _due(self) -> float:
        limits, began = self._connection.limits, self._began
        look = self._loop.time() + limits.write_stall_seconds / LOOKS_PER_LIMIT
        match self.phase:
            case ConnectionPhase.WAITING:
                return min(began + limits.idle_seconds, look)
            case ConnectionPhase.HEAD:
                return min(began + limits.header_timeout_seconds, look)
            case ConnectionPhase.BODY:
                return min(began + limits.body_timeout_seconds, look)
            case ConnectionPhase.LEAVING:
                return began + LINGER_SECONDS
        return look

    def _look(self) -> None:
        self._timer = None
        now, connection = self._loop.time(), self._connection
        limits, transport = connection.limits, connection.transport
        if self._is_stalled(now):
            connection.count("write_stall")
            transport.abort()
            return
        waited = now - self._began
        match self.phase:
            case ConnectionPhase.LEAVING if waited >= LINGER_SECONDS:
                transport.abort()
                return
            case ConnectionPhase.WAITING if waited >= limits.idle_seconds and not transport.is_closing():
                connection.count("idle")
                transport.close()
            case ConnectionPhase.HEAD | ConnectionPhase.BODY if connection.is_reading_paused:
                self._began = now  # it is this side that does not read
            case ConnectionPhase.HEAD if waited >= limits.header_timeout_seconds:
                connection.refuse(limits.headers_too_late())
            case ConnectionPhase.BODY if waited >= limits.body_timeout_seconds:
                connection.refuse(limits.body_too_late())
        self.arm()

    def _is_stalled(self, now: float) -> bool:
        """Return whether the client has not read for too long, as far as the write buffer shows."""
        limit, transport = self._connection.limits.write_stall_seconds, self._connection.transport
        if self._paused_at is not None and now - self._paused_at >= limit:
            return True
        unread = transport.get_write_buffer_size()
        if unread == 0 or unread < self._unread:
            self._unread_since = now
        self._unread = unread
        if transport.is_closing() and self.phase is not ConnectionPhase.LEAVING:
            # Closed by an answer's end; the rest of the buffer must leave as a whole within the limit.
            self.enter(ConnectionPhase.LEAVING)
            self._began += limit - LINGER_SECONDS
        return unread > 0 and now - self._unread_since >= limit
