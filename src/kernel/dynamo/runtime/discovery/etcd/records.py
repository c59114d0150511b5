"""The records that this process intends to have in etcd, and the work towards it: writes, and the repair of what the store lacks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

from dynamo.errors import CannotConnect
from dynamo.runtime.base.forever import counted
from dynamo.runtime.base.tasks import first_of
from dynamo.runtime.discovery.etcd.client import EtcdClient, EtcdError, WatchEvent
from dynamo.runtime.discovery.etcd.health import EtcdHealth
from dynamo.runtime.discovery.etcd.lease import EtcdLease
from dynamo.runtime.discovery.keys import split_key
from dynamo.runtime.discovery.retry import Delays

logger = logging.getLogger(__name__)

MAX_WATCHED: Final = 64  # a process has an instance and a card; those of hundreds of adapters wait for the next renewal
LOOK_SECONDS: Final = 1.0  # how long a new record is not watched yet
AGAIN_SECONDS: Final = 5.0  # two owners of one record would otherwise overwrite each other without a pause


class OwnRecords:
    """The records of this process, each under its lease. A write that etcd did not answer is made up for later."""

    def __init__(self, client: EtcdClient, lease: EtcdLease, health: EtcdHealth) -> None:
        self._client = client
        self._lease = lease
        self._health = health
        self._own: dict[str, bytes] = {}
        self._unsure: set[str] = set()  # of `_own`: perhaps not in the store as they are here
        self._unwanted: set[str] = set()  # deleted here, perhaps not in the store
        self._writing = asyncio.Lock()
        self._repair_wanted = asyncio.Event()
        self._repaired_revision = -1

    def __len__(self) -> int:
        return len(self._own)

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
        """Write a key unless it exists. Raises `CannotConnect` while etcd does not answer: only etcd knows which
        process was first.
        """
        split_key(key)
        async with self._writing:
            if key in self._own:
                return False
            try:
                found = await self._lease.run_under(lambda: self._client.put_new(key, value, self._lease.id))
            except CannotConnect:
                self._unwanted.add(key)  # it may have been written all the same
                self._repair_wanted.set()
                raise
            self._health.on_answer()
            # An attempt that seemed to fail may have written it: then it is there, and it is ours.
            if found is not None and found != (value, self._lease.id):
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
                self._health.on_answer()

    async def _write(self, key: str) -> None:
        await self._lease.run_under(lambda: self._client.put(key, self._own[key], self._lease.id))
        self._unsure.discard(key)
        self._health.on_answer()

    # -- repair --------------------------------------------------------------------------------------------------

    def on_lease_retaken(self) -> None:
        """Put every record again: the store dropped them with the lease."""
        self._unsure.update(self._own)
        self._repair_wanted.set()

    def on_revision(self, revision: int) -> None:
        """Search for records that were taken away, when the store has changed since the last search."""
        if revision != self._repaired_revision:
            self._repaired_revision = revision
            self._repair_wanted.set()

    async def keep_watched(self) -> None:
        """Repair at once what another program overwrites. What it deletes, or was missed, is found at the next renewal."""
        while True:
            await self._until_other([])
            keys = sorted(self._own)[:MAX_WATCHED]
            with suppress(CannotConnect):  # which the loop of the lease logs
                async with self._client.watch(*keys) as batches:
                    await first_of(self._until_other(keys), self._follow(batches))
            await asyncio.sleep(LOOK_SECONDS)

    async def _until_other(self, keys: list[str]) -> None:
        while sorted(self._own)[:MAX_WATCHED] == keys:
            await asyncio.sleep(LOOK_SECONDS)

    async def _follow(self, batches: AsyncIterator[list[WatchEvent]]) -> None:
        async for events in batches:
            if any(each.value not in (None, self._own.get(each.key, each.value)) for each in events):
                self._repair_wanted.set()
                await asyncio.sleep(AGAIN_SECONDS)

    async def keep_repaired(self) -> None:
        """Put what the store lacks and remove what it should not have, whenever there may be any."""
        delays = Delays()
        with counted("etcd: repair") as failed:
            while True:
                await self._repair_wanted.wait()
                self._repair_wanted.clear()
                try:
                    async with self._writing:
                        await self._repair()
                    delays = Delays()
                    continue
                except CannotConnect:
                    self._repair_wanted.set()  # the lease's loop logs it
                except EtcdError as error:
                    level = self._health.level_of_refusals
                    logger.log(level, "etcd declines the records of this process: %s; trying again", error)
                    if not self._health.is_full:  # which is shown by itself
                        failed(error, 0.0)
                    if self._unsure or self._unwanted:
                        self._repair_wanted.set()
                except Exception as error:  # the boundary: a defect in here must not end what keeps the records
                    failed(error, 0.0)
                    self._repair_wanted.set()
                    logger.exception("putting the records right in etcd failed")
                await asyncio.sleep(next(delays))

    async def _repair(self) -> None:
        if not self._own and not self._unwanted:
            return
        attached = await self._client.leased_keys(self._lease.id)
        self._health.on_answer()
        for key in list(self._unwanted):
            if key.encode() in attached:
                await self._client.delete(key)
            self._unwanted.discard(key)
        taken = [key for key in self._own if key.encode() not in attached]
        for key in dict.fromkeys([*taken, *self._unsure]):
            logger.info("putting %s into etcd again", key)
            await self._write(key)
