"""The custom resource of this process: what it shall hold, writing it, and writing it again when it was removed."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

from dynamo.errors import CannotConnect
from dynamo.runtime.base.forever import counted
from dynamo.runtime.base.settings import KubernetesSettings
from dynamo.runtime.discovery.keys import split_key
from dynamo.runtime.discovery.kubernetes.api import KubernetesApi, KubernetesError, retry_after, version_of
from dynamo.runtime.discovery.kubernetes.collection import FollowedCollection
from dynamo.runtime.discovery.kubernetes.health import KubernetesHealth
from dynamo.runtime.discovery.kubernetes.records import KIND, ApiObject, check_record, records_of, resource
from dynamo.runtime.discovery.retry import Delays

logger = logging.getLogger(__name__)

CREATE_ATTEMPTS: Final = 20


class OwnResource:
    """The records of this process, all in one resource. A write that the server did not answer is made up for later."""

    def __init__(
        self,
        settings: KubernetesSettings,
        api: KubernetesApi,
        resources: FollowedCollection,
        health: KubernetesHealth,
    ) -> None:
        """`resources`: the resources of all workers as last seen, this one included."""
        self.name = settings.resource_name
        self._settings = settings
        self._api = api
        self._resources = resources
        self._health = health
        self._own: dict[str, bytes] = {}
        self._applied: ApiObject | None = None  # our resource as we wrote it last; None: we never wrote it
        self._writing = asyncio.Lock()
        self._repair_wanted = asyncio.Event()

    async def put(self, key: str, value: bytes) -> None:
        """Write a key. While the server does not answer, only record the wish. Raises InvalidArgument and
        `KubernetesError`.
        """
        check_record(key, value)
        before = self._own.get(key)
        self._own[key] = value
        try:
            await self._write()
        except CannotConnect as error:
            self._postpone(key, error)
        except KubernetesError:
            if before is None:
                self._own.pop(key, None)
            else:
                self._own[key] = before
            raise

    async def put_new(self, key: str, value: bytes) -> bool:
        """Put a key that must be new; return whether this process keeps it. Two resources may both hold a key, so
        the server does not decide which came first. Each process writes, reads, and removes its own key when it
        finds another's: of processes that write at once, the last to read sees all keys, so two never stay.
        """
        check_record(key, value)
        for _ in range(CREATE_ATTEMPTS):
            if key in self._own or await self._is_held_by_others(key):
                return False
            self._own[key] = value
            try:
                await self._write()
                if not await self._is_held_by_others(key):
                    return True
            except BaseException:
                self._withdraw(key)
                raise
            del self._own[key]
            await self._write()
            await asyncio.sleep(random.uniform(0, 0.2))
        raise KubernetesError(409, f"{key}: several processes create it at once, again and again")

    async def delete(self, key: str) -> None:
        """Delete a key of this process. While the server does not answer, only record the wish."""
        split_key(key)
        if self._own.pop(key, None) is None:
            return
        try:
            await self._write()
        except CannotConnect as error:
            self._postpone(key, error)

    async def remove(self) -> None:
        """Delete the resource, if it was ever written. Raises `CannotConnect` and `KubernetesError`."""
        if self._applied is not None:
            await self._api.delete(self.name)

    async def _is_held_by_others(self, key: str) -> bool:
        found, _ = await self._api.read_all(self._resources.path, None)
        return any(each["metadata"]["name"] != self.name and key in records_of(each) for each in found)

    async def _write(self) -> None:
        """Apply the records to the resource."""
        async with self._writing:
            body = resource(
                self.name,
                pod_name=self._settings.pod_name or "",
                pod_uid=self._settings.pod_uid or "",
                own=self._own,
            )
            self._applied = self._applied or {}  # it may be written, whatever the answer is
            self._applied = await self._api.apply(self.name, body)
        self._health.on_answer()
        self.check()  # it may have been removed while we wrote

    # -- repair --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Request a repair when the resource, or records in it, were removed or changed."""
        applied = self._applied or {}
        if not self._own or self._writing.locked() or self._resources.version < version_of(applied):
            return  # what was seen last is older than what we wrote last
        found, written = records_of(self._resources.objects.get(self.name, {})), records_of(applied)
        # A value is compared as the server gave it back: a number may have another form there.
        if any(key not in found or found[key] != written.get(key, found[key]) for key in self._own):
            logger.warning("%s %s was removed or changed by another client; writing it again", KIND, self.name)
            self._repair_wanted.set()

    def _withdraw(self, key: str) -> None:
        """Take a key back that may have been written."""
        self._own.pop(key, None)
        self._repair_wanted.set()

    def _postpone(self, key: str, error: CannotConnect) -> None:
        logger.warning("the record %s is made right when the API server answers again: %s", key, error)
        self._repair_wanted.set()

    async def keep_repaired(self) -> None:
        """Write the resource whenever it may not be as it shall be."""
        delays = Delays()
        with counted(f"kubernetes: our {KIND}") as failed:
            while True:
                await self._repair_wanted.wait()
                self._repair_wanted.clear()
                pause = 0.0
                try:
                    await self._write()
                    delays = Delays()
                    await asyncio.sleep(next(delays))  # another writer that keeps writing must not keep us busy
                    continue
                except CannotConnect as error:
                    self._health.on_lost(error)
                    pause = retry_after(error)
                except KubernetesError as error:
                    failed(error, 0.0)
                    logger.warning("the API server declines our %s: %s", KIND, error)
                except Exception as error:  # the boundary: a defect in here must not end what keeps our records
                    failed(error, 0.0)
                    logger.exception("writing our %s failed", KIND)
                self._repair_wanted.set()
                await asyncio.sleep(max(next(delays), pause))
