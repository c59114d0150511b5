"""The heartbeat of one `mux` connection of a caller."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dynamo.runtime.calls.request_plane.mux.connection import MuxConnection

PING_SECONDS: Final = 20.0  # also what keeps a stateful firewall's entry alive
SILENCE_SECONDS: Final = 60.0  # an engine may block its worker's loop for longer than one would think
IDLE_SECONDS: Final = 300.0  # a connection without streams is closed after this long


class Heartbeat:
    """Pings the worker, drops the connection to a silent worker, and closes one that has not been used for long."""

    __slots__ = ("_connection", "_loop", "_tick_at", "_timer", "heard_at")

    def __init__(self, connection: MuxConnection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.heard_at = self._tick_at = self._loop.time()

    def start(self) -> None:
        """Check again in `PING_SECONDS`."""
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
        inbound = self._connection.inbound
        if not inbound.streams and now - inbound.idle_since >= IDLE_SECONDS:
            self._connection.close()
            return
        # Also where the worker sends all the time: it drops a silent caller, and a slow stream needs no credits for minutes.
        self._connection.ping()
        self.start()
