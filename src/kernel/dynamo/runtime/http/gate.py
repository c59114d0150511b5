"""Flow control of one HTTP connection."""

from __future__ import annotations

import asyncio

from dynamo.runtime.base.write_batch import WriteBatch


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
