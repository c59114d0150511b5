"""Send requests, over kept-alive connections, and record what comes back: the schedule sets when, the pool over what."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from dynamo.cli.bench.connections import (
    ClientConnection,
    ConnectionPool,
    Prepared,
    SentRequest,
    clock,
    failure_of,
    record_answer,
)
from dynamo.cli.bench.samples import Recorder
from dynamo.cli.bench.schedule import Schedule, Shape
from dynamo.cli.bench.targets import Target

REFUSED_PAUSE_SECONDS: Final = 0.05  # a server that is not there shall not be called in a busy loop
SWEEP_SECONDS: Final = 0.5  # how exactly a request's timeout is kept
MAX_WAITING: Final = 100_000  # open loop: requests that are due and have no connection

# (number of the request, index of the target) -> the request. Called when the request is due.
RequestSource = Callable[[int, int], Prepared]


class Load:
    """One run. `run` returns when every request that was sent has ended, or soon after `stop`."""

    def __init__(
        self,
        targets: Sequence[Target],
        source: RequestSource,
        shape: Shape,
        recorder: Recorder,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self.recorder = recorder
        self.in_flight = 0
        self._source = source
        self._schedule = Schedule(shape, rng or random.Random())
        self._pool = ConnectionPool(targets, shape.connections, recorder)
        self._waiting: deque[SentRequest] = deque()
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_stopped = False

    async def run(self) -> None:
        """Send and wait."""
        loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = loop.create_future()
        self.recorder.begun = clock()
        self._schedule.begin(self.recorder.begun)
        self._later(SWEEP_SECONDS, self._sweep)
        try:
            if self._shape.is_open:
                self._arrive()
            else:
                for number in range(self._shape.connections):
                    self._closed_turn(number % len(self._pool.targets), None)
            self._check_finished()
            await self._finished
        finally:
            for timer in self._timers:
                timer.cancel()
            self._pool.abandon_all()
            if self._is_stopped or not self.recorder.ended:
                self.recorder.ended = clock()

    @property
    def _shape(self) -> Shape:
        return self._schedule.shape

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return clock() - self._schedule.begun

    def stop(self) -> None:
        """Send nothing more and forget what is in flight."""
        self._is_stopped = self._schedule.is_over = True
        self.recorder.unfinished += self.in_flight
        for connection in self._pool.open:
            job = connection.job
            if job is not None and job.meter is not None:  # they came, even if the rest is missing
                self.recorder.output_tokens += job.meter.text_events
        if not self._finished.done():
            self._finished.set_result(None)

    # -- what is sent next -------------------------------------------------------------------------------------------

    def _next_job(self, target: int, due: float | None = None) -> SentRequest:
        request = self._source(self._schedule.take_number(), target)
        self.in_flight += 1
        self.recorder.sent += 1
        return SentRequest(request, target, clock() if due is None else due)

    def _closed_turn(self, target: int, connection: ClientConnection | None) -> None:
        """Start the next job of a closed loop: one of the N senders is free."""
        if not self._schedule.may_send(clock()):
            if connection is not None:
                connection.abandon()
            self._check_finished()
            return
        self._start(self._next_job(target), connection)

    def _arrive(self) -> None:
        """Open loop: send all that is due, and come back for the next."""
        schedule, pool = self._schedule, self._pool
        while schedule.may_send(clock()):
            wait = schedule.due - clock()
            if wait > 0:
                self._later(wait, self._arrive)
                return
            job = self._next_job(schedule.next_number % len(pool.targets), schedule.due)
            schedule.advance()
            if (idle := pool.take_idle(job.target)) is not None:
                self._start(job, idle)
            elif pool.has_room():
                self._start(job, None)
            elif len(self._waiting) < MAX_WAITING:
                self._waiting.append(job)
            else:
                self._failed("not sent: too many wait", f"{MAX_WAITING} requests are due and have no connection")
        self._check_finished()

    def _free(self, target: int, connection: ClientConnection | None) -> None:
        """Go on after a request has ended; `connection` is given if it can be used again."""
        if self._is_stopped:
            return
        if not self._shape.is_open:
            self._closed_turn(target, connection)
            return
        if self._waiting:
            job = self._waiting.popleft()
            if connection is not None and job.target != target:
                connection.abandon()
                connection = None
            self._start(job, connection)
        elif connection is not None:
            self._pool.keep_idle(connection)
        self._check_finished()

    def _start(self, job: SentRequest, connection: ClientConnection | None) -> None:
        if connection is not None:
            self._send(connection, job)
            return
        task = asyncio.get_running_loop().create_task(self._connect(job))  # not awaited: it ends in a callback
        self._pool.connecting.add(task)
        task.add_done_callback(self._pool.connecting.discard)

    async def _connect(self, job: SentRequest) -> None:
        try:
            connection = await self._pool.connect(job.target, self)
        except (OSError, TimeoutError) as error:
            what = "timeout" if isinstance(error, TimeoutError) else type(error).__name__
            self._failed(f"connect: {what}", f"{self._pool.targets[job.target].url}: {error}")
            self._later(REFUSED_PAUSE_SECONDS, self._free, job.target, None)
            return
        if not self._shape.is_open and not job.is_retry:
            job.due = clock()  # a sender of the closed loop has its connection first
        self._send(connection, job)

    def _send(self, connection: ClientConnection, job: SentRequest) -> None:
        late = job.begin(clock())
        if self._shape.is_open:
            self.recorder.late.add(late)
        connection.send(job)

    def _later(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        def fire() -> None:
            self._timers.discard(timer)
            call(*args)

        timer = asyncio.get_running_loop().call_later(max(0.0, seconds), fire)
        self._timers.add(timer)

    def _check_finished(self) -> None:
        if self._schedule.is_over and not self.in_flight and not self._finished.done():
            self._finished.set_result(None)

    def _sweep(self) -> None:
        """Give up what takes too long."""
        oldest = clock() - self._shape.timeout_seconds
        for connection in list(self._pool.open):
            if connection.job is not None and connection.job.due < oldest:
                connection.give_up(f"timeout after {self._shape.timeout_seconds:g} s", "")
        self._later(SWEEP_SECONDS, self._sweep)

    # -- what became of a request ------------------------------------------------------------------------------------

    def _ended(self) -> float:
        self.in_flight -= 1
        self.recorder.ended = now = clock()
        return now

    def _failed(self, kind: str, example: str) -> None:
        now = self._ended()
        self.recorder.fail(kind, example, now)

    def answered(self, connection: ClientConnection, job: SentRequest) -> None:
        """Take the whole answer of `job` as arrived."""
        if (failure := failure_of(connection.reader, job)) is not None:
            self._failed(*failure)
        else:
            record_answer(self.recorder, job, self._ended())
        self._free(job.target, connection if connection.is_usable else None)

    def lost(self, job: SentRequest, kind: str, example: str, *, is_stale: bool) -> None:
        """Handle the loss of the connection of `job`. `is_stale`: the server closed a kept-alive connection before
        it answered.
        """
        if is_stale and not job.is_retry and not self._is_stopped:
            job.is_retry = True
            self._start(job, None)
            return
        self._failed(kind, example)
        self._free(job.target, None)
