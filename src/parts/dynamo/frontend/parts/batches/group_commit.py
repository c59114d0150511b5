"""Writes the results of a batch to its journal in groups: one wait for the disk for all results that came meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, ParamSpec, Protocol, TypeVar

from dynamo.frontend.parts.batches.journal import LineResult, ResultJournal

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

MIN_GAP_SECONDS: Final = 0.05  # between two waits for the disk, unless many results wait
MANY_RESULTS: Final = 64
TRY_AGAIN_SECONDS: Final = 5.0  # after the disk refused


class Disk(Protocol):
    """Runs what waits for the disk in a thread."""

    def __call__(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> Awaitable[T]: ...


class GroupCommit:
    """The results of one batch that are not on the disk yet."""

    def __init__(self, journal: ResultJournal, disk: Disk, batch_id: str, notify: Callable[[], None]) -> None:
        """`notify` is called after each group."""
        self._journal, self._disk, self._batch_id, self._notify = journal, disk, batch_id, notify
        self._pending: list[LineResult] = []
        self._more = asyncio.Event()
        self._many = asyncio.Event()
        self.trouble: str | None = None
        """Why the disk takes nothing now; None: it does."""

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, result: LineResult) -> None:
        """Take a result; it is durable once `len(self)` is 0."""
        self._pending.append(result)
        self._more.set()
        if len(self._pending) >= MANY_RESULTS:
            self._many.set()

    async def run(self) -> None:
        """Write what comes, until cancelled. What was not written then is executed again by the next runner."""
        while True:
            if not self._pending:  # else this begins again after a fault
                await self._more.wait()
            self._more.clear()
            self._many.clear()
            group = self._pending[:]
            try:
                await self._disk(self._journal.append, group)
            except OSError as error:
                await self._refused(error)
                continue
            del self._pending[: len(group)]
            if self.trouble is not None:
                logger.info("batch %s goes on: its results can be written again", self._batch_id)
                self.trouble = None
            self._notify()
            try:
                async with asyncio.timeout(MIN_GAP_SECONDS):
                    await self._many.wait()
            except TimeoutError:
                pass

    async def _refused(self, error: OSError) -> None:
        if self.trouble is None:
            logger.error(
                "batch %s is paused: its results cannot be written (%s); trying again every %g s",
                self._batch_id,
                error.strerror or error,
                TRY_AGAIN_SECONDS,
            )
        self.trouble = error.strerror or str(error)
        self._more.set()
        self._notify()
        await asyncio.sleep(TRY_AGAIN_SECONDS)
