"""One directory of the file store as a place to write: files appear at once or not at all, under the directory's lock."""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dynamo.errors import InvalidArgument
from dynamo.runtime.discovery.keys import TEMPORARY_PREFIX

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

LOCK_ATTEMPTS: Final = 100
LOCK_RETRY_SECONDS: Final = 0.01
"""A lock is held for milliseconds by a process that keeps the store's rules, so one that is held for longer than these attempts is
another program's, or its holder hangs. Then the store goes on without it: every write is one rename, link or unlink, so the lock
only saves work."""

FOREIGN_LOCK_SECONDS: Final = 30.0  # how long a lock that was not released is not waited for again


class LockedDirectory:
    """A directory whose changes are made under its `flock`, as long as no other program sits on the lock."""

    def __init__(self, path: Path, *, monotonic: Callable[[], float]) -> None:
        self.path = path
        self._monotonic = monotonic
        self._unlocked_until = -math.inf  # another program holds the lock; until then it is not waited for
        path.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, value: bytes, *, is_new: bool = False) -> bool:
        """Write a file at once or not at all; with `is_new` return False, having written nothing, where there is one.
        Call it under the lock, or where the lock does not matter.
        """
        temporary = self.path / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        try:
            temporary.write_bytes(value)
            if is_new and not _link(temporary, self.path / name):
                temporary.unlink()
                return False
            if not is_new:
                os.replace(temporary, self.path / name)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            if error.errno == errno.ENAMETOOLONG:
                raise InvalidArgument(
                    f"the discovery key {name!r} is too long for a file name; use shorter namespace, component and "
                    "endpoint names"
                ) from error
            raise
        return True

    def remove(self, name: str) -> None:
        """Remove a file; absent is fine."""
        with self.locked(), suppress(FileNotFoundError):
            (self.path / name).unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock, or go on without it once another program has held it for a second."""
        try:
            handle = open_directory(self.path)
        except FileNotFoundError:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = open_directory(self.path)
        try:
            self._lock(handle)
            yield
        finally:
            os.close(handle)  # this releases the lock

    def _lock(self, handle: int) -> None:
        attempts = 1 if self._monotonic() < self._unlocked_until else LOCK_ATTEMPTS
        for attempt in range(attempts):
            if attempt:
                time.sleep(LOCK_RETRY_SECONDS)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            self._unlocked_until = -math.inf
            return
        if attempts > 1:
            self._unlocked_until = self._monotonic() + FOREIGN_LOCK_SECONDS
            logger.warning(
                "file discovery store: another process has held the lock of %s for %g s; going on without the lock",
                self.path,
                LOCK_ATTEMPTS * LOCK_RETRY_SECONDS,
            )


def open_directory(path: Path) -> int:
    """Return a file descriptor of a directory, which the caller closes."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0))


def _link(temporary: Path, path: Path) -> bool:
    """Give a file its name unless the name is taken, even while another process holds the lock."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        os.replace(temporary, path)  # a file system without hard links: only the lock decides which process is first
        return True
    temporary.unlink()
    return True
