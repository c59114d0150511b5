"""How publishers of a plane become known: a record in discovery for each, put in the background and tried again."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from dynamo.errors import DynamoException
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.discovery.base import EVENT_CHANNELS, Discovery

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 1.0


class Announcer:
    """Puts and deletes channel records of one process; `close` takes back what is left."""

    def __init__(self, discovery: Discovery) -> None:
        self.discovery = discovery
        self._work = Background()
        self._records: dict[str, asyncio.Task[None]] = {}  # by key; each is awaited in `withdraw`

    def announce(self, key: str, record: bytes) -> asyncio.Task[None]:
        """Put a record under `v1/event_channels`; the task ends when it is there. Awaited by `withdraw`."""
        full = f"{EVENT_CHANNELS}/{key}"
        task = self._records[key] = self._work.keep(partial(self._put, full, record), f"announce {key}")
        return task

    async def withdraw(self, key: str) -> None:
        """Take a record back; idempotent."""
        task = self._records.pop(key, None)
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        try:
            await self.discovery.delete(f"{EVENT_CHANNELS}/{key}")
        except (DynamoException, OSError, RuntimeError) as error:
            logger.debug("event channel %s could not be withdrawn, it expires by itself: %s", key, error)

    async def close(self) -> None:
        """Withdraw everything; idempotent."""
        for key in list(self._records):
            await self.withdraw(key)
        await self._work.close()

    async def _put(self, key: str, record: bytes) -> None:
        is_first = True
        while True:
            try:
                await self.discovery.start()
                await self.discovery.put(key, record)
                return
            except (DynamoException, OSError) as error:
                level = logging.WARNING if is_first else logging.DEBUG
                is_first = False
                logger.log(level, "event channel %s cannot be announced yet: %s", key, error)
            await asyncio.sleep(RETRY_SECONDS)
