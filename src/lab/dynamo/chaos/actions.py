"""The actions of fault injection on the own process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from typing import Final, Protocol, runtime_checkable

logger = logging.getLogger(__name__)

# A frozen process cannot wake itself. `sleep` and `kill` are the shell's business: there is nothing lighter to start.
_WAKER: Final = 'sleep "$1"; kill -CONT "$2"'


@runtime_checkable
class LosesLease(Protocol):
    """A discovery store that can be made to lose its lease."""

    async def lose_lease(self) -> None: ...


def crash() -> None:
    """End the process at once, as after `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)


def drain() -> None:
    """Send this process the signal with which an orchestrator stops it."""
    os.kill(os.getpid(), signal.SIGTERM)


def freeze(seconds: float) -> None:
    """Stand still, all threads of it; a child wakes this process up again. Returns then."""
    waker = subprocess.Popen(
        ["/bin/sh", "-c", _WAKER, "chaos", f"{seconds:.3f}", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a signal to this process's group is meant for this process
    )
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()
    logger.warning("CHAOS: awake again after %g s", seconds)
