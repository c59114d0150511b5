"""Tasks have parents, waits have names: the first of several, background work that a block owns, and whose
cancellation a `CancelledError` is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from types import TracebackType
from typing import Any, Self

__all__ = ["Background", "first_of", "is_being_cancelled", "take_back_cancellation"]

logger = logging.getLogger(__name__)


async def first_of(*awaitables: Awaitable[Any]) -> int:
    """Wait until one of them is done, cancel the others, and return which one it was (the first, when several are).

    Raises what that one raised. When this wait is cancelled all of them are; none is left running behind.
    """
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done = next(place for place, task in enumerate(tasks) if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    tasks[done].result()
    return done


class Background:
    """Work beside a block, owned by it: `async with Background() as background: background.start(work, name)`.

    Leaving the block cancels what still runs and waits for it. Work that crashes ends the block: its task is cancelled and
    the error leaves it. Where there is no block to own the work (an object with a `close`), `close()` does the same.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._owner: asyncio.Task[Any] | None = None
        self._crash: BaseException | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        owner, self._owner = self._owner, None
        await self.close()
        if self._crash is not None and (error is None or isinstance(error, asyncio.CancelledError)):
            if isinstance(error, asyncio.CancelledError) and owner is not None and owner.uncancel() > 0:
                return  # someone else cancelled the block, too: that goes first
            raise self._crash

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be started any more."""
        return self._closed

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` until the block is left. Raises RuntimeError afterwards."""
        if self._closed:
            work.close()
            raise RuntimeError(f"{name} was started after its owner was closed")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._owner is None:
            logger.error("%s failed", task.get_name(), exc_info=error)
        elif self._crash is None:
            self._crash = error
            self._owner.cancel()

    async def close(self) -> None:
        """Cancel what runs and wait until it has ended. Idempotent."""
        self._closed = True
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_being_cancelled() -> bool:
    """Return whether the running task itself was cancelled.

    A CancelledError without that was raised by what the task awaited: by user code that cancels a task of its own and
    then awaits it, for example.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def take_back_cancellation() -> None:
    """Take back one cancellation of the running task: it requested an end, and the end has come."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
