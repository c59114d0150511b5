"""One process's lease, records and views in etcd. Owned by the event loop of a thread that `etcd.py` gives it.

What this process wants to be in the store is `_own`; three loops work towards it and never give up: one keeps the lease
alive, one puts right what the store lacks, one for each bucket follows its changes. A lease that was lost is taken again
under its old id, so the instances of this process keep their names.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from dynamo.errors import CannotConnect
from dynamo.runtime.discovery.base import INSTANCES, Change, Delete, Put
from dynamo.runtime.discovery.etcd_client import NOT_FOUND, Compacted, EtcdClient, EtcdError, WatchEvent
from dynamo.runtime.discovery.keys import split_bucket, split_key
from dynamo.runtime.discovery.last_view import LastView
from dynamo.runtime.discovery.retry import Delays
from dynamo.runtime.settings import EtcdSettings
from dynamo.runtime.tasks import Background

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 2.0  # for giving the lease back; it runs out by itself
RENEWALS_PER_TTL: Final = 3.0  # two may be lost before the lease runs out
ATTEMPTS_PER_TTL: Final = 6.0

Tell = Callable[[str, list[Change]], None]
T = TypeVar("T")


class _Bucket:
    """One bucket that is followed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefix = f"{name}/"
        self.view = LastView()
        self.revision = 0  # everything up to here is in the view
        self.is_known = asyncio.Event()  # the store was read at least once
        self.reading = asyncio.Lock()
        self.settling: asyncio.TimerHandle | None = None


