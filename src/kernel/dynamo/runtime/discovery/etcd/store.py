"""One process's lease, records and views in etcd. Owned by the event loop of a thread that `etcd.py` gives it.

Three loops work towards what this process wants, and never give up: one keeps the lease alive (`lease.py`), one
puts right what the store lacks (`records.py`), one for each bucket follows its changes (`views.py`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from dynamo.errors import CannotConnect
from dynamo.runtime.base.settings import EtcdSettings
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.discovery.etcd.client import EtcdClient, EtcdError
from dynamo.runtime.discovery.etcd.health import EtcdHealth
from dynamo.runtime.discovery.etcd.lease import EtcdLease
from dynamo.runtime.discovery.etcd.records import OwnRecords
from dynamo.runtime.discovery.etcd.views import EtcdViews, Tell

logger = logging.getLogger(__name__)

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
                    "etcd could not be told that this process leaves (%s); its records run out within %g s",
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
