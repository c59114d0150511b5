"""Runs the batches of a directory, in the one process that holds its lock: check, execute, seal, publish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec

from dynamo.frontend.parts.batches.finishing import Step, publish, result_file_id, seal
from dynamo.frontend.parts.batches.input_check import LineReader, has_places
from dynamo.frontend.parts.batches.journal import ResultJournal
from dynamo.frontend.parts.batches.records import BatchRecord
from dynamo.frontend.parts.batches.room import BatchRoom
from dynamo.frontend.parts.batches.run import BatchRun, RunParts
from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.protocol.batches.objects import BatchErrorEntry, BatchErrors
from dynamo.protocol.batches.status import CANCELLABLE, BatchStatus
from dynamo.runtime.base.forever import forever
from dynamo.runtime.base.tasks import Background

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5  # between two reads of what other processes wrote
SHOW_SECONDS: Final = 1.0  # between two writes of the counts
TRY_AGAIN_SECONDS: Final = 5.0  # after the disk or the index failed
REAP_SECONDS: Final = 60.0


class BatchConductor:
    """Becomes the runner as soon as no other process is, and runs what there is."""

    def __init__(
        self,
        room: BatchRoom,
        parts: RunParts,
        *,
        now: Callable[[], float],
        after_step: Step,
    ) -> None:
        self._room, self._parts, self._now, self._after_step = room, parts, now, after_step
        self._conducted: dict[str, BatchRun | None] = {}  # None: it does not execute lines now
        self._stuck: dict[str, str] = {}  # of batches that cannot go on for now: why
        self._look = asyncio.Event()

    def troubles(self) -> dict[str, str]:
        """Return why batches of this process stand still, by their ids."""
        runs = {id: run.trouble for id, run in self._conducted.items() if run is not None and run.trouble is not None}
        return {**self._stuck, **{id: f"its results cannot be written ({why})" for id, why in runs.items()}}

    def look(self) -> None:
        """Read the index at once: something in it has changed."""
        self._look.set()

    def note_wait(self, exchange: Exchange, ended_at: float) -> None:
        """Take account of how long a client has waited for an answer, unless that was a line of a batch."""
        counters = exchange.counters
        if counters is None or self._parts.calls.is_line(exchange):
            return
        first = counters.first_token_seconds if counters.key[2] == "stream" else None
        self._parts.pace.waited(ended_at - exchange.arrival.at if first is None else first)

    async def run(self) -> None:
        """Run until cancelled."""
        disk = self._parts.disk
        while not await disk(self._room.directory.try_lock):
            await asyncio.sleep(LOOK_SECONDS)
        logger.info("this process runs the batches of %s", self._room.directory.root)
        await self._sweep()
        async with Background() as background:
            background.keep(partial(self._repeat, SHOW_SECONDS, self._show), "batches: their counts")
            background.keep(
                partial(self._repeat, REAP_SECONDS, self._room.files.remove_expired), "batches: expired files"
            )
            await forever(partial(self._look_around, background), "batches: those that begin and end")

    async def _look_around(self, background: Background) -> None:
        while True:
            try:
                await self._follow(background)
            except sqlite3.Error as error:
                logger.error("the index of files cannot be read: %s; trying again", error)
                await asyncio.sleep(TRY_AGAIN_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._look.wait()
            self._look.clear()

    async def _follow(self, background: Background) -> None:
        """Begin the batches that are new, and end those that were cancelled or have expired."""
        for record in await self._parts.disk(self._room.index.open_batches):
            id = record.batch.id
            if record.status in CANCELLABLE and record.ending is None and self._parts.is_revoked(record.key_id):
                await self._parts.disk(self._room.index.change_batch, id, self._revoke)
                self._look.set()
                continue
            if id not in self._conducted:
                self._conducted[id] = None
                background.start(self._conduct(record), f"batch {id}")
            elif (run := self._conducted[id]) is not None:
                ending = self._ending_of(record)
                if ending is not None:
                    run.end(ending)

    def _revoke(self, record: BatchRecord) -> None:
        """Cancel a batch whose key was taken away."""
        if record.status in CANCELLABLE and record.ending is None:
            text = "The API key that made this batch may not be used any more."
            record.batch.errors = BatchErrors([BatchErrorEntry("key_revoked", text)])
            record.enter(BatchStatus.CANCELLING, self._now())

    def _ending_of(self, record: BatchRecord) -> BatchStatus | None:
        """Return how a batch ends before all of its lines are done; None: it goes on."""
        if record.status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED
        return BatchStatus.EXPIRED if self._now() >= record.batch.expires_at else None

    async def _conduct(self, record: BatchRecord) -> None:
        """Take one batch from where it is to its end. A fault of ours about it costs the others nothing."""
        id = record.batch.id
        try:
            await forever(partial(self._try_to_conduct, id), f"batch {id}")
        finally:
            self._conducted.pop(id, None)
            self._stuck.pop(id, None)
            self._parts.slots.forget(record.owner, id)

    async def _try_to_conduct(self, id: str) -> None:
        while True:
            try:
                ended = await self._carry_out(id)
            except (OSError, sqlite3.Error, msgspec.DecodeError) as error:
                if self._stuck.get(id) != str(error):  # once for each cause, and not every few seconds of a night
                    logger.error("batch %s cannot go on: %s; trying again every %g s", id, error, TRY_AGAIN_SECONDS)
                self._stuck[id] = str(error)
                await asyncio.sleep(TRY_AGAIN_SECONDS)
                continue
            if ended is not None:
                counts = ended.batch.request_counts
                logger.info(
                    "batch %s is %s: %d lines answered, %d failed, %d in all",
                    id,
                    ended.batch.status,
                    counts.completed,
                    counts.failed,
                    counts.total,
                )
            return

    async def _carry_out(self, id: str) -> BatchRecord | None:
        disk = self._parts.disk
        record: BatchRecord | None = await disk(self._room.index.batch, id)
        if record is None or record.status.is_final:
            return None
        if record.ending is None:
            record = await self._check(record)
            if record is None or record.status.is_final:
                return record
            record = await self._execute(record)
            if record is None:
                return None
        return await disk(publish, self._room.directory, self._room.index, record, self._now(), self._after_step)

    async def _check(self, record: BatchRecord) -> BatchRecord | None:
        """Check the input of a batch that is new; return the record as it is then."""
        batch, work = record.batch, self._room.directory.work(record.batch.id)
        if record.status is not BatchStatus.VALIDATING:
            return record
        source = self._room.directory.blob(batch.input_file_id)
        found = await self._room.checks.run(record, source, work)
        self._after_step("checked")

        def change(current: BatchRecord) -> BatchRecord:
            if current.status is BatchStatus.VALIDATING:  # it may have been cancelled meanwhile
                current.batch.model = found.model
                if found.errors:
                    current.batch.errors = BatchErrors(found.errors)
                    current.enter(BatchStatus.FAILED, self._now())
                else:
                    current.batch.request_counts.total = found.lines
                    current.enter(BatchStatus.IN_PROGRESS, self._now())
            return current

        return await self._parts.disk(self._room.index.change_batch, batch.id, change)

    async def _execute(self, record: BatchRecord) -> BatchRecord | None:
        """Execute what has no result yet, and seal the batch; return the record as it is then."""
        batch, disk = record.batch, self._parts.disk
        work = self._room.directory.work(batch.id)
        if not await disk(has_places, work):  # cancelled before its input was checked
            return await disk(seal, self._room.index, batch.id, None, BatchStatus.CANCELLED, self._now())
        reader: LineReader = await disk(LineReader, self._room.directory.blob(batch.input_file_id), work)
        try:
            journal: ResultJournal = await disk(ResultJournal, work, len(reader))
            try:
                run = self._conducted[batch.id] = BatchRun(record, journal, reader, self._parts)
                self._stuck.pop(batch.id, None)
                if (early := self._ending_of(record)) is not None:
                    run.end(early)
                ending = await run.execute()
                self._conducted[batch.id] = None
                return await disk(seal, self._room.index, batch.id, (journal, reader), ending, self._now())
            finally:
                self._conducted[batch.id] = None
                journal.close()
        finally:
            reader.close()

    # -- beside the batches ------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Remove what a crashed runner left of batches that have ended, and of files that never were."""
        disk = self._parts.disk
        open_ids = {record.batch.id for record in await disk(self._room.index.open_batches)}
        for id in await disk(self._room.directory.working):
            if id not in open_ids:
                await disk(self._room.directory.discard_work, id)
        results = frozenset(result_file_id(id, kind) for id in open_ids for kind in ("output", "error"))
        await disk(self._room.files.sweep, results)

    async def _repeat(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await work()
            except (OSError, sqlite3.Error) as error:
                logger.error("the directory of files failed: %s; trying again", error)

    async def _show(self) -> None:
        """Write the counts of the running batches into the index, and show the gauges."""
        self._parts.note_models()
        runs = [run for run in self._conducted.values() if run is not None]
        for run in runs:
            if run.progress.has_news():  # a batch that waits costs the disk nothing
                await self._parts.disk(self._room.index.change_batch, run.record.batch.id, partial(_take_counts, run))
        counts = await self._parts.disk(self._room.index.status_counts)
        oldest = min((run.record.batch.created_at for run in runs if run.progress.backlog), default=None)
        self._parts.metrics.show(
            counts,
            backlog=sum(run.progress.backlog for run in runs),
            oldest_seconds=0.0 if oldest is None else max(0.0, self._now() - oldest),
            paused=sum(run.trouble is not None for run in runs),
            file_bytes=sum((await self._parts.disk(self._room.index.file_bytes)).values()),
        )


def _take_counts(run: BatchRun, record: BatchRecord) -> None:
    if record.ending is None and not record.status.is_final:
        record.batch.request_counts, record.batch.usage = run.progress.journal.counts, run.progress.journal.usage
        record.models = sorted(run.progress.seen_models)
