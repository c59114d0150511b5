"""The directory tree of the file store: what is written, what is read, when a file counts as dead.

Synchronous and owned by one thread; `file.py` gives it that thread. The layout is the native one:
`ROOT/{bucket}/{percent-encoded key}`, written to `.tmp_*` and renamed, mutations under an exclusive `flock` of the bucket's
directory (but see `FOREIGN_LOCK_SECONDS`). A file lives as long as its modification time is renewed; whoever uses the bucket removes the dead ones.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.runtime.discovery.base import Change, Delete, Put, matches
from dynamo.runtime.discovery.keys import TEMPORARY_PREFIX, decode_name, encode_name, split_bucket, split_key

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

LOCK_ATTEMPTS: Final = 100
LOCK_RETRY_SECONDS: Final = 0.01
"""A lock is held for milliseconds by whoever keeps the store's rules, so one that is held for longer than these attempts is
another program's, or its holder hangs. Then the store goes on without it: every write is one rename, link or unlink, so the lock
only saves work."""

FOREIGN_LOCK_SECONDS: Final = 30.0  # how long a lock that was not released is not waited for again

CONFIRM_SECONDS: Final = 0.1
"""A directory's time has the resolution of a kernel tick (up to 10 ms), so a change in the tick of the one before it does
not show. One more scan this long after a new time was first seen finds it, whatever the clocks say."""

COARSE_CONFIRM_SECONDS: Final = 2.1  # for file systems that keep whole (FAT: even) seconds

STALL_SECONDS: Final = 5.0  # a poll is due every 0.1 s and may wait a second for a lock

CLOCK_JUMP_SECONDS: Final = 1.0  # wall and monotonic clock may drift apart this far between two polls


@dataclass(slots=True)
class _Entry:
    """One file as last seen."""

    key: str
    value: bytes
    signature: tuple[int, int, int]  # inode, mtime_ns, size: the value is read again only when it changed


@dataclass(slots=True)
class _Bucket:
    """One directory as last seen, and when to look again although it seems unchanged (monotonic seconds)."""

    name: str
    path: Path
    entries: dict[str, _Entry] = field(default_factory=dict)  # by file name
    stamp: tuple[int, int] | None = None  # inode, mtime_ns of the directory
    handle: int | None = None  # holds the directory, or its inode might be that of the one made after it
    confirm_at: float = math.inf
    scan_at: float = -math.inf
    unlocked_until: float = -math.inf  # another program holds its lock; until then the lock is not waited for
    keep_until: float = -math.inf  # after a loss of the store: until then nothing that is missing counts as gone


class FileStore:
    """Records in files. Methods raise `OSError` when the file system fails; `poll` never does."""

    def __init__(
        self,
        root: Path,
        *,
        ttl_seconds: float,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = root
        self._ttl = max(ttl_seconds, 1.0)
        # The native store renews every max(TTL/3, 1 s); for a TTL below 3 s that would let one miss kill the file.
        self._renew_seconds = self._ttl / 3
        self._wall, self._monotonic = wall, monotonic
        self._buckets: dict[str, _Bucket] = {}
        self._own: dict[str, bytes] = {}
        self._renew_at = math.inf
        self._polled_at = monotonic()
        self._clock_offset = wall() - self._polled_at
        self._distrust_until = -math.inf
        self._failure: str | None = None  # of the last poll

    def open(self) -> None:
        """Make the root. Raises `CannotConnect` when it cannot be written."""
        if sys.platform == "win32":
            raise CannotConnect("the file discovery store needs POSIX file locks; use --discovery-backend mem")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise CannotConnect(
                f"cannot use the file discovery store at {self.root}: {error.strerror or error}. "
                "Name a directory of your own in DYN_FILE_KV, or choose another store with --discovery-backend"
            ) from error
        self._polled_at = self._monotonic()

    # -- records -------------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> None:
        bucket, name = self._place(key)
        with self._locked(bucket):
            self._write(bucket, name, value)
        self._own[key] = value
        self._renew_soon()

    def put_new(self, key: str, value: bytes) -> bool:
        bucket, name = self._place(key)
        self._judge_clocks(self._monotonic())
        with self._locked(bucket):
            path = bucket.path / name
            with suppress(FileNotFoundError):
                if not self._is_dead(path.stat()):
                    return False
                path.unlink()
            if not self._write(bucket, name, value, is_new=True):
                return False
        self._own[key] = value
        self._renew_soon()
        return True

    def delete(self, key: str) -> None:
        bucket, name = self._place(key)
        self._own.pop(key, None)
        with self._locked(bucket), suppress(FileNotFoundError):
            (bucket.path / name).unlink()

    def lose(self) -> None:
        """Remove our records, as a process does that takes this one for dead; the next poll puts it again."""
        for key in self._own:
            bucket, name = self._place(key)
            with self._locked(bucket), suppress(FileNotFoundError):
                (bucket.path / name).unlink()

    def read(self, prefix: str) -> tuple[dict[str, bytes], list[Change]]:
        """Return the living records under a prefix, and the changes that reading them found."""
        bucket = self._bucket(split_bucket(prefix)[0])
        now = self._monotonic()
        self._judge_clocks(now)
        changes: list[Change] = []
        self._poll_bucket(bucket, now, changes, look=True)
        found = {entry.key: entry.value for entry in bucket.entries.values() if matches(prefix, entry.key)}
        return dict(sorted(found.items())), changes

    def poll(self) -> list[Change]:
        """Renew what is ours, remove what is dead, and report what changed in the buckets used so far.

        Nearly always this is one `stat` for each bucket. Never raises for a failing file system: the last view stays.
        """
        now = self._monotonic()
        self._judge_clocks(now)
        changes: list[Change] = []
        failure: Exception | None = None
        if now >= self._renew_at:
            try:
                self._renew()
                self._renew_at = now + self._renew_seconds
            except (OSError, CannotConnect) as error:
                failure = error
        for bucket in self._buckets.values():
            try:
                self._poll_bucket(bucket, now, changes)
            except (OSError, CannotConnect) as error:
                failure = error
        if failure is not None and self._failure is None:
            logger.warning("file discovery store %s failed: %s; keeping the last view", self.root, failure)
        elif failure is None and self._failure is not None:
            logger.info("file discovery store %s is back", self.root)
        self._failure = None if failure is None else str(failure)
        return changes

    def trouble(self) -> str | None:
        """Return why the view may be out of date; see `base.Discovery`."""
        if self._failure is not None:
            return f"the file store {self.root} fails: {self._failure}"
        since = self._monotonic() - self._polled_at  # a file system that hangs keeps the poll from returning
        if self._buckets and since > STALL_SECONDS:
            return f"the file store {self.root} has not answered for {since:.0f} s"
        return None

    def close(self) -> None:
        """Remove what is ours, as far as it goes; what is left expires by itself."""
        for key in list(self._own):
            try:
                self.delete(key)
            except (OSError, CannotConnect) as error:
                logger.warning("could not remove %s from the file discovery store: %s", key, error)
        for bucket in self._buckets.values():
            if bucket.handle is not None:
                os.close(bucket.handle)
                bucket.handle = None

    # -- one directory -------------------------------------------------------------------------------------------

    def _poll_bucket(self, bucket: _Bucket, now: float, changes: list[Change], *, look: bool = False) -> None:
        """Append to `changes` what happened in a directory, so that a failure half-way loses none of it."""
        try:
            found = os.stat(bucket.path)
        except FileNotFoundError:
            self._rebuild(bucket, now)
            found = os.stat(bucket.path)
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp != bucket.stamp:
            if bucket.stamp is None or stamp[0] != bucket.stamp[0]:
                if bucket.stamp is not None:
                    bucket.keep_until = now + self._ttl  # another process recreated the directory
                self._hold(bucket)
            bucket.stamp = stamp
            coarse = found.st_mtime_ns % 1_000_000_000 == 0
            bucket.confirm_at = now + (COARSE_CONFIRM_SECONDS if coarse else CONFIRM_SECONDS)
        elif now >= bucket.confirm_at:
            bucket.confirm_at = math.inf
        elif now < bucket.scan_at and not look:
            return
        bucket.scan_at = -math.inf  # until the scan has succeeded
        self._scan(bucket, now, changes)

    def _scan(self, bucket: _Bucket, now: float, changes: list[Change]) -> None:
        """Update `bucket.entries` by a scan."""
        wall = self._wall()
        missing = dict.fromkeys(bucket.entries)
        dead: list[str] = []
        oldest = wall
        with os.scandir(bucket.path) as files:
            for file in files:
                try:
                    found = file.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # renamed or removed during the scan; `missing` decides
                if not stat.S_ISREG(found.st_mode):
                    continue
                if file.name.startswith(TEMPORARY_PREFIX):
                    if self._is_dead(found):
                        dead.append(file.name)  # its writer died between write and rename
                    continue
                inside = decode_name(file.name)
                if inside is None:
                    continue
                key = f"{bucket.name}/{inside}"
                missing.pop(file.name, None)
                if key not in self._own:
                    if self._is_dead(found):
                        dead.append(file.name)
                        continue
                    oldest = min(oldest, found.st_mtime)
                self._look(bucket, file.name, key, found, changes)
        for name in missing:
            self._missed(bucket, name, now, changes)
        if dead:
            self._bury(bucket, dead, changes)
        # Nothing can expire before its TTL is over, so that is when to look next. The floor bounds the work while a
        # file is past its time but not trusted to be dead.
        bucket.scan_at = now + max(oldest + self._ttl - wall + 0.05, self._ttl / 10)
        if now < bucket.keep_until:
            bucket.scan_at = min(bucket.scan_at, bucket.keep_until)

    def _look(self, bucket: _Bucket, name: str, key: str, found: os.stat_result, changes: list[Change]) -> None:
        signature = (found.st_ino, found.st_mtime_ns, found.st_size)
        known = bucket.entries.get(name)
        if known is not None and known.signature == signature:
            return
        try:
            value = (bucket.path / name).read_bytes()
        except FileNotFoundError:
            return  # gone again: the directory's time has changed, and the next scan finds it
        bucket.entries[name] = _Entry(key, value, signature)
        if known is None or known.value != value:  # else only its time was renewed
            changes.append(Put(key, value))

    def _missed(self, bucket: _Bucket, name: str, now: float, changes: list[Change]) -> None:
        """Handle a file that the scan did not find: gone, or overlooked while renamed, or ours and taken from us."""
        entry = bucket.entries[name]
        if (value := self._own.get(entry.key)) is not None:
            self._restore(bucket, name, value)
        elif now >= bucket.keep_until and not (bucket.path / name).exists() and self._is_whole(bucket, now):
            del bucket.entries[name]
            changes.append(Delete(entry.key))

    @staticmethod
    def _hold(bucket: _Bucket) -> None:
        if bucket.handle is not None:
            os.close(bucket.handle)
            bucket.handle = None
        bucket.handle = os.open(bucket.path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0))

    def _is_whole(self, bucket: _Bucket, now: float) -> bool:
        """Return whether the directory is the one that was scanned before: it may be recreated in the middle of a
        scan.
        """
        try:
            is_same = bucket.stamp is not None and os.stat(bucket.path).st_ino == bucket.stamp[0]
        except FileNotFoundError:
            is_same = False
        if not is_same:
            bucket.keep_until = now + self._ttl
        return is_same

    def _bury(self, bucket: _Bucket, names: list[str], changes: list[Change]) -> None:
        with self._locked(bucket):
            for name in names:
                path = bucket.path / name
                with suppress(FileNotFoundError):
                    if not self._is_dead(path.stat()):
                        continue  # its owner came back meanwhile; the next scan sees it
                    path.unlink()
                entry = bucket.entries.pop(name, None)
                if entry is not None:
                    changes.append(Delete(entry.key))

    def _restore(self, bucket: _Bucket, name: str, value: bytes) -> None:
        """Somebody expired us while this process was frozen. It is healthy, so the record comes back."""
        logger.warning("file discovery store: %s was removed by another process; writing it again", bucket.path / name)
        with self._locked(bucket):
            self._write(bucket, name, value)

    def _rebuild(self, bucket: _Bucket, now: float) -> None:
        """Recreate the directory, put our own records, and give the other processes a TTL to do the same."""
        if bucket.stamp is not None:
            logger.warning("file discovery store: %s vanished; making it again", bucket.path)
            bucket.keep_until = now + self._ttl
        bucket.path.mkdir(parents=True, exist_ok=True)
        for key, value in self._own.items():
            name, inside = split_key(key)
            if name == bucket.name:
                self._write(bucket, encode_name(inside), value)

    # -- time ----------------------------------------------------------------------------------------------------

    def _is_dead(self, found: os.stat_result) -> bool:
        """Return whether a file was not renewed within the TTL. A time far in the future is from before the clock
        was set back.
        """
        if self._monotonic() < self._distrust_until:
            return False
        return abs(self._wall() - found.st_mtime) > self._ttl

    def _judge_clocks(self, now: float) -> None:
        """Give owners time to renew their files after a clock jump, a suspended machine or a frozen process made all
        look old.
        """
        offset = self._wall() - now
        if abs(offset - self._clock_offset) > CLOCK_JUMP_SECONDS or now - self._polled_at > self._renew_seconds:
            self._distrust_until = now + 2 * self._renew_seconds
            self._renew_at = min(self._renew_at, now)
        self._clock_offset = offset
        self._polled_at = now

    def _renew(self) -> None:
        for key, value in self._own.items():
            bucket, name = self._place(key)
            try:
                os.utime(bucket.path / name)
            except FileNotFoundError:
                self._restore(bucket, name, value)

    def _renew_soon(self) -> None:
        self._renew_at = min(self._renew_at, self._monotonic() + self._renew_seconds)

    # -- files ---------------------------------------------------------------------------------------------------

    def _bucket(self, name: str) -> _Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = _Bucket(name, self.root / name)
            bucket.path.mkdir(parents=True, exist_ok=True)
            self._buckets[name] = bucket
        return bucket

    def _place(self, key: str) -> tuple[_Bucket, str]:
        bucket, inside = split_key(key)
        return self._bucket(bucket), encode_name(inside)

    def _write(self, bucket: _Bucket, name: str, value: bytes, *, is_new: bool = False) -> bool:
        """Write a file at once or not at all; with `is_new` return False, having written nothing, where there is one."""
        temporary = bucket.path / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        try:
            temporary.write_bytes(value)
            if is_new and not self._link(temporary, bucket.path / name):
                temporary.unlink()
                return False
            if not is_new:
                os.replace(temporary, bucket.path / name)
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

    @staticmethod
    def _link(temporary: Path, path: Path) -> bool:
        """Give a file its name unless the name is taken, even while another process holds the lock."""
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise
            os.replace(
                temporary, path
            )  # a file system without hard links: only the lock decides which process is first
            return True
        temporary.unlink()
        return True

    @contextmanager
    def _locked(self, bucket: _Bucket) -> Iterator[None]:
        """Hold the directory's lock, or go on without it once another program has held it for a second."""
        handle = self._open_directory(bucket)
        try:
            self._lock(bucket, handle)
            yield
        finally:
            os.close(handle)  # this releases the lock

    def _lock(self, bucket: _Bucket, handle: int) -> None:
        attempts = 1 if self._monotonic() < bucket.unlocked_until else LOCK_ATTEMPTS
        for attempt in range(attempts):
            if attempt:
                time.sleep(LOCK_RETRY_SECONDS)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            bucket.unlocked_until = -math.inf
            return
        if attempts > 1:
            bucket.unlocked_until = self._monotonic() + FOREIGN_LOCK_SECONDS
            logger.warning(
                "file discovery store: another process has held the lock of %s for %g s; going on without the lock",
                bucket.path,
                LOCK_ATTEMPTS * LOCK_RETRY_SECONDS,
            )

    def _open_directory(self, bucket: _Bucket) -> int:
        flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
        try:
            return os.open(bucket.path, flags)
        except FileNotFoundError:
            bucket.path.mkdir(parents=True, exist_ok=True)
            return os.open(bucket.path, flags)
