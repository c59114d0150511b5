"""One request in flight as a row: made once, and made anew only from what has changed of it.

What changes with each token is copied into the last row. Anything else that happens to a request makes its row anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import structs

from dynamo.frontend.base.access import Caller
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.pipeline.exchange import Exchange, Phase
from dynamo.frontend.pipeline.plan import MovableStream, Tally, WorkRequest
from dynamo.protocol.inspector.views import StreamView
from dynamo.router.dispatch.record import FailedAttempt

RATE_SECONDS: Final = 0.5  # two looks that are nearer to each other give no rate: it would jump
STALLED_SECONDS: Final = (
    5.0  # without a token, a hundred times the pace of a slow engine; the stall detector acts later
)
CLIENT_SLOW: Final = "client slow"

_NAMES: Final[Mapping[Phase, str]] = {
    Phase.RECEIVED: "admitted",
    Phase.ADMITTED: "preprocess",
    Phase.PREPROCESSED: "route",
    Phase.DISPATCHED: "prefill",
    Phase.STREAMING: "decode",
    Phase.ENDED: "sending",
}


def worker_name(instance_id: int) -> str:
    """Return a worker's id as logs write it."""
    return f"{instance_id:x}"


def key_name(identity: Caller | None) -> str | None:
    """Return the name of a key; None where no key is needed."""
    return None if identity is None else identity.shown_name


class RowProgress(NamedTuple):
    """How far a request had come at a look."""

    tokens: int
    last_token_at: float | None  # loop time
    is_reading: bool  # whether it waits for its worker, and not for its client
    is_stalled: bool


_NOTHING_YET: Final = RowProgress(0, None, False, False)


