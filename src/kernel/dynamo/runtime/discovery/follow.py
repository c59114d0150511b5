"""Follow the records under a prefix for good: watch, report the difference after a break, back off, watch again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Final

from dynamo.errors import DynamoException
from dynamo.runtime.discovery.base import Change, Delete, Discovery, Put

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 1.0  # the store itself retries faster; this is for a watch that it gave up


async def follow(
    discovery: Discovery, prefix: str, known: set[str] | None = None, *, raises_first: bool = False
) -> AsyncGenerator[list[Change], None]:
    """Yield what changes under `prefix`, until the store is closed. Close it (`aclosing`) to stop earlier.

    The first batch is the snapshot, possibly empty. A watch that failed is set up again; the next batch then begins with a
    `Delete` of each key that was reported and is not there any more. `known` holds the keys that the caller may have seen:
    a caller that failed in the middle of a batch gives the same set to a new `follow`, and misses nothing.

    `raises_first`: raise the error when the very first watch cannot be set up, instead of trying again.
    """
    known = set() if known is None else known
    has_begun = not raises_first
    while True:
        try:
            async with discovery.watch(prefix) as changes:
                snapshot = await anext(changes, None)
                if snapshot is None:
                    return
                has_begun = True
                present = {change.key for change in snapshot}
                batch: list[Change] | None = [*(Delete(key) for key in sorted(known - present)), *snapshot]
                while batch is not None:
                    known.update(change.key for change in batch if isinstance(change, Put))
                    yield batch
                    known.difference_update(change.key for change in batch if isinstance(change, Delete))
                    batch = await anext(changes, None)
            return  # the store was closed
        except DynamoException as error:
            if not has_begun:
                raise
            logger.warning("the watch on %s failed; watching again in %g s: %s", prefix, RETRY_SECONDS, error)
        await asyncio.sleep(RETRY_SECONDS)
