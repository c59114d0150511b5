"""One bucket of the file store: its scans, what they found changed, and which process counts as gone.

Its files appear at once or not at all, under the directory's lock.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo.errors import InvalidArgument
from dynamo.runtime.discovery.base import Change, Delete, Put, matches
from dynamo.runtime.discovery.file.clocks import LeaseClocks
from dynamo.runtime.discovery.keys import TEMPORARY_PREFIX, decode_name, encode_name, split_key

logger = logging.getLogger(__name__)

if sys.platform != "win32":
    import fcntl

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


CONFIRM_SECONDS: Final = 0.1
"""A directory's time has the resolution of a kernel tick (up to 10 ms), so a change in the tick of the one before it does
not show. One more scan this long after a new time was first seen finds it, whatever the clocks show."""

COARSE_CONFIRM_SECONDS: Final = 2.1  # for file systems that keep whole (FAT: even) seconds


@dataclass(slots=True)
class _Entry:
    """One file as last seen."""

    key: str
    value: bytes
    signature: tuple[int, int, int]  # inode, mtime_ns, size: the value is read again only when it changed


@dataclass(slots=True)
class _Due:
    """When each step of a bucket is due, by the monotonic clock."""

    confirm_at: float = math.inf
    restore_at: float = -math.inf  # when a record of ours that was overwritten may be written again at once
    scan_at: float = -math.inf
    keep_until: float = -math.inf  # after a loss of the store: until then nothing that is missing counts as gone


class FileBucket:
    """One directory as last seen, and when to scan again although it seems unchanged (monotonic seconds).

    `own` are the records of this process in all buckets, as they are now: what of them is missing is written again.
    """

    def __init__(self, name: str, root: Path, *, own: Mapping[str, bytes], clocks: LeaseClocks) -> None:
        self.directory = LockedDirectory(root / name, monotonic=clocks.monotonic)
        self._name = name
        self._own = own
        self._clocks = clocks
        self._entries: dict[str, _Entry] = {}  # by file name
        self._stamp: tuple[int, int] | None = None  # inode, mtime_ns of the directory
        self._handle: int | None = None  # holds the directory, or its inode might be that of the one made after it
        self._due = _Due()

    def read(self, prefix: str) -> dict[str, bytes]:
        """Return what counts as there, sorted by key."""
        found = {entry.key: entry.value for entry in self._entries.values() if matches(prefix, entry.key)}
        return dict(sorted(found.items()))

    def poll(self, changes: list[Change], *, look: bool = False) -> None:
        """Append to `changes` what happened in the directory, so that a failure half-way loses none of it. `look`: scan
        it although it seems unchanged.
        """
        path, now = self.directory.path, self._clocks.monotonic()
        try:
            found = os.stat(path)
        except FileNotFoundError:
            self._rebuild(now)
            found = os.stat(path)
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp != self._stamp:
            if self._stamp is None or stamp[0] != self._stamp[0]:
                if self._stamp is not None:
                    self._due.keep_until = now + self._clocks.ttl_seconds  # another process recreated the directory
                self._hold()
            self._stamp = stamp
            coarse = found.st_mtime_ns % 1_000_000_000 == 0
            self._due.confirm_at = now + (COARSE_CONFIRM_SECONDS if coarse else CONFIRM_SECONDS)
        elif now >= self._due.confirm_at:
            self._due.confirm_at = math.inf
        elif now < self._due.scan_at and not look:
            return
        self._due.scan_at = -math.inf  # until the scan has succeeded
        self._scan(now, changes)

    def restore(self, name: str, value: bytes, why: str = "was removed by another process") -> None:
        """Write a record of ours again: another process overwrote it, or expired it while this one was frozen."""
        path = self.directory.path / name
        logger.warning("file discovery store: %s %s; writing it again", path, why)
        with self.directory.locked():
            self.directory.write(name, value)

    def close(self) -> None:
        """Let go of the directory."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    # -- scanning ------------------------------------------------------------------------------------------------

    def _scan(self, now: float, changes: list[Change]) -> None:
        """Update the entries by a scan."""
        wall = self._clocks.wall()
        missing = dict.fromkeys(self._entries)
        dead: list[str] = []
        oldest = wall
        with os.scandir(self.directory.path) as files:
            for file in files:
                try:
                    found = file.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # renamed or removed during the scan; `missing` decides
                if not stat.S_ISREG(found.st_mode):
                    continue
                if file.name.startswith(TEMPORARY_PREFIX):
                    if self._clocks.is_dead(found):
                        dead.append(file.name)  # its writer died between write and rename
                    continue
                inside = decode_name(file.name)
                if inside is None:
                    continue
                key = f"{self._name}/{inside}"
                missing.pop(file.name, None)
                if key not in self._own:
                    if self._clocks.is_dead(found):
                        dead.append(file.name)
                        continue
                    oldest = min(oldest, found.st_mtime)
                self._look(file.name, key, found, changes)
        for name in missing:
            self._missed(name, now, changes)
        if dead:
            self._bury(dead, changes)
        # Nothing can expire before its TTL is over, so that is when to scan next. The floor bounds the work while a
        # file is past its time but not trusted to be dead.
        ttl = self._clocks.ttl_seconds
        self._due.scan_at = now + max(oldest + ttl - wall + 0.05, ttl / 10)
        if now < self._due.keep_until:
            self._due.scan_at = min(self._due.scan_at, self._due.keep_until)

    def _look(self, name: str, key: str, found: os.stat_result, changes: list[Change]) -> None:
        own, now = self._own.get(key), self._clocks.monotonic()
        signature = (found.st_ino, found.st_mtime_ns, found.st_size)
        known = self._entries.get(name)
        if known is not None and known.signature == signature:
            return
        try:
            value = (self.directory.path / name).read_bytes()
        except FileNotFoundError:
            return  # gone again: the directory's time has changed, and the next scan finds it
        if own is not None and own != value and now >= self._due.restore_at:
            # Two owners of one key must not fight at every poll.
            self._due.restore_at = now + self._clocks.renew_seconds
            self.restore(name, own, "was overwritten by another process")
            return  # the next scan finds it
        self._entries[name] = _Entry(key, value, signature)
        if known is None or known.value != value:  # else only its time was renewed
            changes.append(Put(key, value))

    def _missed(self, name: str, now: float, changes: list[Change]) -> None:
        """Handle a file that the scan did not find: gone, or overlooked while renamed, or ours and taken from us."""
        entry = self._entries[name]
        if (value := self._own.get(entry.key)) is not None:
            self.restore(name, value)
        elif now >= self._due.keep_until and not (self.directory.path / name).exists() and self._is_whole(now):
            del self._entries[name]
            changes.append(Delete(entry.key))

    def _bury(self, names: list[str], changes: list[Change]) -> None:
        with self.directory.locked():
            for name in names:
                path = self.directory.path / name
                with suppress(FileNotFoundError):
                    if not self._clocks.is_dead(path.stat()):
                        continue  # its owner came back meanwhile; the next scan sees it
                    path.unlink()
                entry = self._entries.pop(name, None)
                if entry is not None:
                    changes.append(Delete(entry.key))

    # -- the directory, lost and made again ------------------------------------------------------------------------

    def _hold(self) -> None:
        self.close()
        self._handle = open_directory(self.directory.path)

    def _is_whole(self, now: float) -> bool:
        """Return whether the directory is the one that was scanned before: it may be recreated in the middle of a
        scan.
        """
        try:
            is_same = self._stamp is not None and os.stat(self.directory.path).st_ino == self._stamp[0]
        except FileNotFoundError:
            is_same = False
        if not is_same:
            self._due.keep_until = now + self._clocks.ttl_seconds
        return is_same

    def _rebuild(self, now: float) -> None:
        """Recreate the directory, put our own records, and give the other processes a TTL to do the same."""
        path = self.directory.path
        if self._stamp is not None:
            logger.warning("file discovery store: %s vanished; making it again", path)
            self._due.keep_until = now + self._clocks.ttl_seconds
        path.mkdir(parents=True, exist_ok=True)
        for key, value in self._own.items():
            name, inside = split_key(key)
            if name == self._name:
                self.directory.write(encode_name(inside), value)
