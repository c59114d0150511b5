"""Takes SIGTERM and SIGINT, and ends a process that does not end by itself."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

from dynamo.worker.lifecycle import FORCED_EXIT_CODE, FORCED_EXIT_STATUS

logger = logging.getLogger(__name__)

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
LOG_SECONDS: Final = 1.0  # for the last log line; the thread that holds the logging lock may be what hangs


class Deadline:
    """Ends the process by force when the shutdown takes too long, even if the event loop is blocked.

    A thread of its own watches, because what hangs is usually the loop. It is started early and fed through a
    `SimpleQueue`, whose `put` is safe inside a signal handler that interrupted anything at all.
    """

    def __init__(self, seconds: float, *, force_exit: Callable[[int], object] = os._exit) -> None:
        """`seconds` from `arm` to the end; `force_exit` is called in the watching thread."""
        self._seconds = seconds
        self._force_exit = force_exit
        self._orders: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="shutdown deadline", daemon=True)

    def __enter__(self) -> Deadline:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._orders.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def arm(self) -> None:
        """Start to count; the first call wins. From any thread and from signal handlers."""
        self._orders.put(time.monotonic() + self._seconds)

    def _watch(self) -> None:
        ends_at = self._orders.get()
        while ends_at is not None:
            try:
                order = self._orders.get(timeout=max(0.0, ends_at - time.monotonic()))
            except queue.Empty:
                self._expire()
                return
            if order is None:
                return  # left in time

    def _expire(self) -> None:
        def log_exit() -> None:
            logger.error(
                "Graceful shutdown exceeded %gs; force-exiting with code %d. "
                "Set DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT to override.",
                self._seconds,
                FORCED_EXIT_CODE,
            )

        logging_thread = threading.Thread(target=log_exit, name="last log line", daemon=True)
        logging_thread.start()
        logging_thread.join(LOG_SECONDS)
        self._force_exit(FORCED_EXIT_STATUS)


class SignalGuard:
    """Takes SIGTERM and SIGINT for the framework while it is entered, and keeps engine code from taking them back.

    Inference engines like to install handlers of their own during start-up, and theirs would end the process without a
    drain. Only `loop.add_signal_handler` for the two signals is suppressed; every other signal is the engine's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._add = loop.add_signal_handler
        self._remove = loop.remove_signal_handler
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalGuard:
        setattr(self._loop, "add_signal_handler", self._add_for_engine)  # noqa: B010 - a method of the loop, on purpose
        setattr(self._loop, "remove_signal_handler", self._remove_for_engine)  # noqa: B010
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            self._remove(number)
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()
        for name in ("add_signal_handler", "remove_signal_handler"):
            vars(self._loop).pop(name, None)  # gone already when another worker of this loop ended first

    def listen(self, on_signal: Callable[[str], None], *, at_once: Callable[[], None]) -> bool:
        """Call `on_signal("SIGTERM")` on the loop for every signal; return whether this thread can receive signals at
        all.

        `at_once` runs in the handler itself, so also while the loop is blocked; it must be safe there.
        """
        if threading.current_thread() is not threading.main_thread():
            logger.debug("not in the main thread: signals are left to the main thread")
            return False
        for number in STOP_SIGNALS:
            self._previous[number] = signal.getsignal(number)
            self._take(number, on_signal, at_once)
        return True

    def _take(self, number: signal.Signals, on_signal: Callable[[str], None], at_once: Callable[[], None]) -> None:
        try:
            self._add(number, on_signal, number.name)
        except NotImplementedError:  # an event loop without signals (Windows)

            def relay(_received: int, _frame: FrameType | None) -> None:
                at_once()
                self._loop.call_soon_threadsafe(on_signal, number.name)

            signal.signal(number, relay)
            return
        # The loop's own handler only wakes the loop. Ours goes in front of it: an engine that loads its weights in one
        # blocking call keeps the loop from receiving anything, and the deadline has to run all the same.
        behind = signal.getsignal(number)

        def handle(received: int, frame: FrameType | None) -> None:
            at_once()
            if callable(behind):
                behind(received, frame)

        signal.signal(number, handle)
        # signal.signal() enables interrupted system calls; the loop had disabled them.
        if hasattr(signal, "siginterrupt"):
            signal.siginterrupt(number, False)

    def _add_for_engine(self, sig: int, callback: Callable[..., object], *args: object) -> None:
        if sig in STOP_SIGNALS:
            logger.info("the engine's handler for %s is not installed: the worker shuts it down", _name(sig))
            return
        self._add(sig, callback, *args)

    def _remove_for_engine(self, sig: int) -> bool:
        return False if sig in STOP_SIGNALS else self._remove(sig)


def _name(number: int) -> str:
    return signal.Signals(number).name
