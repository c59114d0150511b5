"""Several requests of one call, each placed, retried and cancelled alone, read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Final, Generic, Protocol, Self, TypeVar

from dynamo.protocol.request_ids import part_uuid
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.context import Context

T = TypeVar("T", covariant=True)
R = TypeVar("R")

CAPACITY: Final = 64  # entries that wait for the reader of the whole; then the readers of the parts wait


class Reader(Protocol[T]):
    """What is needed of the reader of one part."""

    async def next(self) -> T | None:
        """Return what is new, waiting for something to arrive; None at the end. Raises why the part failed."""
        ...

    def close(self) -> None:
        """Leave the part. Idempotent."""
        ...


class FanOut(AsyncIterator[list[R]], Generic[R]):
    """`async with FanOut(context) as fan_out:`, `add` the readers of all parts, then iterate: batches as they arrive.

    The iteration ends when every part has ended. It raises why a part failed, behind what had arrived by then. Leaving the
    block closes every part.
    """

    def __init__(self, context: Context) -> None:
        """`context`: of the call, which reaches every part that runs in a `child` of it."""
        self._context = context
        self._arrived: asyncio.Queue[tuple[R] | Exception | None] = asyncio.Queue(CAPACITY)
        self._background = Background()
        self._readers: list[Reader[R]] = []
        self._unlink: list[Callable[[], None]] = []
        self._running = 0
        self._failure: Exception | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for forget in self._unlink:
            forget()
        await self._background.close()
        for reader in self._readers:
            reader.close()  # also those whose task never began

    def child(self, number: int) -> Context:
        """Return the context of one part. Engines key their requests by id, so each part has an id of its own."""
        child = self._context.detached(part_uuid(self._context.id(), number))
        self._unlink.append(self._context.link_child(child))
        return child

    def add(self, reader: Reader[R]) -> None:
        """Begin to read one part."""
        self._readers.append(reader)
        self._running += 1
        self._background.start(self._read(reader), f"part of {self._context.id()}")

    async def __anext__(self) -> list[R]:
        while self._running and self._failure is None:
            entries = [await self._arrived.get()]
            while not self._arrived.empty():
                entries.append(self._arrived.get_nowait())
            found: list[R] = []
            for entry in entries:
                if entry is None:
                    self._running -= 1
                elif isinstance(entry, tuple):
                    found.append(entry[0])
                else:
                    self._failure = self._failure or entry
            if found:
                return found
        if self._failure is not None:
            raise self._failure
        raise StopAsyncIteration

    async def _read(self, reader: Reader[R]) -> None:
        try:
            while (found := await reader.next()) is not None:
                await self._arrived.put((found,))
            await self._arrived.put(None)
        except Exception as error:  # the reader of the whole raises it
            await self._arrived.put(error)
        finally:
            reader.close()
