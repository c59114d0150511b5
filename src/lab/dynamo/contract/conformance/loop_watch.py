"""Finds out that an engine blocks the event loop, where it does, and gets the loop free again."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, Final

from dynamo.contract.conformance.failures import ConformanceFailure

TICK_SECONDS: Final = 0.1
# Counted in ticks of a thread beside the loop, not by a clock: where the whole machine is slow, the ticks are late too.
BLOCKED_TICKS: Final = 5
BLOCKED_SECONDS: Final = BLOCKED_TICKS * TICK_SECONDS
SIGNAL: Final = getattr(signal, "SIGUSR2", None)  # ends a system call, which an exception set from outside does not

_STANDARD_LIBRARY: Final = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")
)
_IDLE: Final = ("asyncio", "selectors", "uvloop")  # the innermost module of a loop that waits


class _GetFree(BaseException):
    """Unwinds the code that blocks the loop. Not an Exception, which engines catch."""


class LoopWatch:
    """A thread that checks whether the loop still turns. `check` raises once it has found that it did not."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._ticks = 0
        self._computed_seconds = 0.0  # of the loop's thread, at the last tick
        self._stuck_at_tick = -1  # the tick after which the loop did not turn
        self._found: str | None = None  # where it was blocked first
        self._timer: asyncio.TimerHandle | None = None
        self._ended = threading.Event()

    def check(self) -> None:
        """Raise the failure when the loop was blocked since the watch began."""
        if self._found is not None:
            raise ConformanceFailure("EventLoopBlocked", self._found, after=f"{BLOCKED_SECONDS:.1f}s")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the thread beside the block."""
        thread = threading.Thread(target=self._watch, name="conformance loop watch", daemon=True)
        with self._signal_handler():
            self._tick()
            thread.start()
            try:
                yield
            finally:
                self._end(thread)

    def _end(self, thread: threading.Thread) -> None:
        """End the thread. An interruption that it began just before comes too late, and is dropped."""
        while True:
            try:
                self._ended.set()
                thread.join()
                break
            except _GetFree:
                continue
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._ticks += 1
        computed = time.thread_time()
        if self._ticks > 1 and computed - self._computed_seconds >= BLOCKED_SECONDS:
            # An extension that keeps the interpreter's lock stops the watching thread as well.
            self._found = self._found or "by computing"
        self._computed_seconds = computed
        self._timer = self._loop.call_later(TICK_SECONDS / 2, self._tick)

    def _watch(self) -> None:
        seen, late = -1, 0
        while not self._ended.wait(TICK_SECONDS):
            late = late + 1 if self._ticks == seen and self._busy_at() else 0
            seen = self._ticks
            if late >= BLOCKED_TICKS:
                late = 0
                self._found = self._found or self._busy_at()
                self._stuck_at_tick = seen
                self._interrupt()

    def _busy_at(self) -> str | None:
        """Return the place where the loop's thread is, or None while it waits for events."""
        return _place(sys._current_frames().get(self._loop_thread))

    def _interrupt(self) -> None:
        if SIGNAL is not None and self._loop_thread == threading.main_thread().ident:
            signal.pthread_kill(self._loop_thread, SIGNAL)
        else:  # reaches Python code only; a system call in another thread cannot be ended
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._loop_thread), ctypes.py_object(_GetFree))

    @contextmanager
    def _signal_handler(self) -> Iterator[None]:
        if SIGNAL is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(SIGNAL, self._on_signal)
        try:
            yield
        finally:
            signal.signal(SIGNAL, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Else the loop got free in the meantime.
        if not self._ended.is_set() and self._ticks == self._stuck_at_tick and _place(frame):
            raise _GetFree


@asynccontextmanager
async def watch_loop() -> AsyncIterator[LoopWatch]:
    """Watch the running loop beside the block. What blocks it is interrupted, and `check` reports it."""
    watch = LoopWatch(asyncio.get_running_loop())
    with watch.watching():
        try:
            yield watch
        except _GetFree:  # it met the kit itself, at the moment when the engine got free
            watch.check()


def _place(frame: FrameType | None) -> str | None:
    """Name the innermost line outside the standard library; None when the loop itself is innermost."""
    if frame is None or _package(frame) in _IDLE:
        return None
    innermost = frame
    while frame is not None and (
        os.path.realpath(frame.f_code.co_filename).startswith(_STANDARD_LIBRARY)
        and "site-packages" not in frame.f_code.co_filename
    ):
        frame = frame.f_back
    found: Any = frame or innermost
    return f"at {found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_qualname}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
