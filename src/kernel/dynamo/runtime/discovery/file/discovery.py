"""Discovery on one machine: a directory that all processes share, and one thread for each store.

The thread renews this process's records whatever the event loop is doing (an engine that blocks the loop must not lose
its lease), and polls the directories in use: the standard library has no inotify, and one `stat` every 100 ms costs next
to nothing.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from dynamo.runtime.discovery.base import LEASE_TTL_SECONDS, Change, matches
from dynamo.runtime.discovery.feed import ChangeFeed
from dynamo.runtime.discovery.file.store import FileStore
from dynamo.runtime.discovery.keys import new_lease_id

logger = logging.getLogger(__name__)

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
            except Exception:  # a defect in here must not end the thread that keeps the lease
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

        def settle(result: T | None, error: Exception | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def job() -> None:
            try:
                result = work()
            except Exception as error:
                failure = error
                self._on_loop(lambda: settle(None, failure))
            else:
                self._on_loop(lambda: settle(result, None))

        self._jobs.put(job)
        return await done
