"""Tasks have parents, waits have names: the first of several, background work that a block owns, one attempt for many
callers, and whose cancellation a `CancelledError` is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from dynamo.runtime.base.forever import forever

logger = logging.getLogger(__name__)

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)

Work = Coroutine[None, None, T]
"""A call of an `async def` that returns T."""


async def first_of(*awaitables: Awaitable[object]) -> int:
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
    try:
        tasks[done].result()
    finally:
        tasks.clear()  # one of them has the error that leaves here, whose traceback has this frame
    return done


async def cut_when(work: Awaitable[T], at: float, due: Callable[[], float | None]) -> T:
    """Await `work`, and from loop time `at` on call `due` to decide whether it is cut: after how many seconds to decide again.

    0: it is cut now, takes no further step, and TimeoutError is raised. None: it may take as long as it takes.
    """
    task, loop, is_cut = asyncio.current_task(), asyncio.get_running_loop(), False
    assert task is not None
    timer = loop.call_at(at, lambda: decide())

    def decide() -> None:
        nonlocal is_cut, timer
        if seconds := due():
            timer = loop.call_later(seconds, decide)
        elif seconds is not None:
            is_cut = True
            task.cancel()

    try:
        return await work
    except asyncio.CancelledError:
        if not is_cut or task.cancelling() > 1:  # from elsewhere, too: that goes first
            raise
    finally:
        timer.cancel()
        if is_cut:
            task.uncancel()
    raise TimeoutError


class Background:
    """Work beside a block, owned by it: `async with Background() as background: background.start(work, name)`.

    Leaving the block cancels what still runs and waits for it. Work that crashes ends the block: its task is cancelled and
    the error leaves it. Where there is no block to own the work (an object with a `close`), `close()` does the same, and a
    crash is logged.
    """

    __slots__ = ("_closed", "_crash", "_owner", "_tasks")

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._owner: asyncio.Task[object] | None = None
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
                return  # the block was cancelled from outside, too: that goes first
            raise self._crash

    def __len__(self) -> int:
        """Return how many pieces of work run."""
        return len(self._tasks)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be started any more."""
        return self._closed

    def start(self, work: Work[T], name: str, *, is_awaited: bool = False) -> asyncio.Task[T]:
        """Run `work` until the block is left. Raises RuntimeError afterwards.

        `is_awaited`: the caller awaits the task, and its failure is the caller's: it neither ends the block nor is logged.
        """
        if self._closed:
            work.close()
            raise RuntimeError(f"{name} was started after its owner was closed")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard if is_awaited else self._done)
        return task

    def keep(
        self, work: Callable[[], Awaitable[None]], name: str, delay_seconds: float | None = None
    ) -> asyncio.Task[None]:
        """Run `work()` until the block is left, again where it raises (`forever`). Raises RuntimeError afterwards."""
        return self.start(forever(work, name, delay_seconds), name)

    async def run(self, work: Work[T], name: str) -> T:
        """Run `work` and wait for it: the caller's cancellation ends it, and so does `close`. Raises what it raises."""
        return await self.start(work, name, is_awaited=True)

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._owner is None:
            logger.error("%s failed", task.get_name(), exc_info=error)
        elif self._crash is None:
            self._crash = error
            self._owner.cancel()

    async def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when everything that runs now has ended by itself, or after `timeout_seconds`."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout_seconds)

    def cancel(self) -> None:
        """Cancel what runs, without waiting for it, and start nothing more. Idempotent."""
        self._closed = True
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def close(self, timeout_seconds: float | None = None) -> set[asyncio.Task[object]]:
        """Cancel what runs and wait until it has ended. Idempotent.

        `timeout_seconds`: for work that may ignore a cancellation; what still runs then is returned, for the log.
        """
        self.cancel()
        tasks = self._tasks - {asyncio.current_task()}
        return (await asyncio.wait(tasks, timeout=timeout_seconds))[1] if tasks else set()


class OneWaiter:
    """Where one task waits until there is something for it. Use it on one event loop."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Return at the next `wake`: check first whether there is something already."""
        own = self._future = asyncio.get_running_loop().create_future()
        try:
            await own
        finally:
            if self._future is own:  # else another task waits by now
                self._future = None

    def wake(self) -> None:
        """Let the task go on, if it waits."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class AttemptCancelled(Exception):
    """The attempt that several callers waited for was cancelled by `SingleFlight.cancel`."""


class SingleFlight(Generic[Key, T]):
    """One attempt for each key at a time: all callers that need it while it runs wait for the same result."""

    __slots__ = ("_attempts", "_work")

    def __init__(self) -> None:
        self._attempts: dict[Key, asyncio.Task[T]] = {}
        self._work = Background()

    async def run(self, key: Key, make: Callable[[], Work[T]], name: str) -> T:
        """Return what the attempt returns; `make` begins one where none runs.

        A caller that is cancelled leaves the attempt to the others. Raises what the attempt raises, AttemptCancelled, and
        RuntimeError after `cancel`.
        """
        attempt = self._attempts.get(key)
        if attempt is None:
            attempt = self._attempts[key] = self._work.start(make(), name, is_awaited=True)
            attempt.add_done_callback(partial(self._ended, key))
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            raise AttemptCancelled(name) from None

    def _ended(self, key: Key, attempt: asyncio.Task[T]) -> None:
        del self._attempts[key]
        if not attempt.cancelled():
            attempt.exception()  # retrieved: a waiting caller gets it, and an attempt without one may fail

    def cancel(self) -> None:
        """Cancel every attempt and begin no other; idempotent."""
        self._work.cancel()

    async def close(self) -> None:
        """Do so, and wait until the attempts have ended."""
        await self._work.close()


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
