"""Ends a request at the worker once its caller has gone: abort, a time to end by itself, then force."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Final

from dynamo.contract.engine import BaseEngine
from dynamo.runtime.calls.context import Context, on_loop
from dynamo.runtime.observe.known_failures import LOGGED

logger = logging.getLogger(__name__)

KILL_GRACE_SECONDS: Final = 0.05
"""A killed request's generator may see `is_stopped()` and end by itself for this long; then it is closed where it
stands, so that a vanished client frees its KV blocks now. R10 requires 100 ms in all."""

STOP_GRACE_SECONDS: Final = 30.0  # a stop is graceful; an engine that ignores one for this long is closed all the same
CLOSE_SECONDS: Final = 5.0  # how long a generator's `finally` may take before we go on without it


def _nothing() -> None:
    pass


class CancellationWatch:
    """Calls `engine.abort` exactly once when a request is cancelled, and never after it ended by itself.

    It costs one callback registration per request: tasks exist only once a request really is cancelled. On a decode
    worker both the abort and the forced end wait for the first token, because the prefill peer's KV transfer needs a
    receiver until then.
    """

    __slots__ = (
        "_abort", "_context", "_deferred_kill", "_engine", "_forget", "_metadata", "_task", "_timer", "deferring",
    )  # fmt: skip

    def __init__(self, engine: BaseEngine, context: Context, *, defer: bool) -> None:
        self._engine = engine
        self._context = context
        self._metadata = context.metadata.copy() if context.has_metadata else None
        self._task = asyncio.current_task()  # that serves the request; None: it was cancelled by force
        self._abort: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deferred_kill: bool | None = None
        self.deferring = defer
        loop = asyncio.get_running_loop()
        if defer:  # an engine may report it from the thread that moves the KV blocks
            context.on_first_token(partial(on_loop(loop, lambda _: self.first_token()), False))
        self._forget: Callable[[], None] | None = _nothing  # None: the stream has ended
        self._forget = context.on_cancel(on_loop(loop, self._cancelled))

    @property
    def forced(self) -> bool:
        """Whether the task that serves was cancelled, as the engine had not ended in time."""
        return self._task is None

    def first_token(self) -> None:
        """Act on a cancellation that waited for the first token (or for the transfer that the engine reports)."""
        if not self.deferring:
            return
        self.deferring = False
        self._context.on_first_token(None)
        if self._deferred_kill is not None and self._forget is not None:
            self._cancelled(self._deferred_kill)

    def _cancelled(self, killed: bool) -> None:
        if self._forget is None:
            return
        if self.deferring:
            self._deferred_kill = killed or bool(self._deferred_kill)
            return
        loop = asyncio.get_running_loop()
        if self._abort is None:
            logger.debug("request %s cancelled; calling abort()", self._context.id())
            # Awaited in `settle`, which the serving coroutine calls on every path.
            self._abort = loop.create_task(self._call_abort(), name=f"abort {self._context.id()}")
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(KILL_GRACE_SECONDS if killed else STOP_GRACE_SECONDS, self._force)

    async def _call_abort(self) -> None:
        twin = Context(self._context.id(), self._metadata, trace=self._context.trace)
        twin.stop_generating()
        try:
            await self._engine.abort(twin)
        except Exception:
            logger.debug("abort of request %s failed", self._context.id(), exc_info=True)

    def _force(self) -> None:
        if self._forget is not None and self._task is not None:
            task, self._task = self._task, None
            task.cancel()

    def finished(self) -> None:
        """Record the end of the stream: from here on a cancellation does not reach the engine. Idempotent."""
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()
        self._context.on_first_token(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def settle(self) -> None:
        """Wait for an abort that was begun, at most `CLOSE_SECONDS`."""
        if self._abort is not None and not self._abort.done():
            done, _ = await asyncio.wait({self._abort}, timeout=CLOSE_SECONDS)
            if not done:
                logger.warning("abort of request %s did not return in %g s", self._context.id(), CLOSE_SECONDS)
                self._abort.cancel()


async def close_generator(stream: AsyncGenerator[object, None], context: Context, *, at_terminal: bool = False) -> None:
    """Run the generator's `finally` now. Its failure, or its refusal to end, is logged and not passed on.

    `at_terminal`: the last chunk was taken, and the generator stands at the `yield` of it. It then gets one more step, as
    the native system gives it, so that the code behind that `yield` runs; what it yields there is dropped. The step and
    the close share one limit of time.
    """
    close = getattr(stream, "aclose", None)  # an engine may return any async iterator; only generators can be closed
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            try:
                if at_terminal:
                    await _step_past_terminal(stream, context)
            finally:
                if close is not None:
                    await close()
    except TimeoutError:
        logger.warning("the generator of request %s did not close in %g s", context.id(), CLOSE_SECONDS)
    except Exception:
        logger.debug("closing the generator of request %s failed", context.id(), exc_info=True)


async def _step_past_terminal(stream: AsyncGenerator[object, None], context: Context) -> None:
    try:
        await anext(stream)
    except StopAsyncIteration:
        return
    except Exception as error:
        # The answer is with the client, so nothing but this line reports the failure of the engine's bookkeeping.
        LOGGED.log_failure(logger, context.id(), error, what="request %s: the engine failed after its last chunk")
    else:
        logger.debug("request %s: dropped a chunk that followed the last one", context.id())
