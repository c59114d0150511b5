"""A worker's record in discovery for tests: writes down what is done to it, and fails or waits when told to."""

from __future__ import annotations

import asyncio


class WrittenRecord:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.failure: Exception | None = None
        self.hold: asyncio.Event | None = None

    async def _write(self, what: str) -> None:
        if self.hold is not None:
            await self.hold.wait()
        if self.failure is not None:
            raise self.failure
        self.log.append(what)

    async def advertise(self) -> None:
        await self._write("advertise")

    async def withdraw(self) -> None:
        await self._write("withdraw")
