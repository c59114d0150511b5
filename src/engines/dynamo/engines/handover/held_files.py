"""Files that one process writes and another one takes: bounded, held for a while, and removed when their writer is gone.

A writer has a lock file with the stem of all its names, and holds its lock while it lives. So the files of a dead writer are
found without process numbers, which mean nothing in another container: a process that gets the lock removes the files with its
stem. This needs no helper process, and holds after SIGKILL, too.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from dynamo.errors import Disconnected, InvalidArgument, Overloaded, WorkerUnavailable

MAX_BYTES: Final = 1 << 30
"""How much a writer holds, and a reader has mapped, unless another bound is given."""
MAX_FILES: Final = 4096
HOLD_SECONDS: Final = 60.0
"""How long a file waits for its reader, as long as transfers over NIXL wait."""
SWEEP_SECONDS: Final = 30.0  # between two searches for what dead processes left
WAIT_SECONDS: Final = 0.02  # between two checks of a writer that ends whether all was taken
LOCK: Final = ".lock"


def shared_memory_directory() -> Path:
    """Return where POSIX shared memory is files. Raises InvalidArgument on a system that has no such place."""
    found = Path("/dev/shm")
    if not found.is_dir():
        raise InvalidArgument("shared memory needs /dev/shm, which Linux has; use the mode local")
    return found


class Leftovers:
    """What dead writers left in a directory, under names with a prefix."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self._directory, self._prefix = directory, prefix
        self._next = 0.0  # monotonic

    def sweep(self) -> int:
        """Remove the files of writers that are gone; return how many."""
        self._next = time.monotonic() + SWEEP_SECONDS
        names = [name for name in os.listdir(self._directory) if name.startswith(self._prefix)]
        removed = 0
        for lock in (name for name in names if name.endswith(LOCK)):
            with suppress(OSError):  # of another user, or removed in this moment by another process
                file = os.open(self._directory / lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if os.fstat(file).st_uid != os.geteuid():
                        continue
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    stem = lock.removesuffix(LOCK)
                    # The lock file last: another sweep finds the rest if this one is killed.
                    for name in (*(each for each in names if each.startswith(stem) and each != lock), lock):
                        (self._directory / name).unlink(missing_ok=True)
                        removed += name != lock
                finally:
                    os.close(file)
        return removed

    def sweep_at_times(self) -> None:
        """Do so unless it was done a moment ago."""
        if time.monotonic() >= self._next:
            self.sweep()


class HeldFiles:
    """The files of one writer that no reader has taken yet. All methods run in one event loop."""

    def __init__(
        self, directory: Path, stem: str, *, max_bytes: int = MAX_BYTES, hold_seconds: float = HOLD_SECONDS
    ) -> None:
        """`stem`: how the names of this writer begin, and of no other; it ends in a part of fixed length."""
        self.directory, self.stem, self._max_bytes, self._hold_seconds = directory, stem, max_bytes, hold_seconds
        self._held: dict[
            str, tuple[int, asyncio.TimerHandle | None]
        ] = {}  # bytes, and what removes it; None: it is written
        self._lock: int | None = _locked(directory / (stem + LOCK))

    @property
    def held_bytes(self) -> int:
        """How much waits for a reader, or was taken since `waiting` was called last."""
        return sum(size for size, _ in self._held.values())

    def waiting(self) -> list[str]:
        """Return the names of the files that no reader has taken."""
        written = [name for name, (_, timer) in self._held.items() if timer is not None]
        for name in (each for each in written if not (self.directory / each).exists()):
            self._forget(name)
        return list(self._held)

    async def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> Path:
        """Write a file for another process to take, and return its path.

        Raises InvalidArgument for one above the bound, Overloaded while too many others wait or the disk is full, and
        WorkerUnavailable once this writer is closed.
        """
        size = sum(memoryview(piece).nbytes for piece in pieces)
        if self._is_closed():
            raise WorkerUnavailable("the sender of embeddings is closed")
        if size > self._max_bytes:
            raise InvalidArgument(f"{size} bytes are to be handed over, more than the bound of {self._max_bytes}")
        if self._is_full(size) and self.waiting() and self._is_full(size):
            raise Overloaded(
                f"{self.held_bytes} bytes of {self._max_bytes} wait for the workers that were to take them"
            )
        loop, path = asyncio.get_running_loop(), self.directory / name
        self._held[name] = size, None  # booked before it is written: others write at the same time
        writing = loop.run_in_executor(None, _write, path, tuple(pieces))
        try:
            await asyncio.shield(writing)
        except OSError as error:
            self.remove(name)
            raise Overloaded(f"{size} bytes could not be written to {self.directory}: {error}") from error
        except BaseException:
            writing.add_done_callback(partial(self._discard, name))  # the thread cannot be stopped
            raise
        if self._is_closed():  # meanwhile
            self.remove(name)
            raise WorkerUnavailable("the sender of embeddings was closed")
        self._held[name] = size, loop.call_later(self._hold_seconds, self.remove, name)
        return path

    def _is_closed(self) -> bool:
        return self._lock is None

    def _is_full(self, size: int) -> bool:
        return self.held_bytes + size > self._max_bytes or len(self._held) >= MAX_FILES

    def _discard(self, name: str, writing: asyncio.Future[None]) -> None:
        if not writing.cancelled():
            writing.exception()  # retrieved: the request that it was for has ended
        self.remove(name)

    def _forget(self, name: str) -> None:
        _, timer = self._held.pop(name, (0, None))
        if timer is not None:
            timer.cancel()

    def remove(self, name: str) -> None:
        """Remove a file, taken or not; an absent one is fine."""
        self._forget(name)
        (self.directory / name).unlink(missing_ok=True)

    async def aclose(self, wait_seconds: float = 0.0) -> None:
        """Write no more, and remove what no reader has taken within `wait_seconds`. Idempotent."""
        until = time.monotonic() + wait_seconds
        while self.waiting() and time.monotonic() < until:
            await asyncio.sleep(WAIT_SECONDS)
        for name in list(self._held):
            self.remove(name)
        if self._lock is not None:
            (self.directory / (self.stem + LOCK)).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


class TakenFile(NamedTuple):
    """What another process has handed over; the memory is freed with the last reference to `data`."""

    path: Path
    data: memoryview

    @classmethod
    def open(cls, path: Path, *, max_bytes: int = MAX_BYTES, maps: bool) -> TakenFile:
        """Return the content of a file, mapped or read; a mapped one loses its name at once.

        Raises Disconnected for one that is not there, and InvalidArgument for one that is too large or of another user.
        """
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            # Not WorkerUnavailable: after that the same handle would be sent to another worker, and not a new one.
            raise Disconnected(
                f"{path.name} is not there: its sender is gone, or it waited too long, or the two processes do not share "
                f"{path.parent}"
            ) from None
        except OSError as error:
            raise InvalidArgument(f"{path.name} cannot be opened: {error.strerror}") from error
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise InvalidArgument(f"{path.name} is not a file of this user")
            if status.st_size > max_bytes:
                path.unlink(missing_ok=True)
                raise InvalidArgument(f"{path.name} has {status.st_size} bytes, more than the bound of {max_bytes}")
            if not maps:
                with open(file, "rb", closefd=False) as opened:
                    content = bytearray(status.st_size)
                    if opened.readinto(content) != status.st_size:
                        raise Disconnected(f"{path.name} became shorter while it was read")
                    return cls(path, memoryview(content))
            path.unlink(missing_ok=True)  # a reader that is killed from here on leaves nothing
            if status.st_size == 0:
                return cls(path, memoryview(bytearray()))
            return cls(path, memoryview(mmap.mmap(file, status.st_size, access=mmap.ACCESS_COPY)))
        finally:
            os.close(file)

    def remove(self) -> None:
        """Remove the file; an absent one is fine."""
        self.path.unlink(missing_ok=True)


def _locked(path: Path) -> int:
    """Make and lock a file. Raises WorkerUnavailable where that cannot be."""
    try:
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file).st_ino == path.stat().st_ino:
                    kept, file = file, -1
                    return kept
            except (BlockingIOError, FileNotFoundError):
                continue  # another process is removing it, as it was not locked yet
            finally:
                if file >= 0:
                    os.close(file)
    except OSError as error:
        raise WorkerUnavailable(f"nothing can be handed over in {path.parent}: {error.strerror}") from error


def _write(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    """Write a file that is not there yet. Without a mapping: there a full disk is SIGBUS and not an error."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(file, rest) :]
    finally:
        os.close(file)


def sender_id() -> str:
    """Return a name for a writer: its process, for the reader of a listing, and random digits that make it unique."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"
