"""What a client that blocks is tested against: an async context on a loop and a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

from support.patience import PATIENCE_SECONDS

T = TypeVar("T")


@contextmanager
def on_own_thread(context: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter `context` there, and leave it in the end."""
    started: Future[tuple[T, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        async with context as found:
            stop = asyncio.Event()
            started.set_result((found, asyncio.get_running_loop(), stop))
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="the loop behind a client that blocks")
    thread.start()
    found, loop, stop = started.result(PATIENCE_SECONDS)
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_SECONDS)
