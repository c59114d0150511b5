"""What both wires of the faulty worker share: its engine, its room, its tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

PATH = "1f/ns/c/e"
ROOM = 16  # requests at once; the others wait
STEP_SECONDS = 0.001


class Refusal(Exception):
    """A request that is refused, with the type of its error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class FaultyWorker:
    def __init__(self, fault: str, secret: bytes) -> None:
        self.fault, self.secret = fault, secret
        self.server: asyncio.Server | None = None
        self.port = 0
        self.hello_seconds = 10.0
        self.room = asyncio.Semaphore(ROOM)
        self.one_at_a_time = asyncio.Lock()  # for the faults that make callers wait for each other
        self.ids: set[int] = set()  # of all connections, for the fault that mixes them
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}/{PATH}"

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def lost(self, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def close(self) -> None:
        while self._tasks:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    def stops_listening(self) -> None:
        if self.server is not None:
            self.server.close()

    async def write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if self.fault in ("one lock for all writes", "one lock for all ACKs"):
            async with self.one_at_a_time:
                writer.write(data)
                await writer.drain()
        else:
            writer.write(data)
            await writer.drain()

    def request_tokens(self, body: Any) -> int:
        """How many tokens a request is answered with. Raises Refusal."""
        ids = body.get("token_ids") if isinstance(body, dict) else None
        if not isinstance(ids, list) and self.fault != "wrong type served":
            raise Refusal("InvalidArgument", "token_ids must be a list of numbers")
        return int((body.get("stop_conditions") or {}).get("max_tokens") or 16)

    async def tokens(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            await asyncio.sleep(STEP_SECONDS)
            yield number
