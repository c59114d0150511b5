"""The end of life of a worker built from `register_model` and `serve_endpoint` (`Worker` has its own, in its table).

Unregister -> grace -> drain callback -> pre-shutdown callback -> the event -> cleanup callback -> `runtime.shutdown()`.
Every step goes on when the one before it failed: a shutdown that stops half-way is worse than one that skips a step.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from dynamo.runtime.base.tasks import Background, is_being_cancelled
from dynamo.worker.shutdown import shutdown_times

if TYPE_CHECKING:
    from dynamo.runtime import DistributedRuntime, Endpoint

logger = logging.getLogger(__name__)

__all__ = ["get_grace_period_seconds", "graceful_shutdown_with_discovery", "install_signal_handlers"]

CALLBACK_SECONDS: Final = 30.0  # for the drain and the pre-shutdown callback, each

Callback = Callable[[], Any]  # sync or async

_under_way: weakref.WeakSet[DistributedRuntime] = weakref.WeakSet()


def get_grace_period_seconds() -> float:
    """Read `DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS`: unset, empty or unreadable is 5 s, negative is 0."""
    return shutdown_times().grace_seconds


async def graceful_shutdown_with_discovery(
    runtime: DistributedRuntime,
    endpoints: Iterable[Endpoint],
    shutdown_event: asyncio.Event | None = None,
    grace_period_s: float | None = None,
    drain_callback: Callback | None = None,
    pre_shutdown_callback: Callback | None = None,
    cleanup_callback: Callback | None = None,
) -> None:
    """Take `endpoints` out of discovery, serve on for the grace period, then end. A second call for a runtime does nothing.

    `endpoints` may be a list that grows until the shutdown begins. `grace_period_s` None: from the environment.
    """
    if runtime in _under_way:
        logger.debug("a shutdown is under way already")
        return
    _under_way.add(runtime)
    for endpoint in list(endpoints):
        try:
            await endpoint.unregister_endpoint_instance()
        except Exception as error:
            logger.warning("discovery unregister of %s failed: %s", endpoint.path, error)
        else:
            logger.info("%s unregistered from discovery", endpoint.path)
    grace = get_grace_period_seconds() if grace_period_s is None else max(grace_period_s, 0.0)
    if grace > 0:
        logger.info("grace period %.2fs before shutdown", grace)
        await asyncio.sleep(grace)
    await _call("drain", drain_callback, CALLBACK_SECONDS)
    await _call("pre-shutdown", pre_shutdown_callback, CALLBACK_SECONDS)
    if shutdown_event is not None:
        shutdown_event.set()
    await _call("cleanup", cleanup_callback, None)
    runtime.shutdown()


def install_signal_handlers(
    loop: asyncio.AbstractEventLoop,
    runtime: DistributedRuntime,
    endpoints: Iterable[Endpoint],
    shutdown_event: asyncio.Event | None = None,
    grace_period_s: float | None = None,
    drain_callback: Callback | None = None,
    pre_shutdown_callback: Callback | None = None,
    cleanup_callback: Callback | None = None,
) -> None:
    """Shut down gracefully at the first SIGTERM or SIGINT; later ones are ignored. Call it in the main thread."""
    work = Background()  # held by the loop through the handler below

    def begin(name: str) -> None:
        if work:
            logger.debug("%s received again; the shutdown is under way", name)
            return
        logger.info("%s received", name)
        # It is not awaited: it ends in runtime.shutdown(), which makes `serve_endpoint` return.
        work.start(
            graceful_shutdown_with_discovery(
                runtime,
                endpoints,
                shutdown_event,
                grace_period_s,
                drain_callback,
                pre_shutdown_callback,
                cleanup_callback,
            ),
            "graceful shutdown",
        )

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, begin, number.name)


async def _call(what: str, callback: Callback | None, timeout_seconds: float | None) -> None:
    """Run a callback; its failure, or its refusal to end in time, is logged."""
    if callback is None:
        return
    try:
        async with asyncio.timeout(timeout_seconds):
            result = callback()
            if inspect.isawaitable(result):
                await result
    except TimeoutError:
        logger.warning("%s callback did not end within %g s", what, timeout_seconds)
    except (Exception, asyncio.CancelledError):
        if is_being_cancelled():
            raise  # else the callback awaited a task it had cancelled, which is a failure like any other
        logger.warning("%s callback failed", what, exc_info=True)
