"""The kept-alive connections of a load: at most so many, each with at most one request on it.

A request costs no task, a token no object: a connection is an `asyncio.Protocol`, and its `data_received` feeds the
answer's reader and the recorder.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, cast

from dynamo.cli.bench.answers import AnswerReader, BadAnswer, StreamMeter, error_of, usage_of
from dynamo.cli.bench.samples import Recorder
from dynamo.cli.bench.targets import Target

CONNECT_SECONDS: Final = 10.0
MAX_BODY_BYTES: Final = 64 << 20
TIMER_SECONDS: Final = 0.002  # the loop's timers tick in milliseconds; a request sent so late was sent on time

clock: Final = time.perf_counter  # loop.time() of uvloop has a resolution of 1 ms


class Prepared(NamedTuple):
    """A request, ready to be written."""

    data: bytes
    is_stream: bool


@dataclass(slots=True)
class SentRequest:
    """One request on its way, and what has come of its answer."""

    request: Prepared
    target: int
    due: float
    is_retry: bool = False
    meter: StreamMeter | None = None
    body: bytearray = field(default_factory=bytearray)
    begun: float = 0.0
    first_text: float = 0.0
    last_text: float = 0.0

    def begin(self, now: float) -> float:
        """Begin to be sent, and return how late that is. The time of a request runs from when it was due, so that a late
        load generator does not flatter the server.
        """
        late = now - self.due
        self.begun = self.due if late > TIMER_SECONDS else now
        self.meter = StreamMeter() if self.request.is_stream else None
        self.body.clear()
        self.first_text = self.last_text = 0.0
        return late


class Answers(Protocol):
    """The receiver of the outcome of a request."""

    def answered(self, connection: ClientConnection, job: SentRequest) -> None:
        """Take the whole answer of `job` as arrived."""

    def lost(self, job: SentRequest, kind: str, example: str, *, is_stale: bool) -> None:
        """Handle the loss of the connection of `job`. `is_stale`: the server closed a kept-alive connection before
        it answered.
        """


class ConnectionPool:
    """The open connections by target. A closed one forgets itself here."""

    def __init__(self, targets: Sequence[Target], limit: int, recorder: Recorder) -> None:
        self.targets = targets
        self.recorder = recorder
        self.open: set[ClientConnection] = set()
        self.connecting: set[asyncio.Task[None]] = set()  # connections on their way
        self._idle: list[list[ClientConnection]] = [[] for _ in targets]
        self._limit = limit

    async def connect(self, target: int, answers: Answers) -> ClientConnection:
        """Open a connection. Raises OSError and TimeoutError."""
        to = self.targets[target]
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: ClientConnection(self, target, answers), to.host, to.port, ssl=to.tls
            )
        self.recorder.connections += 1
        return connection

    def has_room(self) -> bool:
        """Return whether one more connection may be opened; closes an idle one to another target to make room."""
        if len(self.open) + len(self.connecting) < self._limit:
            return True
        for idle in self._idle:
            if idle:
                idle[-1].abandon()
                return True
        return False

    def take_idle(self, target: int) -> ClientConnection | None:
        """Return the connection to `target` that was used last, or None."""
        idle = self._idle[target]
        return idle.pop() if idle else None

    def keep_idle(self, connection: ClientConnection) -> None:
        """Keep a connection for the next request to its target."""
        self._idle[connection.target].append(connection)

    def forget(self, connection: ClientConnection) -> None:
        """Drop a connection that is closed."""
        self.open.discard(connection)
        idle = self._idle[connection.target]
        if connection in idle:
            idle.remove(connection)

    def abandon_all(self) -> None:
        """Close every connection, those on their way included."""
        for task in self.connecting:
            task.cancel()
        for connection in list(self.open):
            connection.abandon()


class ClientConnection(asyncio.Protocol):
    """One kept-alive connection with at most one request on it."""

    def __init__(self, pool: ConnectionPool, target: int, answers: Answers) -> None:
        self.target = target
        self.job: SentRequest | None = None
        self.reader = AnswerReader()
        self.is_usable = False
        self._pool, self._answers = pool, answers
        self._gap = pool.recorder.gap.add
        self._is_reused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.open.add(self)
        self.is_usable = True

    def send(self, job: SentRequest) -> None:
        """Write a request that was begun."""
        self.job = job
        self.reader.begin()
        self._transport.write(job.request.data)

    def data_received(self, data: bytes) -> None:
        now = clock()
        job, reader = self.job, self.reader
        if job is None:
            self.abandon()  # an answer without a request (such as a 408 of an idle connection)
            return
        try:
            body = reader.feed(data)
        except BadAnswer as error:
            self.give_up("not HTTP", str(error))
            return
        self._pool.recorder.received_bytes += len(data)
        if body:
            meter = job.meter
            if meter is not None and reader.status == 200:
                if found := meter.feed(body):
                    self._pool.recorder.text_events += found
                    if job.first_text:
                        self._gap(now - job.last_text)
                    else:
                        job.first_text = now
                    job.last_text = now
            elif len(job.body) < MAX_BODY_BYTES:
                job.body += body
        if reader.is_complete:
            self._complete(job)

    def _complete(self, job: SentRequest) -> None:
        self.job = None
        self._is_reused = True
        if not self.reader.keeps_alive:
            self.abandon()
        self._answers.answered(self, job)

    def connection_lost(self, error: Exception | None) -> None:
        self._forget()
        if (job := self.job) is None:
            return
        if self.reader.end():
            self._complete(job)
            return
        self.job = None
        is_stale = self._is_reused and not self.reader.status
        self._answers.lost(job, "connection lost", str(error or "closed before the answer's end"), is_stale=is_stale)

    def give_up(self, kind: str, example: str) -> None:
        """End the request as a failure and close."""
        job, self.job = self.job, None
        self.abandon()
        if job is not None:
            self._answers.lost(job, kind, example, is_stale=False)

    def abandon(self) -> None:
        """Close; a request on it is forgotten."""
        self.job = None
        self._forget()
        self._transport.abort()

    def _forget(self) -> None:
        self.is_usable = False
        self._pool.forget(self)


def failure_of(reader: AnswerReader, job: SentRequest) -> tuple[str, str] | None:
    """Return the kind of failure of a whole answer and an example of it; None for a success."""
    if reader.status != 200:
        return f"HTTP {reader.status}", error_of(bytes(job.body))
    return job.meter.failure if job.meter is not None else None


def record_answer(recorder: Recorder, job: SentRequest, now: float) -> None:
    """Count a request that was answered in full at `now`."""
    meter = job.meter
    prompt, tokens = meter.usage if meter is not None else usage_of(bytes(job.body))
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
    took = now - job.begun
    recorder.whole.add(took)
    interval = recorder.timeline.at(now - recorder.begun)
    interval.answered += 1
    interval.tokens += tokens
    interval.slowest = max(interval.slowest, took)
    if meter is not None and job.first_text:
        first = job.first_text - job.begun
        recorder.first_token.add(first)
        interval.first_token_total += first
        interval.first_tokens += 1
        if tokens > 1:
            recorder.per_token.add((job.last_text - job.first_text) / (tokens - 1))
