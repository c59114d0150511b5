"""One batch while it is executed: which line is next, what runs, what failed and comes again, what is on the disk."""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from dynamo.frontend.base.access import Caller
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.parts.batches.fair_slots import FairSlots
from dynamo.frontend.parts.batches.group_commit import Disk, GroupCommit
from dynamo.frontend.parts.batches.input_check import LineReader
from dynamo.frontend.parts.batches.journal import LineResult, ResultJournal
from dynamo.frontend.parts.batches.line_call import Fate, LineAnswer, LineCalls
from dynamo.frontend.parts.batches.line_pace import LinePace, Metered
from dynamo.frontend.parts.batches.metrics import BatchMetrics
from dynamo.frontend.parts.batches.model_gate import ModelGate, ModelGates
from dynamo.frontend.parts.batches.records import BatchRecord
from dynamo.protocol.batches.lines import BatchLine, line_request_id, model_of, result_line
from dynamo.protocol.batches.status import BatchStatus
from dynamo.runtime.base.tasks import Background

logger = logging.getLogger(__name__)

READ_LINES: Final = 64  # at once
READ_BYTES: Final = 256 * 1024
MAX_ATTEMPTS: Final = 5
FIRST_PAUSE_SECONDS: Final = 0.5  # before a line's second attempt; doubled each time, and between half and all of it
MAX_PAUSE_SECONDS: Final = 60.0
LOOKED_AT_MODELS: Final = 8  # whose lines wait, each time
MAX_DEFERRED: Final = 1024  # lines that wait for their model; while there are so many, no further one is read

MAX_UNWRITTEN: Final = 256  # results that wait for the disk; then no further line is begun
STOPPED_STATUS: Final = 499  # of a line that we stopped ourselves
LOOK_AGAIN_SECONDS: Final = 0.25  # while no line can go
MAX_SEEN_MODELS: Final = 1000


class NextLine(NamedTuple):
    """A line that can go: it has its place at the gate of its model."""

    number: int
    line: BatchLine
    model: str
    gate: ModelGate


