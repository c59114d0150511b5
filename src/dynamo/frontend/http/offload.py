"""Where long work goes: a small thread pool, or, under virtual time, right here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

__all__ = ["InlineOffload", "Offload", "ThreadOffload", "processors"]

T = TypeVar("T")

MAX_THREADS: Final = 8  # long prompts are tokenised outside the interpreter lock; more threads than cores only queue


class Offload(Protocol):
    """Run blocking work without blocking the loop."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises."""

    def close(self) -> None:
        """Take no more work; what runs may finish."""


class InlineOffload:
    """Runs the work on the spot: for simulations and tests, where a thread would bring in real time."""

    async def __call__(self, work: Callable[[], T]) -> T:
        return work()

    def close(self) -> None:
        """Nothing to close."""


class ThreadOffload:
    """A bounded pool. Threads start when they are first needed."""

    def __init__(self, threads: int = 0) -> None:
        """`threads` 0: one per processor this process may use, at most 8."""
        count = threads or min(MAX_THREADS, processors())
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="dynamo-frontend")

    async def __call__(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):  # respects taskset and most container limits
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
