"""Discovery on one machine: a directory that all processes share, and one thread for each store.

The thread renews this process's records whatever the event loop is doing (an engine that blocks the loop must not lose
its lease), and polls the directories in use: the standard library has no inotify, and one `stat` every 100 ms costs next
to nothing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from dynamo.errors import CannotConnect
from dynamo.runtime.base.forever import counted
from dynamo.runtime.discovery.base import LEASE_TTL_SECONDS, Change, matches
from dynamo.runtime.discovery.feed import ChangeFeed
from dynamo.runtime.discovery.file.bucket import FileBucket
from dynamo.runtime.discovery.file.clocks import LeaseClocks
from dynamo.runtime.discovery.keys import encode_name, new_lease_id, split_bucket, split_key

logger = logging.getLogger(__name__)

STALL_SECONDS: Final = 5.0  # a poll is due every 0.1 s and may wait a second for a lock


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
        self._clocks = LeaseClocks(ttl_seconds, wall=wall, monotonic=monotonic)
        self._buckets: dict[str, FileBucket] = {}
        self._own: dict[str, bytes] = {}
        self._renew_at = math.inf
        self._failure: str | None = None  # of the last poll

    def open(self) -> None:
        """Make the root. Raises `CannotConnect` when it cannot be written."""
        if sys.platform == "win32":
            raise CannotConnect("the file discovery store needs POSIX file locks; use --discovery-backend mem")
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(self.root)
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise CannotConnect(
                f"cannot use the file discovery store at {self.root}: {error.strerror or error}. "
                "Name a directory of your own in DYN_FILE_KV, or choose another store with --discovery-backend"
            ) from error
        self._clocks.start()

    # -- records -------------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> None:
        bucket, name = self._place(key)
        with bucket.directory.locked():
            bucket.directory.write(name, value)
        self._own[key] = value
        self._renew_soon()

    def put_new(self, key: str, value: bytes) -> bool:
        bucket, name = self._place(key)
        self._compare_clocks()
        with bucket.directory.locked():
            path = bucket.directory.path / name
            with suppress(FileNotFoundError):
                if not self._clocks.is_dead(path.stat()):
                    return False
                path.unlink()
            if not bucket.directory.write(name, value, is_new=True):
                return False
        self._own[key] = value
        self._renew_soon()
        return True

    def delete(self, key: str) -> None:
        bucket, name = self._place(key)
        self._own.pop(key, None)
        bucket.directory.remove(name)

    def lose(self) -> None:
        """Remove our records, as a process does that takes this one for dead; the next poll puts it again."""
        for key in self._own:
            bucket, name = self._place(key)
            bucket.directory.remove(name)

    def read(self, prefix: str) -> tuple[dict[str, bytes], list[Change]]:
        """Return the living records under a prefix, and the changes that reading them found."""
        bucket = self._bucket(split_bucket(prefix)[0])
        self._compare_clocks()
        changes: list[Change] = []
        bucket.poll(changes, look=True)
        return bucket.read(prefix), changes

    def poll(self) -> list[Change]:
        """Renew what is ours, remove what is dead, and report what changed in the buckets used so far.

        Nearly always this is one `stat` for each bucket. Never raises for a failing file system: the last view stays.
        """
        self._compare_clocks()
        changes: list[Change] = []
        failure: Exception | None = None
        now = self._clocks.monotonic()
        if now >= self._renew_at:
            try:
                self._renew()
                self._renew_at = now + self._clocks.renew_seconds
            except (OSError, CannotConnect) as error:
                failure = error
        for bucket in self._buckets.values():
            try:
                bucket.poll(changes)
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
        since = self._clocks.unseen_seconds()  # a file system that hangs keeps the poll from returning
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
            bucket.close()

    # -- renewal -------------------------------------------------------------------------------------------------

    def _compare_clocks(self) -> None:
        if self._clocks.compare():
            self._renew_at = min(self._renew_at, self._clocks.monotonic())

    def _renew(self) -> None:
        for key, value in self._own.items():
            bucket, name = self._place(key)
            path = bucket.directory.path / name
            try:
                os.utime(path)
                if path.read_bytes() == value:
                    continue
                why = "was overwritten by another process"
            except FileNotFoundError:
                why = "was removed by another process"
            bucket.restore(name, value, why)

    def _renew_soon(self) -> None:
        self._renew_at = min(self._renew_at, self._clocks.monotonic() + self._clocks.renew_seconds)

    # -- buckets -------------------------------------------------------------------------------------------------

    def _bucket(self, name: str) -> FileBucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = FileBucket(name, self.root, own=self._own, clocks=self._clocks)
        return bucket

    def _place(self, key: str) -> tuple[FileBucket, str]:
        bucket, inside = split_key(key)
        return self._bucket(bucket), encode_name(inside)


def _check_owner(root: Path) -> None:
    """Refuse a root in which another user decides what stands. Raises PermissionError.

    In a shared temporary directory another user may make the root first, and a worker would serve from their records.
    """
    users = (0, os.geteuid())
    for found in (root.lstat(), root.stat()):  # a link is followed, so its owner counts, too
        if found.st_uid not in users:
            raise PermissionError(errno.EPERM, f"it belongs to another user (uid {found.st_uid})")
    if found.st_mode & stat.S_IWOTH and found.st_uid == os.geteuid() != 0:
        raise PermissionError(errno.EPERM, f"every user may write to it; chmod 700 {root}")


POLL_SECONDS: Final = 0.1  # how late a change is seen; 0.15 % of a core, nearly all of it the waking up

T = TypeVar("T")


class FileDiscovery:
    """`base.Discovery` over a directory tree that the native system's `file` backend can share."""

    def __init__(
        self,
        root: Path | str,
        *,
        ttl_seconds: float = LEASE_TTL_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        lease_id: int | None = None,
    ) -> None:
        self._store = FileStore(Path(root), ttl_seconds=ttl_seconds)
        self._poll_seconds = poll_seconds
        self._lease_id = lease_id if lease_id is not None else new_lease_id()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._feeds: dict[ChangeFeed, str] = {}  # -> its prefix; owned by the thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def lease_id(self) -> int:
        return self._lease_id

    def trouble(self) -> str | None:
        return self._store.trouble()

    async def start(self) -> None:
        if self._closed:
            raise RuntimeError("this discovery store is closed")
        if self._thread is None:
            self._store.open()
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="discovery-file", daemon=True)
            self._thread.start()

    async def put(self, key: str, value: bytes) -> None:
        await self._call(lambda: self._store.put(key, value))

    async def put_new(self, key: str, value: bytes) -> bool:
        return await self._call(lambda: self._store.put_new(key, value))

    async def delete(self, key: str) -> None:
        await self._call(lambda: self._store.delete(key))

    async def lose_lease(self) -> None:
        """Drop this process's records as if it were dead, for fault injection. The process then puts them again."""
        await self._call(self._store.lose)

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        def read() -> dict[str, bytes]:
            found, changes = self._store.read(prefix)
            self._tell(changes)
            return found

        return await self._call(read)

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[list[Change]]]:
        feed = ChangeFeed()

        def subscribe() -> None:
            found, changes = self._store.read(prefix)
            self._tell(changes)  # before the newcomer is listed: its snapshot holds them already
            self._on_loop(lambda: feed.open(found))
            self._feeds[feed] = prefix

        try:
            await self._call(subscribe)
            yield feed
        finally:
            self._jobs.put(lambda: self._unsubscribe(feed))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopped = asyncio.get_running_loop().create_future()
        self._jobs.put(None)
        await self._stopped  # a few milliseconds, or a second when another process holds the directory's lock
        thread.join()  # it has nothing left to do

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with counted("file discovery store") as failed:
            while True:
                try:
                    job = self._jobs.get(timeout=self._poll_seconds)
                except queue.Empty:
                    pass
                else:
                    if job is None:
                        break
                    job()
                try:
                    self._tell(self._store.poll())
                except Exception as error:  # a defect in here must not end the thread that keeps the lease
                    failed(error, self._poll_seconds)
                    logger.exception("file discovery store: poll failed")
        self._store.close()
        for feed in self._feeds:
            self._on_loop(feed.close)
        self._feeds.clear()
        self._on_loop(self._mark_stopped)

    def _mark_stopped(self) -> None:
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    def _tell(self, changes: list[Change]) -> None:
        if not changes:
            return
        for feed, prefix in self._feeds.items():
            if wanted := [change for change in changes if matches(prefix, change.key)]:
                self._on_loop(partial(feed.post, wanted))

    def _unsubscribe(self, feed: ChangeFeed) -> None:
        self._feeds.pop(feed, None)

    def _on_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop was closed without closing this store: no watcher is left
            self._loop.call_soon_threadsafe(callback)

    async def _call(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread and return its result."""
        if self._thread is None:
            raise RuntimeError("this discovery store is closed" if self._closed else "call start() first")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle(keep: Callable[[Any], None], value: object) -> None:
            if not done.done():
                keep(value)

        def job() -> None:
            try:
                result = work()
            except Exception as error:
                self._on_loop(partial(settle, done.set_exception, error))
            else:
                self._on_loop(partial(settle, done.set_result, result))

        self._jobs.put(job)
        return await done
