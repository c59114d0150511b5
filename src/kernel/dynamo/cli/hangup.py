"""SIGHUP means one of two things: restart, or the terminal is gone.

A terminal that is closed sends it to what runs there, and closing a terminal requests no restart.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from dynamo.runtime.base.tasks import Background

LOOK_SECONDS: Final = 2.0  # SIGHUP comes at once with the end of a terminal; one that comes later is a request again


@asynccontextmanager
async def hangups(*, restart: Callable[[], None], terminal_gone: Callable[[], None]) -> AsyncIterator[None]:
    """Call one of the two for every SIGHUP. Under `nohup`, or without a terminal from the start, it is always `restart`."""
    loop = asyncio.get_running_loop()
    number: signal.Signals | None = getattr(signal, "SIGHUP", None)
    if number is None:  # Windows
        yield
        return
    previous = signal.getsignal(number)
    has_terminal = previous is not signal.SIG_IGN and _has_terminal()

    def hear() -> None:
        if has_terminal and not _has_terminal():
            terminal_gone()
        else:
            restart()

    async def look() -> None:
        nonlocal has_terminal
        while _has_terminal():
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.sleep(LOOK_SECONDS)  # its own SIGHUP may not have been handled yet: a busy loop runs timers first
        has_terminal = False

    loop.add_signal_handler(number, hear)
    try:
        async with Background() as background:
            background.start(look(), "terminal")
            yield
    finally:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL if previous is None else previous)


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal now."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
