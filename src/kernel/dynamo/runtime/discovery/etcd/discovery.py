"""Discovery on etcd: a lease, a watch, and one thread for each store.

The thread renews the lease whatever the event loop of the process is doing: an engine that blocks it for longer than the
lease lives must not lose its place. All of etcd happens there (`store.py`); only changes cross over.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeVar

from dynamo.errors import CannotConnect
from dynamo.runtime.base.settings import EtcdSettings
from dynamo.runtime.base.tasks import Background, is_being_cancelled
from dynamo.runtime.discovery.base import Change, matches
from dynamo.runtime.discovery.etcd.client import EtcdClient, EtcdError
from dynamo.runtime.discovery.etcd.health import EtcdHealth
from dynamo.runtime.discovery.etcd.lease import EtcdLease
from dynamo.runtime.discovery.etcd.records import OwnRecords
from dynamo.runtime.discovery.etcd.views import EtcdViews, Tell
from dynamo.runtime.discovery.feed import ChangeFeed
from dynamo.runtime.discovery.keys import new_lease_id, split_bucket, split_key

logger = logging.getLogger(__name__)

# One process's lease, records and views in etcd. Owned by the event loop of a thread that `etcd.py` gives it.
#
# Three loops work towards the records of this process, and never give up: one keeps the lease alive (`lease.py`), one
# puts right what the store lacks (`records.py`), one for each bucket follows its changes (`views.py`).


CLOSE_SECONDS: Final = 2.0  # for giving the lease back; it runs out by itself
ATTEMPTS_PER_TTL: Final = 6.0


class EtcdStore:
    """Times are those of the running loop. `tell(bucket, changes)` is called for whatever changed in a followed bucket."""

    def __init__(self, settings: EtcdSettings, *, lease_id: int, tell: Tell) -> None:
        """Raises InvalidArgument naming a variable that is wrong."""
        ttl = settings.lease_ttl_seconds
        self._client = EtcdClient(
            settings, attempt_seconds=settings.keepalive_timeout_seconds or ttl / ATTEMPTS_PER_TTL
        )
        self._health = EtcdHealth(self._client, lease_ttl_seconds=ttl)
        self._lease = EtcdLease(
            lease_id,
            settings,
            self._client,
            self._health,
            on_retaken=lambda: self.records.on_lease_retaken(),  # lease and records need each other
            on_revision=lambda revision: self.records.on_revision(revision),
        )
        self.records = OwnRecords(self._client, self._lease, self._health)
        self.views = EtcdViews(self._client, self._health, tell=tell)
        self._work = Background()

    def trouble(self) -> str | None:
        """Return why the views may be out of date; see `base.Discovery`."""
        return self._health.trouble()

    async def open(self) -> None:
        """Take the lease. Raises `CannotConnect` naming the endpoints and the flag."""
        self._client.open()
        await self._lease.take()
        self._work.start(self._lease.keep(), "etcd: lease")
        self._work.start(self.records.keep_repaired(), "etcd: repair")
        self._work.keep(self.records.keep_watched, "etcd: own records")

    async def close(self) -> None:
        """Give the lease back, and the records with it, as far as etcd answers."""
        await self.views.close()
        await self._work.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._lease.give_back()
        except (TimeoutError, CannotConnect, EtcdError) as error:
            if len(self.records):
                logger.warning(
                    "deleting the records of this process in etcd failed (%s); its records run out within %g s",
                    str(error) or "no answer in time",
                    self._health.lease_ttl_seconds,
                )
        await self._client.close()

    async def swap(self, key: str, expected: bytes | None, value: bytes) -> bool:
        """Write a record that is under no lease; see `base.SharedRecords`."""
        swapped = await self._client.swap(key, expected, value)
        self._health.on_answer()
        return swapped

    async def lose_lease(self) -> None:
        """Let etcd drop the lease; the keep-alive finds out as after any other loss. Raises `CannotConnect`."""
        await self._lease.give_back()


T = TypeVar("T")


class _StoreThread:
    """The thread of one store, with an event loop of its own, and the loop of the process that started it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # of the process
        self._home: asyncio.AbstractEventLoop | None = None  # of the thread
        self._thread: threading.Thread | None = None

    @property
    def home(self) -> asyncio.AbstractEventLoop | None:
        """The loop of the thread; None: the thread does not run."""
        return None if self._thread is None else self._home

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._home = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(self._home,), name="discovery-etcd", daemon=True)
        self._thread.start()

    @staticmethod
    def _run(home: asyncio.AbstractEventLoop) -> None:
        try:
            home.run_forever()
            home.run_until_complete(home.shutdown_asyncgens())
        finally:
            home.close()  # without waiting for a name that is still being looked up

    async def end(self, leave: Callable[[], Coroutine[None, None, None]]) -> None:
        """End the thread after `leave`, which stops its loop; idempotent."""
        thread, self._thread = self._thread, None
        if thread is None or self._home is None:
            return
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(leave(), self._home))
        thread.join()  # it has nothing left to do

    def on_loop(self, callback: Callable[[], None]) -> None:
        """Call from the thread: run `callback` on the loop of the process."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop was closed without closing this store: no watcher is left
            self._loop.call_soon_threadsafe(callback)

    def in_thread(self, callback: Callable[[], None]) -> None:
        """Call from the process: run `callback` in the thread, where it runs."""
        if (home := self.home) is not None:
            with suppress(RuntimeError):  # it ends just now
                home.call_soon_threadsafe(callback)


class EtcdDiscovery:
    """`base.Discovery` on an etcd that the native system's `etcd` backend can share.

    While etcd does not answer, `put` and `delete` note the intended records, watches stay open, and `get_prefix` answers with the
    last view of a watched bucket; `put_new`, and `get_prefix` of any other, raise `CannotConnect`.
    """

    def __init__(self, settings: EtcdSettings, *, lease_id: int | None = None) -> None:
        """Raises InvalidArgument naming a variable that is wrong. Nothing is connected before `start`."""
        # Chosen here and not by etcd, so that it is known from the beginning and can be taken again: etcd's ids are i64.
        self._lease_id = lease_id if lease_id is not None else new_lease_id()
        self._settings = settings
        self._store = EtcdStore(settings, lease_id=self._lease_id, tell=self._tell)
        self._feeds: dict[ChangeFeed, str] = {}  # -> its prefix; owned by the thread, as is the next one
        self._opening: dict[ChangeFeed, asyncio.Task[None]] = {}
        self._work = Background()  # in the thread
        self._thread = _StoreThread()
        self._closed = False

    @property
    def lease_id(self) -> int:
        return self._lease_id

    def trouble(self) -> str | None:
        return self._store.trouble()

    async def start(self) -> None:
        if self._closed:
            raise RuntimeError("this discovery store is closed")
        if self._thread.home is not None:
            return
        self._thread.start()
        try:
            await self._call(self._store.open())
        except BaseException:
            await self._thread.end(self._leave)
            self._store = EtcdStore(self._settings, lease_id=self._lease_id, tell=self._tell)  # for another try
            self._work = Background()
            raise

    async def put(self, key: str, value: bytes) -> None:
        await self._call(self._store.records.put(key, value))

    async def put_new(self, key: str, value: bytes) -> bool:
        return await self._call(self._store.records.put_new(key, value))

    async def delete(self, key: str) -> None:
        await self._call(self._store.records.delete(key))

    async def swap(self, key: str, expected: bytes | None, value: bytes) -> bool:
        """Replace a shared record; see `base.SharedRecords`. Raises `CannotConnect`, and `EtcdError` where etcd declines the write."""
        split_key(key)
        return await self._call(self._store.swap(key, expected, value))

    async def lose_lease(self) -> None:
        """Drop the lease and this process's records in etcd, for fault injection. The process then takes the lease
        again.
        """
        await self._call(self._store.lose_lease())

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        return await self._call(self._store.views.get(prefix))

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[list[Change]]]:
        split_bucket(prefix)
        feed = ChangeFeed()
        try:
            await self._call(self._subscribe(feed, prefix))
            yield feed
        finally:
            self._thread.in_thread(partial(self._unsubscribe, feed))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._thread.end(self._leave)

    # -- in the thread -------------------------------------------------------------------------------------------

    async def _leave(self) -> None:
        home = asyncio.get_running_loop()
        try:
            await self._store.close()
            for feed in self._feeds:
                self._thread.on_loop(feed.close)
            for feed in self._opening:
                self._thread.on_loop(feed.close)
            self._feeds.clear()
            await self._work.close()
            waiting = asyncio.all_tasks() - {asyncio.current_task()}
            for task in waiting:
                task.cancel()
            if waiting:
                await asyncio.wait(waiting)
        finally:
            home.call_soon(home.stop)

    async def _subscribe(self, feed: ChangeFeed, prefix: str) -> None:
        # Beside the caller: while etcd is away the snapshot takes its time, and the watch is open all the same.
        self._opening[feed] = self._work.start(self._open(feed, prefix), f"etcd: {prefix}")

    async def _open(self, feed: ChangeFeed, prefix: str) -> None:
        try:
            found = await self._store.views.view(prefix)
            self._thread.on_loop(partial(feed.open, found))
            self._feeds[feed] = prefix
        finally:
            self._opening.pop(feed, None)

    def _unsubscribe(self, feed: ChangeFeed) -> None:
        self._feeds.pop(feed, None)
        if (opening := self._opening.pop(feed, None)) is not None:
            opening.cancel()

    def _tell(self, bucket: str, changes: list[Change]) -> None:
        for feed, prefix in self._feeds.items():
            if wanted := [change for change in changes if matches(prefix, change.key)]:
                self._thread.on_loop(partial(feed.post, wanted))

    async def _call(self, work: Coroutine[None, None, T]) -> T:
        """Run `work` in the thread and return its result."""
        home = self._thread.home
        if home is None:
            work.close()
            raise RuntimeError("this discovery store is closed" if self._closed else "call start() first")
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, home))
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            raise RuntimeError("this discovery store is closed") from None  # while the request ran
