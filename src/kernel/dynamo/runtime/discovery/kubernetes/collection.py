"""One collection of the API server, read as a whole and then watched for good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynamo.errors import CannotConnect
from dynamo.runtime.base.forever import counted
from dynamo.runtime.discovery.kubernetes.api import GONE, KubernetesApi, KubernetesError, retry_after
from dynamo.runtime.discovery.kubernetes.health import KubernetesHealth
from dynamo.runtime.discovery.kubernetes.records import ApiObject
from dynamo.runtime.discovery.retry import Delays

logger = logging.getLogger(__name__)


class FollowedCollection:
    """The objects of a collection as they were last seen.

    `on_change(name)` is called when the watch delivered a change of that object, and `on_change(None)` when the watch began
    again and all objects were read anew.
    """

    def __init__(
        self,
        api: KubernetesApi,
        path: str,
        selector: str | None,
        health: KubernetesHealth,
        *,
        on_change: Callable[[str | None], None],
    ) -> None:
        self.path = path
        self.objects: dict[str, ApiObject] = {}  # by name
        self.version = 0  # everything up to here is in `objects`
        self._api = api
        self._selector = selector
        self._health = health
        self._on_change = on_change
        self._reading = asyncio.Lock()

    async def read(self, *, is_start: bool) -> None:
        """Read the collection as a whole. `is_start`: no watch runs, and what is read is the truth. Raises
        `CannotConnect` and `KubernetesError`.
        """
        async with self._reading:
            found, version = await self._api.read_all(self.path, self._selector)
            self._health.on_answer()
            if is_start or version >= self.version:  # else its watch was faster
                self.objects = {each["metadata"]["name"]: each for each in found}
                self.version = version

    async def follow(self) -> None:
        """Watch the collection; read it and watch again after a loss."""
        delays = Delays()
        declined = ""
        with counted(f"kubernetes: {self.path}") as failed:
            while True:
                pause = 0.0
                try:
                    async with self._api.watch(self.path, self._selector, self.version) as events:
                        delays, declined = Delays(), ""
                        async for event in events:
                            self._health.on_answer()
                            if event.version <= self.version:
                                continue  # a reading was ahead of the watch
                            self.version = event.version
                            if event.object is not None:
                                self._take(event.object, deleted=event.deleted)
                    continue  # the server ends a watch now and then
                except CannotConnect as error:
                    self._health.on_lost(error)
                    pause = retry_after(error)
                except KubernetesError as error:
                    if error.status != GONE:
                        failed(error, 0.0)
                        if declined != str(error):  # it is the same one every second
                            logger.warning("the API server declines a watch, and is read again and again: %s", error)
                        declined = str(error)
                except Exception as error:  # the boundary: a process must not go blind for ever
                    failed(error, 0.0)
                    logger.exception("following %s failed; trying again", self.path)
                await asyncio.sleep(max(next(delays), pause))
                await self._start_again()

    async def _start_again(self) -> None:
        try:
            await self.read(is_start=True)
        except (CannotConnect, KubernetesError) as error:
            logger.debug("%s cannot be read yet: %s", self.path, error)
        else:
            self._on_change(None)

    def _take(self, found: ApiObject, *, deleted: bool) -> None:
        name: str = found["metadata"]["name"]
        if deleted:
            self.objects.pop(name, None)
        else:
            self.objects[name] = found
        self._on_change(name)