class EtcdStore:
    """Times are those of the running loop. `tell(bucket, changes)` is called for whatever changed in a followed bucket."""

    def __init__(self, settings: EtcdSettings, *, lease_id: int, tell: Tell) -> None:
        """Raises InvalidArgument naming a variable that is wrong."""
        ttl = settings.lease_ttl_seconds
        self._settings = settings
        self._client = EtcdClient(
            settings, attempt_seconds=settings.keepalive_timeout_seconds or ttl / ATTEMPTS_PER_TTL
        )
        self._lease_id = lease_id
        self._tell = tell
        self._ttl = ttl
        self._own: dict[str, bytes] = {}
        self._unsure: set[str] = set()  # of `_own`: perhaps not in the store as they are here
        self._unwanted: set[str] = set()  # deleted here, perhaps not in the store
        self._writing = asyncio.Lock()
        self._repair_wanted = asyncio.Event()
        self._repaired_revision = -1
        self._buckets: dict[str, _Bucket] = {}
        self._work = Background()
        self._heard_at = 0.0  # the last time etcd answered
        self._doubt_until = -math.inf
        self._is_lost = False
        self._is_full = False
        self._has_lease = False
        self._closed = False

    @property
    def where(self) -> str:
        return ",".join(self._client.endpoints)

    # -- life ----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the lease. Raises `CannotConnect` naming the endpoints and the flag."""
        self._client.open()
        self._ttl = await self._first_lease()
        self._has_lease = True
        self._heard_at = self._now()
        self._work.start(self._keep_alive(), "etcd: lease")
        self._work.start(self._repair(), "etcd: repair")

    async def _first_lease(self) -> float:
        deadline = self._now() + self._settings.startup_timeout_seconds
        why = "no answer in time"
        for delay in Delays():
            try:
                async with asyncio.timeout_at(deadline):
                    await self._client.check_access(f"{INSTANCES}/")  # a lease is granted to anybody
                    return await self._client.grant(self._lease_id, self._ttl)
            except CannotConnect as error:
                why = str(error)
            except EtcdError as error:
                raise self._missing(str(error)) from error
            except TimeoutError:
                pass
            if self._now() + delay >= deadline:
                break
            await asyncio.sleep(delay)
        raise self._missing(why)

    def _missing(self, why: str) -> CannotConnect:
        return CannotConnect(
            f"cannot use etcd at {self.where} (ETCD_ENDPOINTS): {why}. Start it, correct ETCD_ENDPOINTS, or choose another "
            "store with --discovery-backend (file needs no service)"
        )

    async def close(self) -> None:
        """Give the lease back, and the records with it, as far as etcd answers."""
        self._closed = True
        for bucket in self._buckets.values():
            if bucket.settling is not None:
                bucket.settling.cancel()
        await self._work.close()
        try:
            if self._has_lease:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._client.revoke(self._lease_id)
        except (TimeoutError, CannotConnect, EtcdError) as error:
            if self._own:
                logger.warning(
                    "etcd could not be told that this process leaves (%s); its records run out within %g s",
                    str(error) or "no answer in time",
                    self._ttl,
                )
        await self._client.close()

    # -- records -------------------------------------------------------------------------------------------------

    async def put(self, key: str, value: bytes) -> None:
        """Write a key. While etcd does not answer, only record the wish. Raises `EtcdError` when etcd rejects the
        write.
        """
        split_key(key)
        async with self._writing:
            before = self._own.get(key)
            self._own[key] = value
            self._unwanted.discard(key)
            try:
                await self._write(key)
            except (CannotConnect, EtcdError) as error:
                if isinstance(error, CannotConnect) or error.is_out_of_space:
                    logger.warning("%s is put into etcd when etcd takes it: %s", key, error)
                    self._unsure.add(key)
                    self._repair_wanted.set()
                    return
                if before is None:
                    del self._own[key]
                else:
                    self._own[key] = before
                raise

    async def put_new(self, key: str, value: bytes) -> bool:
        """Raises `CannotConnect` while etcd does not answer: only etcd knows which process was first."""
        split_key(key)
        async with self._writing:
            if key in self._own:
                return False
            try:
                found = await self._with_lease(lambda: self._client.put_new(key, value, self._lease_id))
            except CannotConnect:
                self._unwanted.add(key)  # it may have been written all the same
                self._repair_wanted.set()
                raise
            self._hear()
            # An attempt that seemed to fail may have written it: then it is there, and it is ours.
            if found is not None and found != (value, self._lease_id):
                return False
            self._own[key] = value
            self._unwanted.discard(key)
            return True

    async def delete(self, key: str) -> None:
        """Delete a key. While etcd does not answer, only record the wish."""
        split_key(key)
        async with self._writing:
            self._own.pop(key, None)
            self._unsure.discard(key)
            try:
                await self._client.delete(key)
            except CannotConnect as error:
                logger.warning("%s is removed from etcd when that answers again: %s", key, error)
                self._unwanted.add(key)
                self._repair_wanted.set()
            else:
                self._hear()

    async def lose(self) -> None:
        """Let etcd drop the lease; the keep-alive finds out as after any other loss. Raises `CannotConnect`."""
        await self._client.revoke(self._lease_id)

    async def get(self, prefix: str) -> dict[str, bytes]:
        """Return the store's keys, or the last known ones while the store does not answer. Raises `CannotConnect`
        without either.
        """
        bucket = split_bucket(prefix)[0]
        followed = self._buckets.get(bucket)
        if followed is not None and followed.is_known.is_set():
            await self._refresh(followed)
            return followed.view.read(prefix)
        view = LastView()
        found, _ = await self._client.range(f"{bucket}/")
        self._hear()
        view.resync(found, self._now())
        return view.read(prefix)

    async def _write(self, key: str) -> None:
        await self._with_lease(lambda: self._client.put(key, self._own[key], self._lease_id))
        self._unsure.discard(key)
        self._hear()

    async def _with_lease(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Send a request that needs the lease; if the lease is gone, take it again first."""
        try:
            return await request()
        except EtcdError as error:
            if error.code != NOT_FOUND:
                raise
        await self._take_again()
        return await request()

    # -- the lease -----------------------------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        delays = Delays()
        while True:
            interval = self._ttl / RENEWALS_PER_TTL
            delay = min(self._settings.keepalive_interval_seconds or interval, interval)
            try:
                lease = await self._client.keep_alive(self._lease_id)
                self._hear()
                delays = Delays()
                if lease.ttl_seconds == 0:
                    await self._take_again()
                elif lease.revision != self._repaired_revision:
                    self._repaired_revision = lease.revision
                    self._repair_wanted.set()  # something changed: perhaps a record of ours was taken away
            except CannotConnect as error:
                self._on_store_lost(error)
                delay = next(delays)
            except EtcdError as error:
                level = logging.DEBUG if self._is_full else logging.WARNING
                logger.log(level, "etcd declines to renew the lease %x: %s; trying again", self._lease_id, error)
                await self._check_space()
                delay = next(delays)
            except Exception:  # the boundary: a defect in here must not end what keeps the lease
                logger.exception("renewing the lease %x failed", self._lease_id)
            await asyncio.sleep(delay)

    async def _take_again(self) -> None:
        level = logging.DEBUG if self._is_full else logging.WARNING
        logger.log(level, "etcd no longer knows the lease %x; taking it again", self._lease_id)
        self._ttl = await self._client.grant(self._lease_id, self._settings.lease_ttl_seconds)
        self._unsure.update(self._own)
        self._repair_wanted.set()

    async def _repair(self) -> None:
        """Put what the store lacks and remove what it should not have, whenever there may be any."""
        delays = Delays()
        while True:
            await self._repair_wanted.wait()
            self._repair_wanted.clear()
            try:
                async with self._writing:
                    await self._repair_now()
                delays = Delays()
                continue
            except CannotConnect:
                self._repair_wanted.set()  # the lease's loop says so
            except EtcdError as error:
                level = logging.DEBUG if self._is_full else logging.WARNING
                logger.log(level, "etcd declines the records of this process: %s; trying again", error)
                if self._unsure or self._unwanted:
                    self._repair_wanted.set()
            except Exception:  # the boundary, as above
                logger.exception("putting the records right in etcd failed")
            await asyncio.sleep(next(delays))

    async def _repair_now(self) -> None:
        if not self._own and not self._unwanted:
            return
        attached = await self._client.leased_keys(self._lease_id)
        self._hear()
        for key in list(self._unwanted):
            if key.encode() in attached:
                await self._client.delete(key)
            self._unwanted.discard(key)
        taken = [key for key in self._own if key.encode() not in attached]
        for key in dict.fromkeys([*taken, *self._unsure]):
            logger.info("putting %s into etcd again", key)
            await self._write(key)

    # -- the store, lost and back -----------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Etcd answered."""
        now = self._now()
        if now - self._heard_at > self._ttl / 2:
            self._doubt(now)  # long enough for the leases of others to have run out
        self._heard_at = now
        if self._is_lost:
            self._is_lost = False
            logger.info("etcd at %s is back", self.where)

    def trouble(self) -> str | None:
        """Return why the view may be out of date; see `base.Discovery`."""
        if self._is_lost:
            return f"etcd at {self.where} does not answer"
        return f"etcd at {self.where} is out of space" if self._is_full else None

    def _on_store_lost(self, error: CannotConnect) -> None:
        if not self._is_lost:
            self._is_lost = True
            logger.warning("%s; going on with what was last known", error)

    async def _check_space(self) -> None:
        """Doubt what is missing while etcd is out of space: a lease that runs out then cannot be taken again."""
        try:
            is_full = await self._client.is_out_of_space()
        except (CannotConnect, EtcdError) as error:
            logger.debug("etcd does not give its status: %s", error)
            return
        if is_full or self._is_full:
            self._doubt(self._now())  # after the end of the alarm, too: the owners need a while to come back
        if is_full and not self._is_full:
            logger.warning(
                "etcd at %s is out of space (NOSPACE) and declines writes; records that vanish are kept. Compact and "
                "defragment it, then disarm the alarm (etcdctl alarm disarm)",
                self.where,
            )
        elif self._is_full and not is_full:
            logger.info("etcd at %s takes writes again", self.where)
        self._is_full = is_full

    def _doubt(self, now: float) -> None:
        self._doubt_until = now + self._ttl
        for bucket in self._buckets.values():
            bucket.view.doubt(self._doubt_until)

    # -- following -----------------------------------------------------------------------------------------------

    async def view(self, prefix: str) -> dict[str, bytes]:
        """Return the present keys; waits until etcd was read once. From its return on `tell` is called for the
        bucket's changes.
        """
        name = split_bucket(prefix)[0]
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = _Bucket(name)
            bucket.view.doubt(self._doubt_until)
            self._work.start(self._follow(bucket), f"etcd: follow {name}")
        elif bucket.is_known.is_set():
            await self._refresh(bucket)
        await bucket.is_known.wait()
        return bucket.view.read(prefix)

    async def _refresh(self, bucket: _Bucket) -> None:
        """Update the view, ahead of its watch; leave it unchanged while etcd does not answer."""
        try:
            await self._read(bucket, is_start=False)
        except (CannotConnect, EtcdError) as error:
            logger.debug("%s is answered from the last view: %s", bucket.name, error)

    async def _read(self, bucket: _Bucket, *, is_start: bool) -> int:
        """Read the bucket; the revision it has then. `is_start`: no watch runs, and what is read is the truth."""
        async with bucket.reading:
            found, revision = await self._client.range(bucket.prefix)
            self._hear()
            if any(key not in found for key in bucket.view.read(bucket.prefix)):
                await self._check_space()
            # A watch that runs may have been faster than this answer. A store that was wiped counts anew, so at the
            # start a lower number is as good as a higher one.
            if is_start or revision >= bucket.revision:
                bucket.revision = revision
                self._publish(bucket, bucket.view.resync(found, self._now()))
                bucket.is_known.set()
            return revision

    async def _follow(self, bucket: _Bucket) -> None:
        delays = Delays()
        while True:
            try:
                revision = await self._read(bucket, is_start=True)
                async with self._client.watch(bucket.prefix, revision + 1) as batches:
                    delays = Delays()
                    async for events in batches:
                        if any(event.value is None for event in events):
                            await self._check_space()
                        self._take(bucket, events)
            except Compacted:
                logger.info("etcd has forgotten changes of %s; reading it again", bucket.name)
                continue
            except CannotConnect as error:
                self._on_store_lost(error)
                # It may come back empty, and so fast that nothing else shows it.
                self._doubt(self._now())
            except EtcdError as error:
                logger.warning("etcd declines to tell what changes in %s: %s", bucket.name, error)
            except Exception:  # the boundary, as above: a process must not go blind for ever
                logger.exception("following %s in etcd failed; trying again", bucket.name)
            await asyncio.sleep(next(delays))

    def _take(self, bucket: _Bucket, events: list[WatchEvent]) -> None:
        now = self._now()
        if now - self._heard_at > self._ttl / 2:
            self._doubt(now)  # a frozen store thaws, and these may be the leases that ran out meanwhile
        changes: list[Change] = [
            Delete(event.key) if event.value is None else Put(event.key, event.value)
            for event in events
            if event.revision > bucket.revision  # else a reading was ahead of the watch
        ]
        bucket.revision = max(bucket.revision, events[-1].revision)
        self._publish(bucket, bucket.view.apply(changes, now))

    def _publish(self, bucket: _Bucket, changes: list[Change]) -> None:
        if changes:
            self._tell(bucket.name, changes)
        if bucket.settling is not None:
            bucket.settling.cancel()
            bucket.settling = None
        if (at := bucket.view.settles_at) is not None and not self._closed:
            bucket.settling = asyncio.get_running_loop().call_at(at, self._settle, bucket)

    def _settle(self, bucket: _Bucket) -> None:
        bucket.settling = None
        self._work.start(self._settle_when_sure(bucket), f"etcd: settle {bucket.name}")

    async def _settle_when_sure(self, bucket: _Bucket) -> None:
        await self._check_space()
        self._publish(bucket, bucket.view.settle(self._now()))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