class _Retries:
    """The lines that have failed, and come again after a pause."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._due: list[tuple[float, int]] = []  # (when, line), the earliest first
        self._attempts: dict[int, int] = {}  # of the lines that have failed before

    def add(self, number: int, answer: LineAnswer, now: float) -> bool:
        """Let a failed line come again after a pause; False: it has failed often enough."""
        attempts = self._attempts.get(number, 0) + 1
        if answer.fate is Fate.RETRY and attempts >= MAX_ATTEMPTS:
            return False
        self._attempts[number] = attempts
        pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(attempts - 1, 16))
        pause = max(pause * self._rng.uniform(0.5, 1.0), answer.retry_after_seconds or 0.0)
        heapq.heappush(self._due, (now + pause, number))
        return True

    def first(self, now: float) -> tuple[float, int] | None:
        """Return the entry of the line that may come again now; None: there is none."""
        return self._due[0] if self._due and self._due[0][0] <= now else None

    def remove(self, entry: tuple[float, int]) -> None:
        """Take away an entry that `first` has returned; another may have come before it meanwhile."""
        self._due.remove(entry)
        heapq.heapify(self._due)

    def forget(self, number: int) -> None:
        """Forget how often a line has failed: it has its result."""
        self._attempts.pop(number, None)


class LineQueue:
    """The lines of one batch that have no result and do not run. It holds their numbers, and a window of the file."""

    def __init__(
        self,
        journal: ResultJournal,
        reader: LineReader,
        disk: Disk,
        enter: Callable[[str], ModelGate | None],
        rng: random.Random,
    ) -> None:
        """`enter` takes a place for a line of a model, and returns its gate; None: there is none now."""
        self._journal, self._reader, self._disk, self._enter = journal, reader, disk, enter
        self._cursor = 0  # the first line that was not read yet
        self._read: deque[tuple[int, BatchLine]] = deque()
        self._deferred: OrderedDict[str, deque[int]] = OrderedDict()  # lines that wait for room, by model
        self.retries = _Retries(rng)

    async def next_line(self) -> NextLine | None:
        """Return a line that can go now; None: no line can."""
        return await self._next_retry() or await self._next_deferred() or await self._next_unread()

    def defer(self, model: str, number: int) -> None:
        """Let a line wait until its model has room."""
        self._deferred.setdefault(model, deque()).append(number)

    async def _next_retry(self) -> NextLine | None:
        first = self.retries.first(asyncio.get_running_loop().time())
        if first is None:
            return None
        line = await self._disk(self._reader.read, first[1])  # which may fail: then the line is still there
        self.retries.remove(first)
        return self._admit(first[1], line)

    async def _next_deferred(self) -> NextLine | None:
        for model in list(self._deferred)[:LOOKED_AT_MODELS]:
            gate = self._enter(model)
            if gate is None:
                self._deferred.move_to_end(model)
                continue
            numbers = self._deferred[model]
            try:
                line = await self._disk(self._reader.read, numbers[0])
            except BaseException:  # the disk refused, or the batch ends: the place is for another line
                gate.left()
                raise
            number = numbers.popleft()
            if not numbers:
                del self._deferred[model]
            return NextLine(number, line, model, gate)
        return None

    async def _next_unread(self) -> NextLine | None:
        while sum(map(len, self._deferred.values())) < MAX_DEFERRED and await self._fill():
            number, line = self._read.popleft()
            if not self._journal.is_done(number) and (found := self._admit(number, line)) is not None:
                return found
        return None

    def _admit(self, number: int, line: BatchLine) -> NextLine | None:
        """Let a line go, or wait for its model."""
        model = model_of(bytes(line.body))
        gate = self._enter(model)
        if gate is None:
            self.defer(model, number)
            return None
        return NextLine(number, line, model, gate)

    async def _fill(self) -> bool:
        """Read further lines where none is left; False: there are no more."""
        while not self._read and self._cursor < len(self._reader):
            if self._journal.is_done(self._cursor):
                self._cursor += 1
                continue
            found = await self._disk(self._read_some, self._cursor)
            self._read.extend(found)
            self._cursor = found[-1][0] + 1
        return bool(self._read)

    def _read_some(self, first: int) -> list[tuple[int, BatchLine]]:
        return self._reader.read_some(first, lines=READ_LINES, limit_bytes=READ_BYTES)


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


class BatchProgress:
    """How far one batch has come."""

    def __init__(self, journal: ResultJournal, seen_models: Iterable[str]) -> None:
        self.journal = journal
        self.seen_models = set(seen_models)
        """Models that were served when a line named them."""
        self._shown = (-1, 0)  # what was to be written down at the last call of `has_news`

    @property
    def backlog(self) -> int:
        """How many lines have no result yet."""
        counts = self.journal.counts
        return counts.total - counts.completed - counts.failed

    def has_news(self) -> bool:
        """Return whether there is something to write down that was not there at the last call."""
        news = self.backlog, len(self.seen_models)
        is_new, self._shown = news != self._shown, news
        return is_new


class BatchRun:
    """Executes the lines of one batch that have no result yet."""

    def __init__(self, record: BatchRecord, journal: ResultJournal, reader: LineReader, parts: RunParts) -> None:
        self.record, self._parts = record, parts
        self.progress = BatchProgress(journal, record.models)
        self._wake = asyncio.Event()
        self._commit = GroupCommit(journal, parts.disk, record.batch.id, self._wake.set)
        self._queue = LineQueue(journal, reader, parts.disk, self._entered, parts.rng)
        self._running: dict[int, str] = {}  # request ids by line
        self.ending: BatchStatus | None = None
        """Why no further line is begun; None: the batch goes on."""

    async def execute(self) -> BatchStatus:
        """Run until every line has a durable result, or the batch was ended; return how the batch ends."""
        async with Background() as background:
            background.keep(self._commit.run, "batch: results to the disk")
            while self.ending is None and self.progress.backlog:
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

    @property
    def trouble(self) -> str | None:
        """Why the batch is paused; None: it is not."""
        return self._commit.trouble

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
            for seen in (self.progress.seen_models, self._parts.known_models):
                if len(seen) < MAX_SEEN_MODELS:
                    seen.add(model)
            return gate if gate.enter(now, served.admission, served.workers) else None
        if model in self.progress.seen_models or self._parts.may_come_back(model):
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
        if answer.fate is not Fate.DONE and self._queue.retries.add(number, answer, now):
            return
        self._queue.retries.forget(number)
        is_success = 200 <= answer.status < 300
        parts.metrics.line_ended(is_success=is_success, seconds=now - began)
        written = result_line(request_id, line.custom_id, answer.status, request_id, answer.body)
        self._commit.add(LineResult(number, is_success, written, answer.body if is_success else b""))
