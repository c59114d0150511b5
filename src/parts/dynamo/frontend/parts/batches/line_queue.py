"""Which line of a batch is next: those that failed before, those that waited for their model, and then the file in its order."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from dynamo.frontend.parts.batches.group_commit import Disk
from dynamo.frontend.parts.batches.input_check import LineReader
from dynamo.frontend.parts.batches.journal import ResultJournal
from dynamo.frontend.parts.batches.line_call import Fate, LineAnswer
from dynamo.frontend.parts.batches.model_gate import ModelGate
from dynamo.protocol.batches.lines import BatchLine, model_of

READ_LINES: Final = 64  # at once
READ_BYTES: Final = 256 * 1024
MAX_ATTEMPTS: Final = 5
FIRST_PAUSE_SECONDS: Final = 0.5  # before a line's second attempt; doubled each time, and between half and all of it
MAX_PAUSE_SECONDS: Final = 60.0
LOOKED_AT_MODELS: Final = 8  # whose lines wait, each time
MAX_DEFERRED: Final = 1024  # lines that wait for their model; while there are so many, no further one is read


class NextLine(NamedTuple):
    """A line that can go: it has its place at the gate of its model."""

    number: int
    line: BatchLine
    model: str
    gate: ModelGate


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
        self._journal, self._reader, self._disk, self._enter, self._rng = journal, reader, disk, enter, rng
        self._cursor = 0  # the first line that was not read yet
        self._read: deque[tuple[int, BatchLine]] = deque()
        self._deferred: OrderedDict[str, deque[int]] = OrderedDict()  # lines that wait for room, by model
        self._retries: list[tuple[float, int]] = []  # (when, line), the earliest first
        self._attempts: dict[int, int] = {}  # of the lines that have failed before

    async def next_line(self) -> NextLine | None:
        """Return a line that can go now; None: no line can."""
        return await self._next_retry() or await self._next_deferred() or await self._next_unread()

    def defer(self, model: str, number: int) -> None:
        """Let a line wait until its model has room."""
        self._deferred.setdefault(model, deque()).append(number)

    def try_again(self, number: int, answer: LineAnswer, now: float) -> bool:
        """Let a failed line come again after a pause; False: it has failed often enough."""
        attempts = self._attempts.get(number, 0) + 1
        if answer.fate is Fate.RETRY and attempts >= MAX_ATTEMPTS:
            return False
        self._attempts[number] = attempts
        pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(attempts - 1, 16))
        pause = max(pause * self._rng.uniform(0.5, 1.0), answer.retry_after_seconds or 0.0)
        heapq.heappush(self._retries, (now + pause, number))
        return True

    def forget(self, number: int) -> None:
        """Forget how often a line has failed: it has its result."""
        self._attempts.pop(number, None)

    async def _next_retry(self) -> NextLine | None:
        if not self._retries or self._retries[0][0] > asyncio.get_running_loop().time():
            return None
        first = self._retries[0]
        line = await self._disk(self._reader.read, first[1])  # which may fail: then the line is still there
        self._retries.remove(first)  # another may have come before it meanwhile
        heapq.heapify(self._retries)
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
