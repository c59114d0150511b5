"""The lock of a block of memory that processes share.

A robust mutex of POSIX in that memory: taking it while it is free costs no call of the system, and the kernel frees it
when its holder dies. Where the C library has none, a lock of the file that the memory belongs to does the same for more.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import time
from abc import ABC, abstractmethod
from typing import Final

logger = logging.getLogger(__name__)

LOCK_BYTES: Final = 256
"""What a lock takes of the memory: a word for whether there is a mutex, and a mutex of any C library."""

LOCK_SECONDS: Final = 0.05
"""How long to wait for another process. It holds the lock for microseconds; one that was stopped there must not stop the
others, which then may pass a limit by one request."""

_WORD: Final = b"mutex   "
_MUTEX_AT: Final = 64  # after the word, in a line of the processor's cache of its own
_ATTRIBUTE_BYTES: Final = 64
_SHARED, _ROBUST = 1, 1  # the same in every C library of Linux


class SharedLock(ABC):
    """A lock between processes, for one thread of each; a thread that holds it must not take it again."""

    def acquire(self) -> bool:
        """Take the lock. False: another process has held it for too long, so the caller goes on without it."""
        return self._try() or self._wait()

    def _wait(self) -> bool:
        give_up_at = time.monotonic() + LOCK_SECONDS
        while not self._try():
            if time.monotonic() > give_up_at:
                logger.warning("another process of the group holds the limits for too long; going on without a lock")
                return False
            time.sleep(0)  # the holder may need this processor
        return True

    @abstractmethod
    def _try(self) -> bool:
        """Take the lock if it is free; return whether it is this process's now."""

    @abstractmethod
    def release(self) -> None:
        """Give the lock back, which `acquire` has taken."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory."""


class FileLock(SharedLock):
    """A lock of the first byte of a file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError:
            return False
        return True

    def release(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    def close(self) -> None: ...


class RobustMutex(SharedLock):
    """A mutex in the memory itself."""

    def __init__(self, memory: mmap.mmap, at: int) -> None:
        """`memory` holds a mutex that `create_lock` has made."""
        self._bytes = (ctypes.c_char * (LOCK_BYTES - _MUTEX_AT)).from_buffer(memory, at + _MUTEX_AT)
        self._mutex = ctypes.c_void_p(ctypes.addressof(self._bytes))
        library = _library()
        assert library is not None, "the C library has no robust mutex, and another process of the group found one"
        self._trylock, self._unlock = library.pthread_mutex_trylock, library.pthread_mutex_unlock
        self._mend = library.pthread_mutex_consistent

    def acquire(self) -> bool:
        status = self._trylock(self._mutex)  # which is most of the time all there is to do
        return status == 0 or self._has(status) or self._wait()

    def _try(self) -> bool:
        return self._has(self._trylock(self._mutex))

    def _has(self, status: int) -> bool:
        if status == errno.EOWNERDEAD:  # its holder died, and this process has it now
            self._mend(self._mutex)
            return True
        return status == 0

    def release(self) -> None:
        self._unlock(self._mutex)

    def close(self) -> None:
        del self._mutex, self._bytes


def create_lock(memory: mmap.mmap, at: int, fd: int) -> SharedLock:
    """Make the lock in `LOCK_BYTES` of zeros at `at`, before any other process uses it. `fd`: the file of the memory."""
    library = _library()
    if library is None:
        return FileLock(fd)
    attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
    mutex = (ctypes.c_char * (LOCK_BYTES - _MUTEX_AT)).from_buffer(memory, at + _MUTEX_AT)
    failed = (
        library.pthread_mutexattr_init(attributes)
        or library.pthread_mutexattr_setpshared(attributes, _SHARED)
        or library.pthread_mutexattr_setrobust(attributes, _ROBUST)
        or library.pthread_mutex_init(mutex, attributes)
    )
    del mutex
    if failed:
        return FileLock(fd)
    memory[at : at + len(_WORD)] = _WORD
    return RobustMutex(memory, at)


def open_lock(memory: mmap.mmap, at: int, fd: int) -> SharedLock:
    """Return the lock that another process has made."""
    has_mutex = memory[at : at + len(_WORD)] == _WORD
    return RobustMutex(memory, at) if has_mutex else FileLock(fd)


@functools.cache
def _library() -> ctypes.PyDLL | None:
    """Return the C library; None where it has no robust mutexes. Its calls here never wait, so they keep the GIL."""
    library = ctypes.PyDLL(None)
    has_it = hasattr(library, "pthread_mutexattr_setrobust") and hasattr(library, "pthread_mutex_consistent")
    return library if has_it else None
