"""Send requests, over kept-alive connections, and record what comes back.

The shape of the load is one of two. Closed: each of N connections sends its next request when the last one is answered.
Open: requests are sent at their times, whether or not the server keeps up, which is how users behave.

A request costs no task, a token no object: a connection is an `asyncio.Protocol`, and its `data_received` feeds the
answer's reader and the recorder.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Final, NamedTuple, cast

from dynamo.cli.bench.answers import AnswerReader, BadAnswer, StreamMeter, error_of, usage_of
from dynamo.cli.bench.samples import Recorder
from dynamo.cli.bench.targets import Target

__all__ = ["Load", "Prepared", "RequestSource", "Shape", "arrival_times"]

CONNECT_SECONDS: Final = 10.0
REFUSED_PAUSE_SECONDS: Final = 0.05  # a server that is not there shall not be asked in a busy loop
SWEEP_SECONDS: Final = 0.5  # how exactly a request's timeout is kept
MAX_WAITING: Final = 100_000  # open loop: requests that are due and have no connection
MAX_BODY_BYTES: Final = 64 << 20
TIMER_SECONDS: Final = 0.002  # the loop's timers tick in milliseconds; a request sent so late was sent on time

_clock: Final = time.perf_counter  # loop.time() of uvloop has a resolution of 1 ms


class Prepared(NamedTuple):
    """A request, ready to be written."""

    data: bytes
    is_stream: bool


# (number of the request, index of the target) -> the request. Called when the request is due.
RequestSource = Callable[[int, int], Prepared]


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is sent, and when. `rate` None: closed loop."""

    connections: int  # closed: how many send; open: how many may be in use at once
    requests: int | None = None  # stop after so many
    seconds: float | None = None  # send nothing new after so long
    rate: float | None = None  # requests per second
    is_even: bool = False  # the same time between requests, instead of a Poisson process
    times: tuple[float, ...] = ()  # open: seconds after the start at which requests are due, rising; in place of `rate`
    timeout_seconds: float = 600.0  # until a request is given up

    @property
    def is_open(self) -> bool:
        """Whether requests have times of their own."""
        return self.rate is not None or bool(self.times)


def arrival_times(rate: float, rng: random.Random, *, is_even: bool = False) -> Iterator[float]:
    """Seconds after the start at which requests are due, rising, for ever."""
    at = 0.0
    while True:
        yield at
        at += 1 / rate if is_even else rng.expovariate(rate)


