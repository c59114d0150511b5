"""One batch while it is executed: which line is next, what runs, what failed and comes again, what is on the disk."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from dynamo.frontend.base.access import Caller
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.parts.batches.fair_slots import FairSlots
from dynamo.frontend.parts.batches.group_commit import Disk, GroupCommit
from dynamo.frontend.parts.batches.input_check import LineReader
from dynamo.frontend.parts.batches.journal import LineResult, ResultJournal
from dynamo.frontend.parts.batches.line_call import Fate, LineAnswer, LineCalls
from dynamo.frontend.parts.batches.line_pace import LinePace, Metered
from dynamo.frontend.parts.batches.line_queue import LineQueue, NextLine
from dynamo.frontend.parts.batches.metrics import BatchMetrics
from dynamo.frontend.parts.batches.model_gate import ModelGate, ModelGates
from dynamo.frontend.parts.batches.records import BatchRecord
from dynamo.protocol.batches.lines import line_request_id, result_line
from dynamo.protocol.batches.status import BatchStatus
from dynamo.runtime.base.tasks import Background

logger = logging.getLogger(__name__)

MAX_UNWRITTEN: Final = 256  # results that wait for the disk; then no further line is begun
STOPPED_STATUS: Final = 499  # of a line that we stopped ourselves
LOOK_AGAIN_SECONDS: Final = 0.25  # while no line can go
MAX_SEEN_MODELS: Final = 1000


@dataclass(frozen=True, slots=True)
class RunParts:
    """What all batches of a process share."""

    calls: LineCalls
    models: ModelDirectory
    gates: ModelGates
    slots: FairSlots
    pace: LinePace
    disk: Disk
    metrics: BatchMetrics
    is_open: Callable[[], bool]  # whether the frontend takes requests
    knows_cluster: Callable[[], bool]  # whether it has had the time to find the models that are there
    known_models: set[str]  # that were served here since the start, at most MAX_SEEN_MODELS
    identity: Callable[[str], Caller | None]  # of a key's id
    is_revoked: Callable[[str], bool]  # whether the key with this id may not be used any more
    rng: random.Random

    def note_models(self) -> None:
        """Add the models that are served now to those that are known."""
        for model in self.models.served():
            if len(self.known_models) < MAX_SEEN_MODELS:
                self.known_models.add(model.name)

    def may_come_back(self, model: str) -> bool:
        """Return whether workers of a model that has none now may come: it is registered, was served, or is not found yet."""
        return self.models.is_registered(model) or model in self.known_models or not self.knows_cluster()


class BatchRun:
    """Executes the lines of one batch that have no result yet."""

    def __init__(self, record: BatchRecord, journal: ResultJournal, reader: LineReader, parts: RunParts) -> None:
        self.record, self.journal, self.reader = record, journal, reader
        self._parts = parts
        self._wake = asyncio.Event()
        self._told = (-1, 0)  # what was to be written down at the last call of `has_news`
        self._commit = GroupCommit(journal, parts.disk, record.batch.id, self._wake.set)
        self._queue = LineQueue(journal, reader, parts.disk, self._entered, parts.rng)
        self._running: dict[int, str] = {}  # request ids by line
        self.ending: BatchStatus | None = None
        """Why no further line is begun; None: the batch goes on."""
        self.seen_models: set[str] = set(record.models)
        """Models that were served when a line named them."""

    async def execute(self) -> BatchStatus:
        """Run until every line has a durable result, or the batch was ended; return how the batch ends."""
        async with Background() as background:
            background.keep(self._commit.run, "batch: results to the disk")
            while self.ending is None and not self._is_complete():
                if not await self._begin_line(background):
                    await self._wait()
            while self._running or (self._commit and self._commit.trouble is None):
                await self._wait()
        return BatchStatus.COMPLETED if self.ending is None else self.ending

    def end(self, ending: BatchStatus) -> None:
        """Begin no further line, and stop those that run: they count as not executed."""
        if self.ending is None:
            self.ending = ending
            for request_id in list(self._running.values()):
                self._parts.calls.stop(request_id)
            self._wake.set()

    def has_news(self) -> bool:
        """Return whether there is something to write down that was not there at the last call."""
        news = self.backlog, len(self.seen_models)
        is_new, self._told = news != self._told, news
        return is_new

    @property
    def backlog(self) -> int:
        """How many lines have no result yet."""
        counts = self.journal.counts
        return counts.total - counts.completed - counts.failed

    @property
    def trouble(self) -> str | None:
        """Why the batch is paused; None: it is not."""
        return self._commit.trouble

    def _is_complete(self) -> bool:
        return not self.backlog

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _begin_line(self, background: Background) -> bool:
        """Begin the next line that can go; False: none can now."""
        parts = self._parts
        if not parts.is_open() or len(self._commit) >= MAX_UNWRITTEN or self._commit.trouble is not None:
            return False
        await parts.slots.acquire(self.record.owner, self.record.batch.id)
        try:
            is_over = self.ending is not None or parts.is_revoked(self.record.key_id)
            found = None if is_over else await self._queue.next_line()
            if found is not None:
                self._running[found.number] = line_request_id(self.record.batch.id, found.number)
                task = background.start(self._metered(found), "batch: one line")
                task.add_done_callback(partial(self._ended, found))
        except BaseException:
            parts.slots.release(self.record.owner)
            raise
        if found is None:
            parts.pace.end(0.0)
            parts.slots.release(self.record.owner)
        return found is not None

    def _ended(self, found: NextLine, _task: asyncio.Task[None]) -> None:
        """Give back the places of a line whose task was cancelled before its first step."""
        if self._running.pop(found.number, None) is not None:
            found.gate.left()
            self._parts.slots.release(self.record.owner)
            self._parts.pace.end(0.0)

    async def _metered(self, found: NextLine) -> None:
        work = Metered(self._execute(found))
        try:
            await work
        finally:
            self._parts.pace.end(work.seconds)

    def _entered(self, model: str) -> ModelGate | None:
        """Return the gate of a model after a line went in; None: it has no room for one now."""
        models, now = self._parts.models, asyncio.get_running_loop().time()
        gate = self._parts.gates.of(model)
        served = models.lookup(model)
        if served is not None:
            for seen in (self.seen_models, self._parts.known_models):
                if len(seen) < MAX_SEEN_MODELS:
                    seen.add(model)
            return gate if gate.enter(now, served.admission, served.workers) else None
        if model in self.seen_models or self._parts.may_come_back(model):
            # A line that names a model that was never served fails instead.
            if gate.enter(now, None, 0):
                gate.refused(now, None)
            return None
        return gate if gate.enter(now, None, 0) else None

    async def _execute(self, next_line: NextLine) -> None:
        number, line, gate = next_line.number, next_line.line, next_line.gate
        parts, request_id, loop = self._parts, self._running[number], asyncio.get_running_loop()
        began = loop.time()
        answer: LineAnswer | None = None
        try:
            if not parts.is_revoked(self.record.key_id):  # since the line was taken
                identity = parts.identity(self.record.key_id)
                answer = await parts.calls.run(self.record.batch.endpoint, request_id, bytes(line.body), identity)
        finally:
            del self._running[number]
            parts.slots.release(self.record.owner)
            if answer is None:
                gate.left()
            self._wake.set()
        if answer is None:
            self._queue.defer(next_line.model, number)  # without a result until the batch is cancelled
            return
        now = loop.time()
        if answer.status == STOPPED_STATUS and self.ending is not None:
            gate.left()
            return
        if answer.fate is Fate.NO_ROOM:
            gate.refused(now, answer.retry_after_seconds)
            self._queue.defer(next_line.model, number)
            return
        gate.answered()
        if answer.fate is not Fate.DONE and self._queue.try_again(number, answer, now):
            return
        self._queue.forget(number)
        is_success = 200 <= answer.status < 300
        parts.metrics.line_ended(is_success=is_success, seconds=now - began)
        written = result_line(request_id, line.custom_id, answer.status, request_id, answer.body)
        self._commit.add(LineResult(number, is_success, written, answer.body if is_success else b""))
