"""An event loop whose clock is a number: when nothing is ready, time jumps to the next timer.

    outcome = run_virtual(main())

Nothing sleeps, nothing runs in another thread, and callbacks run in the order they were scheduled, so a program that takes
its chance from a seeded generator does the same at every run.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

from dynamo.protocol.openai.shapes import JsonObject

T = TypeVar("T")

START_SECONDS: Final = 1000.0  # not 0: code that takes a time of 0.0 for "never" would hide its mistake


TURN_SECONDS: Final = 1e-7


class NothingWillHappen(RuntimeError):
    """Every task waits, and no timer is set: the program hangs for ever."""


class OutsideWorld(RuntimeError):
    """Simulated code requested a socket, a process or a thread."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Virtual time, inline executors, no sockets."""

    _ready: deque[object]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, *, shuffle: random.Random | None = None) -> None:
        """`shuffle`: run what is ready in another order than it was scheduled, by these dice. asyncio promises first in,
        first out; another loop under the same code need not."""
        super().__init__()
        self._now = START_SECONDS
        self._clock_resolution = 1e-6  # coarser than a double's step even after years, or a timer might never be due
        self._shuffle = shuffle
        self._thread = threading.get_ident()
        self._selector = self  # BaseEventLoop gets from it how long to sleep
        self.turns = 0  # of the loop; two runs of one seed agree on it
        self.complaints: list[JsonObject] = []  # what reached the exception handler
        self.set_exception_handler(lambda _, context: self.complaints.append(context))

    # -- time --------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Let time pass without running what was due meanwhile, as a machine that was suspended sees it."""
        self._now += max(0.0, seconds)

    def select(self, timeout: float | None) -> list[object]:
        """Advance the clock in place of the selector: nothing arrives from outside, so the sleep ends at once."""
        self.turns += 1
        if timeout is None:
            raise NothingWillHappen("every task waits for another one, and no timer is set")
        # Each turn takes a moment, as it does in reality: a timer set for "a rounding error from now" must not stop time.
        self._now += timeout + TURN_SECONDS
        if self._shuffle is not None and len(self._ready) > 1:
            ready = list(self._ready)
            self._shuffle.shuffle(ready)
            self._ready.clear()
            self._ready.extend(ready)
        return []

    def _process_events(self, event_list: list[object]) -> None:
        pass

    def _write_to_self(self) -> None:
        if threading.get_ident() != self._thread:
            raise OutsideWorld("another thread called into a simulated loop; simulated code has one thread")

    def armed(self) -> list[asyncio.TimerHandle]:
        """Return the timers that will still fire."""
        return [handle for handle in self._scheduled if not handle.cancelled()]

    # -- threads -----------------------------------------------------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run it here and now; the future is done when it is returned."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: there is no default executor."""

    # -- the outside world -------------------------------------------------------------------------------------------

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise OutsideWorld(
            "a simulated loop has no sockets, processes or signals; use the memory planes (discovery and request plane `mem`)"
        )


for _name in (
    "create_connection",
    "create_server",
    "create_datagram_endpoint",
    "create_unix_connection",
    "create_unix_server",
    "connect_accepted_socket",
    "connect_read_pipe",
    "connect_write_pipe",
    "subprocess_exec",
    "subprocess_shell",
    "sock_connect",
    "sock_accept",
    "sock_recv",
    "sock_sendall",
    "getaddrinfo",
    "getnameinfo",
    "add_reader",
    "add_writer",
    "add_signal_handler",
):
    setattr(VirtualLoop, _name, VirtualLoop._refuse)


def run_virtual(main: Coroutine[Any, Any, T], *, loop: VirtualLoop | None = None) -> T:
    """Run `main` on a virtual loop of its own (or on `loop`) and close the loop; as `asyncio.run`, without time.

    Raises NothingWillHappen where the real loop would hang.
    """
    loop = loop or VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(main)
        finally:
            main.close()
            _cancel_all(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    left = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