@dataclass(slots=True)
class _Job:
    """One request on its way."""

    request: Prepared
    target: int
    due: float
    is_retry: bool = False


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
        self._targets, self._source, self._shape = targets, source, shape
        self._rng = rng or random.Random()
        self._number = 0
        self._open: set[_Connection] = set()
        self._idle: list[list[_Connection]] = [[] for _ in targets]
        self._waiting: deque[_Job] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_stopped = False
        self._sending_ended = False
        self._begun = 0.0
        self._sweeper: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Send and wait."""
        loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = loop.create_future()
        self._begun = self.recorder.begun = _clock()
        self._sweeper = loop.call_later(SWEEP_SECONDS, self._sweep)
        try:
            if not self._shape.is_open:
                for number in range(self._shape.connections):
                    self._closed_turn(number % len(self._targets), None)
            else:
                self._arrivals = self._times()
                self._due = self._begun + next(self._arrivals)
                self._arrive()
            self._check_finished()
            await self._finished
        finally:
            self._sweeper.cancel()
            for timer in self._timers:
                timer.cancel()
            for task in self._connecting:
                task.cancel()
            for connection in list(self._open):
                connection.abandon()
            if self._is_stopped or not self.recorder.ended:
                self.recorder.ended = _clock()

    def _times(self) -> Iterator[float]:
        shape = self._shape
        if shape.times:
            return chain(shape.times, repeat(math.inf))
        return arrival_times(shape.rate or 1.0, self._rng, is_even=shape.is_even)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return _clock() - self._begun

    def stop(self) -> None:
        """Send nothing more and forget what is in flight."""
        self._is_stopped = self._sending_ended = True
        self.recorder.unfinished += self.in_flight
        for connection in self._open:
            if connection.job is not None and connection.meter is not None:  # they came, whoever waits for the rest
                self.recorder.output_tokens += connection.meter.text_events
        if not self._finished.done():
            self._finished.set_result(None)

    # -- what is sent next -------------------------------------------------------------------------------------------

    def _may_send(self) -> bool:
        if self._sending_ended:
            return False
        shape = self._shape
        is_over = (
            (len(shape.times) <= self._number if shape.times else False)
            or (shape.requests is not None and self._number >= shape.requests)
            or (shape.seconds is not None and _clock() - self._begun >= shape.seconds)
        )
        self._sending_ended = is_over
        return not is_over

    def _next_job(self, target: int, due: float | None = None) -> _Job:
        request = self._source(self._number, target)
        self._number += 1
        self.in_flight += 1
        self.recorder.sent += 1
        return _Job(request, target, _clock() if due is None else due)

    def _closed_turn(self, target: int, connection: _Connection | None) -> None:
        """Start the next job of a closed loop: one of the N senders is free."""
        if not self._may_send():
            if connection is not None:
                connection.abandon()
            self._check_finished()
            return
        self._start(self._next_job(target), connection)

    def _arrive(self) -> None:
        """Open loop: send all that is due, and come back for the next."""
        while self._may_send():
            wait = self._due - _clock()
            if wait > 0:
                self._later(wait, self._arrive)
                return
            job = self._next_job(self._number % len(self._targets), self._due)
            self._due = self._begun + next(self._arrivals)
            if idle := self._idle[job.target]:
                self._start(job, idle.pop())
            elif self._has_room():
                self._start(job, None)
            elif len(self._waiting) < MAX_WAITING:
                self._waiting.append(job)
            else:
                self._failed("not sent: too many wait", f"{MAX_WAITING} requests are due and have no connection")
        self._check_finished()

    def _has_room(self) -> bool:
        """Return whether one more connection may be opened; closes an idle connection to another target to make room."""
        if len(self._open) + len(self._connecting) < self._shape.connections:
            return True
        for idle in self._idle:
            if idle:
                idle[-1].abandon()
                return True
        return False

    def _free(self, target: int, connection: _Connection | None) -> None:
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
            self._idle[target].append(connection)
        self._check_finished()

    def _start(self, job: _Job, connection: _Connection | None) -> None:
        if connection is not None:
            connection.send(job)
            return
        task = asyncio.get_running_loop().create_task(self._connect(job))  # awaited by nobody: it ends in a callback
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, job: _Job) -> None:
        target = self._targets[job.target]
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, protocol = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self, job.target), target.host, target.port, ssl=target.tls
                )
        except (OSError, TimeoutError) as error:
            what = "timeout" if isinstance(error, TimeoutError) else type(error).__name__
            self._failed(f"connect: {what}", f"{target.url}: {error}")
            self._later(REFUSED_PAUSE_SECONDS, self._free, job.target, None)
            return
        if not self._shape.is_open and not job.is_retry:
            job.due = _clock()  # a sender of the closed loop has its connection first
        self.recorder.connections += 1
        protocol.send(job)

    def _later(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        def fire() -> None:
            self._timers.discard(timer)
            call(*args)

        timer = asyncio.get_running_loop().call_later(max(0.0, seconds), fire)
        self._timers.add(timer)

    def _check_finished(self) -> None:
        if self._sending_ended and not self.in_flight and not self._finished.done():
            self._finished.set_result(None)

    def _sweep(self) -> None:
        """Give up what takes too long."""
        oldest = _clock() - self._shape.timeout_seconds
        for connection in list(self._open):
            if connection.job is not None and connection.job.due < oldest:
                connection.give_up(f"timeout after {self._shape.timeout_seconds:g} s", "")
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    # -- what became of a request ------------------------------------------------------------------------------------

    def _ended(self) -> float:
        self.in_flight -= 1
        self.recorder.ended = now = _clock()
        return now

    def _failed(self, kind: str, example: str) -> None:
        now = self._ended()
        self.recorder.fail(kind, example, now)

    def answered(self, connection: _Connection, job: _Job) -> None:
        """Take the whole answer of `job` as arrived."""
        reader, meter, recorder = connection.reader, connection.meter, self.recorder
        failure: tuple[str, str] | None = None
        if reader.status != 200:
            said = error_of(bytes(connection.body))
            failure = (f"HTTP {reader.status}", said)
        elif meter is not None:
            failure = meter.failure
        if failure is not None:
            self._failed(*failure)
        else:
            now = self._ended()
            prompt, tokens = meter.usage if meter is not None else usage_of(bytes(connection.body))
            if meter is not None:
                recorder.cached_tokens += meter.cached_tokens
            if tokens is None:
                tokens = meter.text_events if meter is not None else 0
                recorder.output_estimated += 1
            if prompt is not None:
                recorder.input_tokens += prompt
                recorder.input_counted += 1
            recorder.answered += 1
            recorder.output_tokens += tokens
            took = now - connection.begun
            recorder.whole.add(took)
            interval = recorder.timeline.at(now - recorder.begun)
            interval.answered += 1
            interval.tokens += tokens
            interval.slowest = max(interval.slowest, took)
            if meter is not None and connection.first_text:
                first = connection.first_text - connection.begun
                recorder.first_token.add(first)
                interval.first_token_total += first
                interval.first_tokens += 1
                if tokens > 1:
                    recorder.per_token.add((connection.last_text - connection.first_text) / (tokens - 1))
        self._free(job.target, connection if connection.is_usable else None)

    def lost(self, job: _Job, kind: str, example: str, *, is_stale: bool) -> None:
        """Handle the loss of the connection of `job`. `is_stale`: the server closed a kept-alive connection before
        it answered.
        """
        if is_stale and not job.is_retry and not self._is_stopped:
            job.is_retry = True
            self._start(job, None)
            return
        self._failed(kind, example)
        self._free(job.target, None)


class _Connection(asyncio.Protocol):
    """One kept-alive connection with at most one request on it."""

    def __init__(self, load: Load, target: int) -> None:
        self.job: _Job | None = None
        self.reader = AnswerReader()
        self.meter: StreamMeter | None = None
        self.body = bytearray()
        self.begun = self.first_text = self.last_text = 0.0
        self.is_usable = False
        self._load, self._target = load, target
        self._gap = load.recorder.gap.add
        self._is_reused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._load._open.add(self)
        self.is_usable = True

    def send(self, job: _Job) -> None:
        """Write a request. Its time runs from when it was due, so that a late load generator does not flatter the server."""
        self.job = job
        self.reader.begin()
        self.body.clear()
        self.meter = StreamMeter() if job.request.is_stream else None
        self.first_text = self.last_text = 0.0
        now = _clock()
        late = now - job.due
        if self._load._shape.is_open:
            self._load.recorder.late.add(late)
        self.begun = job.due if late > TIMER_SECONDS else now
        self._transport.write(job.request.data)

    def data_received(self, data: bytes) -> None:
        now = _clock()
        job, reader, meter = self.job, self.reader, self.meter
        if job is None:
            self.abandon()  # an answer that nobody asked for (a 408 of an idle connection, say)
            return
        try:
            body = reader.feed(data)
        except BadAnswer as error:
            self.give_up("not HTTP", str(error))
            return
        self._load.recorder.received_bytes += len(data)
        if body:
            if meter is not None and reader.status == 200:
                if found := meter.feed(body):
                    self._load.recorder.text_events += found
                    if self.first_text:
                        self._gap(now - self.last_text)
                    else:
                        self.first_text = now
                    self.last_text = now
            elif len(self.body) < MAX_BODY_BYTES:
                self.body += body
        if reader.is_complete:
            self._complete(job)

    def _complete(self, job: _Job) -> None:
        self.job = None
        self._is_reused = True
        if not self.reader.keeps_alive:
            self.abandon()
        self._load.answered(self, job)

    def connection_lost(self, error: Exception | None) -> None:
        self._forget()
        if (job := self.job) is None:
            return
        if self.reader.end():
            self._complete(job)
            return
        self.job = None
        is_stale = self._is_reused and not self.reader.status
        self._load.lost(job, "connection lost", str(error or "closed before the answer's end"), is_stale=is_stale)

    def give_up(self, kind: str, example: str) -> None:
        """End the request as a failure and close."""
        job, self.job = self.job, None
        self.abandon()
        if job is not None:
            self._load.lost(job, kind, example, is_stale=False)

    def abandon(self) -> None:
        """Close; a request on it is forgotten."""
        self.job = None
        self._forget()
        self._transport.abort()

    def _forget(self) -> None:
        self.is_usable = False
        load = self._load
        load._open.discard(self)
        idle = load._idle[self._target]
        if self in idle:
            idle.remove(self)
