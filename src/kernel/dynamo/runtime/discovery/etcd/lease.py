"""This process's lease in etcd: taken at the start, renewed, and taken again under its old id when it was lost.

The id stays, so the instances of this process keep their names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Final, TypeVar

from dynamo.errors import CannotConnect
from dynamo.runtime.base.forever import counted
from dynamo.runtime.base.settings import EtcdSettings
from dynamo.runtime.discovery.base import INSTANCES
from dynamo.runtime.discovery.etcd.client import NOT_FOUND, EtcdClient, EtcdError
from dynamo.runtime.discovery.etcd.health import EtcdHealth
from dynamo.runtime.discovery.retry import Delays

logger = logging.getLogger(__name__)

RENEWALS_PER_TTL: Final = 3.0  # two may be lost before the lease runs out

T = TypeVar("T")


class EtcdLease:
    """`on_retaken()` is called when the lease was taken again: the store has dropped the records under it.
    `on_revision(revision)` is called with the revision of the store at each renewal.
    """

    def __init__(
        self,
        lease_id: int,
        settings: EtcdSettings,
        client: EtcdClient,
        health: EtcdHealth,
        *,
        on_retaken: Callable[[], None],
        on_revision: Callable[[int], None],
    ) -> None:
        self.id = lease_id
        self._settings = settings
        self._client = client
        self._health = health
        self._on_retaken = on_retaken
        self._on_revision = on_revision
        self._is_held = False

    async def take(self) -> None:
        """Take the lease for the first time. Raises `CannotConnect` naming the endpoints and the flag."""
        self._health.lease_ttl_seconds = await self._first_grant()
        self._is_held = True
        self._health.on_answer()

    async def _first_grant(self) -> float:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.startup_timeout_seconds
        why = "no answer in time"
        for delay in Delays():
            try:
                async with asyncio.timeout_at(deadline):
                    await self._client.check_access(f"{INSTANCES}/")  # a lease needs no permission
                    return await self._client.grant(self.id, self._settings.lease_ttl_seconds)
            except CannotConnect as error:
                why = str(error)
            except EtcdError as error:
                raise self._missing(str(error)) from error
            except TimeoutError:
                pass
            if loop.time() + delay >= deadline:
                break
            await asyncio.sleep(delay)
        raise self._missing(why)

    def _missing(self, why: str) -> CannotConnect:
        return CannotConnect(
            f"cannot use etcd at {self._health.where} (ETCD_ENDPOINTS): {why}. Start it, correct ETCD_ENDPOINTS, or "
            "choose another store with --discovery-backend (file needs no service)"
        )

    async def keep(self) -> None:
        """Renew the lease for good."""
        delays = Delays()
        with counted("etcd: lease") as failed:
            while True:
                interval = self._health.lease_ttl_seconds / RENEWALS_PER_TTL
                delay = min(self._settings.keepalive_interval_seconds or interval, interval)
                try:
                    lease = await self._client.keep_alive(self.id)
                    self._health.on_answer()
                    delays = Delays()
                    if lease.ttl_seconds == 0:
                        await self._take_again()
                    else:
                        self._on_revision(lease.revision)
                except CannotConnect as error:
                    self._health.on_lost(error)
                    delay = next(delays)
                except EtcdError as error:
                    level = self._health.level_of_refusals
                    logger.log(level, "etcd declines to renew the lease %x: %s; trying again", self.id, error)
                    await self._health.check_space()
                    delay = next(delays)
                    if not self._health.is_full:  # which is shown by itself
                        failed(error, delay)
                except Exception as error:  # the boundary: a defect in here must not end what keeps the lease
                    failed(error, delay)
                    logger.exception("renewing the lease %x failed", self.id)
                await asyncio.sleep(delay)

    async def run_under(self, request: Callable[[], Coroutine[None, None, T]]) -> T:
        """Send a request that needs the lease; if the lease is gone, take it again first."""
        try:
            return await request()
        except EtcdError as error:
            if error.code != NOT_FOUND:
                raise
        await self._take_again()
        return await request()

    async def _take_again(self) -> None:
        logger.log(self._health.level_of_refusals, "etcd no longer knows the lease %x; taking it again", self.id)
        self._health.lease_ttl_seconds = await self._client.grant(self.id, self._settings.lease_ttl_seconds)
        self._on_retaken()

    async def give_back(self) -> None:
        """Let etcd drop the lease and its records, if it was ever taken. Raises `CannotConnect` and `EtcdError`."""
        if self._is_held:
            await self._client.revoke(self.id)
