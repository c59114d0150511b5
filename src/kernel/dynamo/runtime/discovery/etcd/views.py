"""The buckets of etcd that this process follows, and what their watchers received of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynamo.errors import CannotConnect
from dynamo.runtime.base.forever import counted
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.discovery.base import Change, Delete, Put, matches
from dynamo.runtime.discovery.etcd.client import Compacted, EtcdClient, EtcdError, WatchEvent
from dynamo.runtime.discovery.etcd.health import EtcdHealth
from dynamo.runtime.discovery.keys import split_bucket
from dynamo.runtime.discovery.last_view import LastView, SettlingView
from dynamo.runtime.discovery.retry import Delays

logger = logging.getLogger(__name__)

Tell = Callable[[str, list[Change]], None]


class EtcdViews:
    """`tell(bucket, changes)` is called for whatever changed in a followed bucket."""

    def __init__(self, client: EtcdClient, health: EtcdHealth, *, tell: Tell) -> None:
        self._client = client
        self._health = health
        self._tell = tell
        self._followed: dict[str, _FollowedBucket] = {}
        self._work = Background()

    async def view(self, prefix: str) -> dict[str, bytes]:
        """Return the present keys; waits until etcd was read once. From its return on `tell` is called for the
        bucket's changes.
        """
        name = split_bucket(prefix)[0]
        bucket = self._followed.get(name)
        if bucket is None:
            bucket = self._followed[name] = _FollowedBucket(name, self._client, self._health, tell=self._tell)
            self._work.start(bucket.follow(), f"etcd: follow {name}")
        elif bucket.is_known.is_set():
            await bucket.refresh(prefix)
        await bucket.is_known.wait()
        return bucket.view.read(prefix)

    async def get(self, prefix: str) -> dict[str, bytes]:
        """Return the store's keys, or the last known ones while the store does not answer. Raises `CannotConnect`
        without either.
        """
        name = split_bucket(prefix)[0]
        bucket = self._followed.get(name)
        if bucket is not None and bucket.is_known.is_set():
            await bucket.refresh(prefix)
            return bucket.view.read(prefix)
        view = LastView()
        found, _ = await self._client.range(f"{name}/")
        self._health.on_answer()
        view.resync(found, asyncio.get_running_loop().time())
        return view.read(prefix)

    async def close(self) -> None:
        """Stop following."""
        await self._work.close()
        for bucket in self._followed.values():
            await bucket.close()


class _FollowedBucket:
    """One bucket that is followed: read as a whole, then watched, for good."""

    def __init__(self, name: str, client: EtcdClient, health: EtcdHealth, *, tell: Tell) -> None:
        self.view = SettlingView(self._settle)
        self.is_known = asyncio.Event()  # the store was read at least once
        self._name = name
        self._client = client
        self._health = health
        self._tell = tell
        self._revision = 0  # everything up to here is in the view
        self._reading = asyncio.Lock()
        self._work = Background()

    async def refresh(self, prefix: str) -> None:
        """Update the view, ahead of its watch, unless what is under `prefix` is known; leave it unchanged while etcd does not
        answer. A thousand watches on a record each would otherwise read a thousand records each.
        """
        try:
            found, _ = await self._client.range(prefix)
            self._health.on_answer()
            if {key: value for key, value in found.items() if matches(prefix, key)} != self.view.read(prefix):
                await self._read(is_start=False)
        except (CannotConnect, EtcdError) as error:
            logger.debug("%s is answered from the last view: %s", self._name, error)

    async def follow(self) -> None:
        """Read the bucket, then watch it; begin again after a loss."""
        delays = Delays()
        with counted(f"etcd: follow {self._name}") as failed:
            while True:
                try:
                    revision = await self._read(is_start=True)
                    async with self._client.watch(f"{self._name}/", revision=revision + 1) as batches:
                        delays = Delays()
                        async for events in batches:
                            if any(event.value is None for event in events):
                                await self._health.check_space()
                            self._take(events)
                except Compacted:
                    logger.info("etcd has forgotten changes of %s; reading it again", self._name)
                    continue
                except CannotConnect as error:
                    self._health.on_lost(error)
                    # It may come back empty, and so fast that nothing else shows it.
                    self._health.doubt()
                except EtcdError as error:
                    failed(error, 0.0)
                    logger.warning("etcd rejected the watch on %s: %s", self._name, error)
                except Exception as error:  # the boundary: a process must not go blind for ever
                    failed(error, 0.0)
                    logger.exception("following %s in etcd failed; trying again", self._name)
                await asyncio.sleep(next(delays))

    async def _read(self, *, is_start: bool) -> int:
        """Read the bucket; the revision it has then. `is_start`: no watch runs, and what is read is the truth."""
        async with self._reading:
            found, revision = await self._client.range(f"{self._name}/")
            self._health.on_answer()
            if any(key not in found for key in self.view.read(f"{self._name}/")):
                await self._health.check_space()
            # A watch that runs may have been faster than this answer. A store that was wiped counts anew, so at the
            # start a lower number is as good as a higher one.
            if is_start or revision >= self._revision:
                self._revision = revision
                self.view.doubt(self._health.doubt_until)
                self._publish(self.view.resync(found, _now()))
                self.is_known.set()
            return revision

    def _take(self, events: list[WatchEvent]) -> None:
        self._health.doubt_after_silence()  # a frozen store thaws, and these may be leases that ran out meanwhile
        changes: list[Change] = [
            Delete(event.key) if event.value is None else Put(event.key, event.value)
            for event in events
            if event.revision > self._revision  # else a reading was ahead of the watch
        ]
        self._revision = max(self._revision, events[-1].revision)
        self.view.doubt(self._health.doubt_until)
        self._publish(self.view.apply(changes, _now()))

    def _publish(self, changes: list[Change]) -> None:
        if changes:
            self._tell(self._name, changes)
        self.view.arm()

    def _settle(self) -> None:
        self._work.start(self._settle_when_sure(), f"etcd: settle {self._name}")

    async def _settle_when_sure(self) -> None:
        await self._health.check_space()
        self.view.doubt(self._health.doubt_until)
        self._publish(self.view.settle(_now()))

    async def close(self) -> None:
        self.view.stop()
        await self._work.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