class StreamRow:
    """A request as it was at the last look, and its row. Call `look` before anything is read."""

    __slots__ = (
        "_exchange",
        "_failed",
        "_has_progress",
        "_is_followed",
        "_looks_again_at",
        "_rate_at",
        "_rate_tokens",
        "_row",
        "_running",
        "instance_id",
        "progress",
        "rate",
    )

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._row: StreamView | None = None  # None: it has to be made
        self._has_progress = False  # since the row was made: tokens, a rate, a silence
        self._is_followed = False  # it streams from a worker: until a failure or its end, there is only progress to see
        self._looks_again_at = 0.0  # loop time until which even that needs a token, or a client that falls behind
        self._running: tuple[MovableStream, ...] = ()
        self._failed: tuple[FailedAttempt, ...] = ()
        self._rate_at: float | None = None  # since when `rate` is measured: loop time; None: it does not stream yet
        self._rate_tokens = 0  # that there were then
        self.progress = _NOTHING_YET
        self.rate: float | None = None  # tokens per second; None: not known yet
        self.instance_id: int | None = None  # the worker that has it now; None: none has

    # -- looking -------------------------------------------------------------------------------------------------------

    def look(self, now: float, before: float) -> None:
        """Look at the request at loop time `now`. `before`: when all requests were looked at last.

        It runs for each request, so it reads few attributes of a request without news. What happens to a request that streams
        leaves a trace there: a token the time of it, the loss of its worker one more failed attempt.
        """
        exchange = self._exchange
        work, counters = exchange.work, exchange.counters
        if work is None or counters is None or not work.running:
            self._row = self.instance_id = None
            self._is_followed = False
            return
        if (
            self._is_followed
            and exchange.phase is Phase.STREAMING
            and work.running is self._running
            and work.tally.failed_attempts is self._failed
        ):
            last: float | None = counters.progress_at
            if now < self._looks_again_at and last == self.progress.last_token_at and self._running[0].is_reading:
                return
        else:
            last = counters.last_token_at
            self._row, self._running, self._failed = None, work.running, work.tally.failed_attempts
            self.instance_id = self._running[0].instance_id
            is_streaming = exchange.phase is Phase.STREAMING and last is not None
            self._is_followed = is_streaming and self.instance_id is not None
        self._take_progress(now, before, last)

    def _take_progress(self, now: float, before: float, last: float | None) -> None:
        """Take what the tokens show; `last`: when the last one came."""
        running = self._running
        if len(running) == 1:
            tokens, is_reading = running[0].tokens, running[0].is_reading
        else:
            tokens = sum([stream.tokens for stream in running])
            is_reading = any(stream.is_reading for stream in running)
        is_stalled = last is not None and is_reading and now - last >= STALLED_SECONDS
        progress = RowProgress(tokens, last, is_reading, is_stalled)
        if progress != self.progress:
            self.progress = progress
            self._has_progress = True
        if self._looks_again_at > 0.0 and self._rate_at is not None:  # nothing has come until `before`
            self._rate_at = max(self._rate_at, before)  # or the first token would be spread over the silence before it
        if last is not None:
            self._measure(now)
        self._looks_again_at = 0.0
        if self._is_followed and is_reading and self.rate == 0.0 and tokens == self._rate_tokens and last is not None:
            self._looks_again_at = math.inf if is_stalled else last + STALLED_SECONDS

    def _measure(self, now: float) -> None:
        """Take the rate since the last look that gave one; at first the mean since the first token."""
        at, rate, tokens = self._rate_at, self.rate, self.progress.tokens
        if at is None:
            counters = self._exchange.counters
            since = None if counters is None else counters.first_token_seconds
            if since is not None and (seconds := now - self._exchange.arrival.at - since) >= RATE_SECONDS:
                rate = tokens / seconds
        elif now - at >= RATE_SECONDS:
            rate = (tokens - self._rate_tokens) / (now - at)
        else:
            return
        self._rate_at, self._rate_tokens = now, tokens
        if rate != self.rate:
            self.rate = rate
            self._has_progress = True

    # -- the row -------------------------------------------------------------------------------------------------------

    def view(self, clock: InspectorClock, frontend_id: str) -> StreamView:
        """Return the row; the same one as before where nothing has changed. It must not be changed."""
        row = self._row
        if row is None:
            row = self._row = self._made(clock, frontend_id)
            self._has_progress = False
        elif self._has_progress:
            row = self._row = self._advanced(row, clock)
            self._has_progress = False
        return row

    def _advanced(self, before: StreamView, clock: InspectorClock) -> StreamView:
        """Return the row of a request that had tokens, or a silence, since its last row, and nothing else."""
        exchange, progress, rate = self._exchange, self.progress, self.rate
        last = progress.last_token_at
        assert exchange.work is not None
        tally = exchange.work.tally
        row = structs.replace(
            before,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=tally.cached_tokens,
            output_tokens=progress.tokens,
            tokens_per_second=None if rate is None else round(rate, 2),
            last_token_ms=None if last is None else clock.ms(last),
            is_stalled=progress.is_stalled,
        )
        if not progress.is_reading or row.phase != _NAMES[Phase.STREAMING]:
            self._judge_silence(row, clock)
        return row

    def _judge_silence(self, row: StreamView, clock: InspectorClock) -> None:
        """Distinguish a client that is behind from a worker that sends nothing."""
        last = self.progress.last_token_at
        if self.progress.is_reading:
            row.phase, row.phase_ms = _NAMES[Phase.STREAMING], clock.ms(_entered(self._exchange))
        else:  # a stream whose worker was lost is not read, either, until another one has it
            row.phase = _NAMES[Phase.PREPROCESSED] if self.instance_id is None else CLIENT_SLOW
            row.phase_ms = row.phase_ms if last is None else clock.ms(last)
        row.is_stalled = self.progress.is_stalled

    def _made(self, clock: InspectorClock, frontend_id: str) -> StreamView:
        exchange = self._exchange
        arrival, counters, work = exchange.arrival, exchange.counters, exchange.work
        row = StreamView(
            id=exchange.response_id,
            client_request_id=arrival.client_request_id,
            frontend=frontend_id,
            key=key_name(exchange.identity),
            model=exchange.model,
            served_by=exchange.served_model if exchange.fallbacks else None,
            endpoint=arrival.path,
            phase=_NAMES[exchange.phase],
            started_ms=clock.ms(arrival.at),
            phase_ms=clock.ms(_entered(exchange)),
        )
        if counters is not None:
            _, row.endpoint, kind = counters.key
            row.is_streaming = kind == "stream"
            row.ttft_seconds = counters.first_token_seconds
            last = counters.last_token_at
            row.last_token_ms = None if last is None else clock.ms(last)
        if work is not None:
            self._add_work(row, exchange, work, clock)
        return row

    def _add_work(self, row: StreamView, exchange: Exchange, work: WorkRequest, clock: InspectorClock) -> None:
        tally, fields, running = work.tally, work.plan.fields, work.running
        row.queued_seconds = tally.queued_seconds
        row.prompt_tokens = tally.prompt_tokens
        row.cached_tokens = tally.cached_tokens
        row.choices = work.plan.choices
        row.max_tokens = fields.stop_conditions.max_tokens
        row.priority = fields.routing.get("priority") or 0
        row.workers = [worker_name(each) for each in tally.instance_ids]
        if running:
            first = running[0]
            row.attempt = max(1, first.attempts)
            instance_id = first.instance_id
            if instance_id is not None and (name := worker_name(instance_id)) not in row.workers[-1:]:
                row.workers.append(name)
        row.output_tokens = self.progress.tokens
        if self.rate is not None:
            row.tokens_per_second = round(self.rate, 2)
        if exchange.phase is Phase.STREAMING and running:
            self._judge_silence(row, clock)
        elif exchange.phase in (Phase.PREPROCESSED, Phase.DISPATCHED):
            row.phase = _before_tokens(exchange.phase, tally, running)


def _before_tokens(phase: Phase, tally: Tally, running: Sequence[MovableStream]) -> str:
    """Return what a request without a token is doing, as far as its record shows."""
    if phase is Phase.PREPROCESSED:
        return "queued" if running and not running[0].attempts else "route"
    if tally.prefill_instance_id is not None:
        return "transfer"
    return "prefill"


def _entered(exchange: Exchange) -> float:
    at = exchange.phase_times[exchange.phase]
    return exchange.arrival.at if at is None else at
