"""A bound on how long a user's code may hold the event loop: a signal ends it in the middle of whatever it does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final, TypeVar

TIME_LIMIT_SECONDS: Final = 0.05
"""How long one decision of a user's policy may take."""

T = TypeVar("T")


class PolicyStalled(BaseException):
    """The time limit of a policy has passed. Not an Exception, so that no `except Exception` of the policy holds it up."""


class _TimeLimit:
    """The one alarm of a process, and whether a function is being timed."""

    __slots__ = ("is_inside", "main")

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        self.is_inside = False

    def install(self) -> bool:
        """Take the signal over where that is not done; return False where something else handles it.

        Other code may have taken it back: unhandled, the alarm would end the process.
        """
        handler = signal.getsignal(signal.SIGALRM)
        if handler is signal.SIG_DFL:
            signal.signal(signal.SIGALRM, self.expired)
            return True
        return handler == self.expired

    def expired(self, _number: int, _frame: FrameType | None) -> None:
        """Take the signal. Runs in the main thread, between two steps of the interpreter."""
        if self.is_inside:
            raise PolicyStalled

    def stop(self) -> None:
        """End the timing."""
        self.is_inside = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)


_LIMIT: Final = _TimeLimit()


def call_timed(function: Callable[[], T], seconds: float = TIME_LIMIT_SECONDS) -> T:
    """Return what a function returns. Raises PolicyStalled when its time is over, and whatever the function raises.

    Any loop in Python is interrupted, and nothing outside of the function is. There is no bound in other threads than the main
    one, where SIGALRM has another handler, and within one call into C. Calls must not be nested.
    """
    limit = _LIMIT
    if threading.get_ident() != limit.main or not limit.install():
        return function()
    try:
        # Again and again, as the function may catch the first one.
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        limit.is_inside = True
        try:
            return function()
        finally:
            limit.stop()
    except PolicyStalled:
        limit.stop()  # it may have come within the first one
        raise
