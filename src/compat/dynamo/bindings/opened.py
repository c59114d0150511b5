"""An async context behind an object that is made like any other: opened in the background, closed with it or its runtime."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from dynamo.runtime.base.tasks import Background
from dynamo.runtime.endpoint import Endpoint

__all__ = ["Opened", "running_loop"]

T = TypeVar("T")


class Opened(Generic[T]):
    """What `opening` gives, once it is there. Ends when `owner` is collected, with the endpoint's runtime, or by `close`."""

    def __init__(
        self, owner: object, endpoint: Endpoint, opening: AbstractAsyncContextManager[T], *, name: str
    ) -> None:
        """May be called on the event loop of the endpoint's runtime, and in a thread without a loop of its own.

        Raises RuntimeError on another event loop: its tasks could not await what this one opens.
        """
        loop, here = endpoint.runtime.event_loop(), running_loop()
        if here not in (None, loop):
            raise RuntimeError(f"{name} must be made on the event loop of its runtime, or in a thread without one")
        self._runtime = endpoint.runtime
        self._ready: asyncio.Future[T] = loop.create_future()
        self._ready.add_done_callback(_retrieve)  # a failure that no caller awaits is logged where it happens
        self._background = Background()
        self._task: asyncio.Task[None] | None = None  # None: its loop has yet to start it
        self._is_collected = False
        finalizer = weakref.finalize(owner, self._collected, loop)
        finalizer.atexit = False
        if here is loop:
            self._begin(opening, name)
        else:
            loop.call_soon_threadsafe(self._begin, opening, name)

    async def value(self) -> T:
        """Return what was opened, waiting for it. Raises what opening it, or keeping it open, failed with."""
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Close it. Idempotent."""
        self._runtime.forget_client(self)
        await self._background.close()

    def end(self) -> None:
        """Close it soon; any thread."""
        self._collected(self._runtime.event_loop())

    def count_quarantined(self) -> int:
        """Return 0: the client inside counts by itself."""
        return 0

    def _begin(self, opening: AbstractAsyncContextManager[T], name: str) -> None:
        if not self._is_collected:
            self._task = self._background.start(self._hold(opening), name)
            self._runtime.remember_client(self)

    def _collected(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close it. A collector may run in any thread."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._is_collected = True
        if self._task is not None:
            self._task.cancel()
            self._runtime.forget_client(self)  # a task that is cancelled before its first step runs no `finally`
        if not self._ready.done():
            self._ready.set_exception(RuntimeError("it is closed"))

    async def _hold(self, opening: AbstractAsyncContextManager[T]) -> None:
        try:
            await self._runtime.start()
            async with opening as value:
                self._ready.set_result(value)
                await asyncio.get_running_loop().create_future()  # until this is cancelled, or the context fails
        except BaseException as error:
            gone: BaseException = error
            while isinstance(gone, BaseExceptionGroup) and len(gone.exceptions) == 1:
                gone = gone.exceptions[0]
            if not isinstance(gone, Exception):
                gone = RuntimeError("it is closed")
            if self._ready.done():
                self._ready = asyncio.get_running_loop().create_future()
                self._ready.add_done_callback(_retrieve)
            self._ready.set_exception(gone)
            raise
        finally:
            self._runtime.forget_client(self)


def _retrieve(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop of this thread; None in one that runs none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
