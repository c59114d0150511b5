"""SGLang's engine in a thread with an event loop of its own.

On the loop of the main thread SGLang would take over the handling of SIGTERM and end the process by its own rules. In another
thread it does not.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from dynamo.errors import EngineShutdown
from dynamo.runtime.calls.context import Context, on_loop

T = TypeVar("T")

END_SECONDS: Final = 1.0  # for the tasks of the thread, once they are cancelled


@contextmanager
def kept_logging() -> Iterator[None]:
    """Leave the root logger as it is for the time of the block: SGLang replaces its handlers and level for the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


class EngineThread:
    """Owns one `sglang.Engine`."""

    def __init__(self) -> None:
        self._started: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="sglang", daemon=True)
        self.engine: Any = None

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._started is None:
            raise EngineShutdown("SGLang is not running")
        return self._started

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)  # requests that were stopped, and SGLang's own
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left, timeout=END_SECONDS) if left else asyncio.sleep(0))
        finally:
            self._loop.close()

    async def start(self, make: Callable[[], Any]) -> None:
        """Make the engine in the thread. Raises what `make` raises."""
        self._started = asyncio.new_event_loop()
        self._thread.start()
        made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        home = asyncio.get_running_loop()

        def work() -> None:
            try:
                engine = make()
            except BaseException as error:  # also SystemExit, as argparse raises it
                home.call_soon_threadsafe(_settle, made, None, error)
            else:
                home.call_soon_threadsafe(_settle, made, engine, None)

        self._loop.call_soon_threadsafe(work)
        self.engine = await made

    async def outputs(
        self, context: Context, submit: Callable[[Any], Awaitable[AsyncIterator[Any]]]
    ) -> AsyncGenerator[Any, None]:
        """Yield the outputs of one request; ends early once the context is stopped.

        `submit`, on the thread's loop, hands the request to the engine. Raises what SGLang raises for a request that it refuses
        at once.
        """
        home = asyncio.get_running_loop()
        found: asyncio.Queue[tuple[Any, BaseException | None]] = asyncio.Queue()  # one entry per step of the request

        async def follow() -> None:
            failure: BaseException | None = None
            try:
                async for output in await submit(self.engine):
                    home.call_soon_threadsafe(found.put_nowait, (output, None))
            except asyncio.CancelledError:
                raise
            except Exception as error:  # handed to the request that waits for it
                failure = error
            home.call_soon_threadsafe(found.put_nowait, (None, failure))

        forget = context.on_cancel(on_loop(home, lambda _killed: found.put_nowait((None, None))))
        following = asyncio.run_coroutine_threadsafe(follow(), self._loop)
        try:
            while True:
                output, failure = await found.get()
                if failure is not None:
                    raise failure
                if output is None:
                    return
                yield output
        finally:
            forget()
            following.cancel()

    async def ask(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await a coroutine on the thread's loop. Raises what it raises."""

        async def run() -> T:
            return await question()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on the thread's loop."""
        self._loop.call_soon_threadsafe(function, *arguments)

    async def close(self) -> None:
        """Shut the engine and its processes down, and end the thread. Safe twice."""
        engine, self.engine = self.engine, None
        if engine is not None:
            with suppress(EngineShutdown):
                await asyncio.to_thread(engine.shutdown)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)


def _settle(made: asyncio.Future[Any], engine: Any, error: BaseException | None) -> None:
    if made.done():
        return
    if error is None:
        made.set_result(engine)
    else:
        made.set_exception(
            error if isinstance(error, Exception) else EngineShutdown(f"SGLang did not start: {error!r}")
        )
