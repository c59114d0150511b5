"""Where long work goes: a small thread pool, or, under virtual time, right here; and memory back to the system after it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final, Protocol, TypeVar

T = TypeVar("T")

MAX_THREADS: Final = 8  # long prompts are tokenised outside the interpreter lock; more threads than cores only queue


TRIM_SECONDS: Final = 0.5  # after the first large request, for all until then: a trim takes up to some milliseconds
LARGE_ANSWER_TOKENS: Final = 4096  # of all choices; memory of a longer answer goes back, too
LARGE_BODY_BYTES: Final = 128 * 1024  # memory of a longer one goes back to the system afterwards
LONG_TEXT_BYTES: Final = 512 * 1024
MANY_VALUES: Final = 8192


def takes_long(body: bytes) -> bool:
    """Return whether decoding and checking a body takes more than some milliseconds, so that it must not happen on a loop.

    What takes long is a value of JSON (up to 1 us), and hardly its length: 150 KB are one prompt of 32,000 tokens (0.5 ms), or
    26,000 members of `logit_bias` (12 ms). Commas bound the number of values; those in texts are counted too, and only cost
    a hand-over to a thread.
    """
    size = len(body)
    return size > LARGE_BODY_BYTES and (size > LONG_TEXT_BYTES or body.count(b",") > MANY_VALUES)


LARGE_BLOCK_BYTES: Final = 256 * 1024  # above the body of a prompt of 32,000 tokens, which is not worth a system call
TRIM_BYTES: Final = 2 * 1024 * 1024  # free at the end of the heap, from where on it goes back at once

# The parameters of `mallopt`, from malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


@cache
def _glibc(name: str) -> Callable[..., int] | None:
    """Return one of glibc's functions on its heap, or None with another C library."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    return found


def keep_large_blocks_apart(environment: Mapping[str, str] = os.environ) -> bool:
    """Give each large block of glibc's heap pages of its own, which go back to the system when it is freed.

    Left to itself glibc raises the size of such blocks up to 32 MB as they are freed, and keeps them in the arenas of the
    threads, between small objects that hold their pages. Does nothing where the environment tunes glibc, or there is none;
    returns whether it did something. Call it once, when a process that is only a frontend starts.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in environment):
        return False
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES))


def return_memory() -> None:
    """Give memory that is free back to the system: glibc keeps what many threads used in arenas. Takes milliseconds."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)  # ctypes lets other threads run meanwhile


def load_aside(load: Callable[[], None]) -> None:
    """Run `load` in a thread of its own, for which the end of the process waits; give back what it needed for a time."""

    def run() -> None:
        load()
        return_memory()

    threading.Thread(target=run, name="dynamo-load").start()  # a daemon in Rust at the end ends the process by SIGABRT


class Offload(Protocol):
    """Run blocking work without blocking the loop."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """Run `work`; return its result, or raise its error."""

    def return_memory_soon(self) -> None:
        """Give free memory back to the system within about a second; called after a request that took much."""

    def close(self) -> None:
        """Take no more work; what runs may finish."""


class InlineOffload:
    """Runs the work on the spot: for simulations and tests, where a thread would bring in real time."""

    async def __call__(self, work: Callable[[], T]) -> T:
        return work()

    def return_memory_soon(self) -> None:
        """Do nothing: the allocator is no part of a simulation."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class ThreadOffload:
    """A bounded pool. Threads start when they are first needed."""

    def __init__(self, threads: int = 0) -> None:
        """`threads` 0: one per processor this process may use, at most 8."""
        count = threads or min(MAX_THREADS, processors())
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="dynamo-frontend")
        self._trim: asyncio.TimerHandle | None = None

    async def __call__(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def return_memory_soon(self) -> None:
        if self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._return_memory)

    def _return_memory(self) -> None:
        self._trim = None
        self._executor.submit(return_memory)

    def close(self) -> None:
        if self._trim is not None:
            self._trim.cancel()
            self._trim = None
        self._executor.shutdown(wait=False, cancel_futures=True)


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):  # respects taskset and most container limits
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
