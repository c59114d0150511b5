"""The requests in flight as rows. Nothing is done per token: a look reads counters that are there anyway.

A look at all requests is short (about a microsecond for each), and gives their rates. Rows are made only of those that are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from dynamo.frontend.inspector.clock import InspectorClock
from dynamo.frontend.pipeline.exchange import Exchange, ExchangeRegister, Phase
from dynamo.frontend.pipeline.plan import MovableStream, Tally, WorkRequest
from dynamo.protocol.inspector.filters import Filter
from dynamo.protocol.inspector.views import StreamView

__all__ = [
    "RATE_SECONDS",
    "SORTS",
    "STALLED_SECONDS",
    "StreamTable",
    "WorkerPulse",
    "key_name",
    "sort_of",
    "worker_name",
]

RATE_SECONDS: Final = 0.5  # two looks that are nearer to each other give no rate: it would jump
STALLED_SECONDS: Final = (
    5.0  # without a token, a hundred times the pace of a slow engine; the stall detector acts later
)

_NAMES: Final[Mapping[Phase, str]] = {
    Phase.RECEIVED: "admitted",
    Phase.ADMITTED: "preprocess",
    Phase.PREPROCESSED: "route",
    Phase.DISPATCHED: "prefill",
    Phase.STREAMING: "decode",
    Phase.ENDED: "sending",
}


class _Pace(NamedTuple):
    """How far a request had come at a look."""

    at: float  # loop time
    tokens: int
    rate: float | None  # tokens per second; None: not known yet


class WorkerPulse:
    """What the streams of one worker show of it."""

    __slots__ = ("last_token_at", "rate", "running")

    def __init__(self) -> None:
        self.running = 0
        self.rate = 0.0
        self.last_token_at: float | None = None  # of the stream that has been silent for longest


def worker_name(instance_id: int) -> str:
    """Return a worker's id as logs write it."""
    return f"{instance_id:x}"


def key_name(exchange: Exchange) -> str | None:
    """Return the name of the key behind a request; None where no key is needed."""
    identity = exchange.identity
    return None if identity is None else identity.record.name or identity.id


class StreamTable:
    """The register of requests in flight, looked at from time to time. Used on the event loop only."""

    def __init__(self, register: ExchangeRegister, clock: InspectorClock, frontend_id: str) -> None:
        self._register, self._clock, self._frontend_id = register, clock, frontend_id
        self._paces: dict[Exchange, _Pace] = {}  # of the requests of the last look

    def __len__(self) -> int:
        return len(self._register)

    def look(self) -> dict[str, WorkerPulse]:
        """Look at all requests; return what they show of the workers, by id."""
        now, known, paces = self._clock.now(), self._paces, dict[Exchange, _Pace]()
        workers: dict[str, WorkerPulse] = {}
        for exchange in self._register:
            work = exchange.work
            if work is None or not work.running:
                continue
            tokens = 0
            for stream in work.running:
                tokens += stream.tokens
            pace = paces[exchange] = _next_pace(known.get(exchange), exchange, tokens, now)
            instance_id = work.running[0].instance_id
            if instance_id is None:
                continue
            name = worker_name(instance_id)
            pulse = workers.get(name)
            if pulse is None:
                pulse = workers[name] = WorkerPulse()
            pulse.running += 1
            pulse.rate += pace.rate or 0.0
            if exchange.counters is not None and (last := exchange.counters.last_token_at) is not None:
                pulse.last_token_at = last if pulse.last_token_at is None else min(last, pulse.last_token_at)
        self._paces = paces
        return workers

    def find(self, id: str) -> Exchange | None:
        """Return the request with this id, ours or its client's; None when none is in flight."""
        found = None
        for exchange in self._register:
            if exchange.context.id() == id:
                return exchange
            if exchange.arrival.client_request_id == id:
                found = exchange
        return found

    def rows(self, wanted: Filter, sort: str, limit: int) -> tuple[list[StreamView], int]:
        """Return at most `limit` rows, and how many there are in all. Call `look` before."""
        key, is_reversed = sort_of(sort)
        if not wanted.terms and key is None:
            exchanges = list(self._register)  # the oldest first
            shown = exchanges[::-1][:limit] if is_reversed else exchanges[:limit]
            return [self.row(exchange) for exchange in shown], len(exchanges)
        now_ms = self._clock.now_ms()
        rows = [row for exchange in self._register if wanted.matches(row := self.row(exchange), now_ms)]
        if key is not None:
            rows.sort(key=key)
        if is_reversed:
            rows.reverse()
        return rows[:limit], len(rows)

    def matching(self, wanted: Filter) -> list[Exchange]:
        """Return the requests that a filter holds for."""
        now_ms = self._clock.now_ms()
        return [exchange for exchange in self._register if wanted.matches(self.row(exchange), now_ms)]

    def row(self, exchange: Exchange) -> StreamView:
        """Return a request as a row."""
        clock, arrival, counters, work = self._clock, exchange.arrival, exchange.counters, exchange.work
        view = StreamView(
            id=exchange.context.id(),
            client_request_id=arrival.client_request_id,
            frontend=self._frontend_id,
            key=key_name(exchange),
            model=exchange.model,
            endpoint=arrival.path,
            phase=_NAMES[exchange.phase],
            started_ms=clock.ms(arrival.at),
            phase_ms=clock.ms(_entered(exchange)),
        )
        if counters is not None:
            _, view.endpoint, kind = counters.key
            view.is_streaming = kind == "stream"
            view.ttft_seconds = counters.first_token_seconds
            last = counters.last_token_at
            view.last_token_ms = None if last is None else clock.ms(last)
        if work is not None:
            self._add_work(view, exchange, work)
        return view

    def _add_work(self, view: StreamView, exchange: Exchange, work: WorkRequest) -> None:
        tally, body, running = work.tally, work.plan.body, work.running
        view.queued_seconds = tally.queued_seconds
        view.prompt_tokens = tally.prompt_tokens
        view.cached_tokens = tally.cached_tokens
        view.choices = work.plan.choices
        view.max_tokens = _limit_of(body)
        view.priority = int((body.get("routing") or {}).get("priority") or 0)
        for stream in running:
            view.output_tokens += stream.tokens
        view.workers = [worker_name(each) for each in tally.instance_ids]
        if running:
            first = running[0]
            view.attempt = max(1, first.attempts)
            instance_id = first.instance_id
            if instance_id is not None and (name := worker_name(instance_id)) not in view.workers[-1:]:
                view.workers.append(name)
        pace = self._paces.get(exchange)
        if pace is not None and pace.rate is not None:
            view.tokens_per_second = round(pace.rate, 2)
        if exchange.phase is Phase.STREAMING:
            self._judge_silence(view, exchange, work)
        elif exchange.phase in (Phase.PREPROCESSED, Phase.DISPATCHED):
            view.phase = _before_tokens(exchange.phase, tally, running)

    def _judge_silence(self, view: StreamView, exchange: Exchange, work: WorkRequest) -> None:
        """Tell a client that is behind from a worker that sends nothing."""
        assert exchange.counters is not None
        last = exchange.counters.last_token_at
        if work.running and not any(stream.is_reading for stream in work.running):
            view.phase = "client slow"
            view.phase_ms = view.phase_ms if last is None else self._clock.ms(last)
        elif last is not None:
            view.is_stalled = self._clock.now() - last >= STALLED_SECONDS


def _before_tokens(phase: Phase, tally: Tally, running: Sequence[MovableStream]) -> str:
    """Return what a request without a token is doing, as far as its record shows."""
    if phase is Phase.PREPROCESSED:
        return "queued" if running and not running[0].attempts else "route"
    if tally.prefill_instance_id is not None:
        return "transfer"
    return "prefill"


def _limit_of(body: Mapping[str, Any]) -> int | None:
    most = (body.get("stop_conditions") or {}).get("max_tokens")
    return most if isinstance(most, int) else None


def _entered(exchange: Exchange) -> float:
    at = exchange.phase_times[exchange.phase]
    return exchange.arrival.at if at is None else at


def _next_pace(before: _Pace | None, exchange: Exchange, tokens: int, now: float) -> _Pace:
    if before is None:
        counters = exchange.counters
        since = None if counters is None else counters.first_token_seconds
        if since is None:
            return _Pace(now, tokens, None)
        seconds = now - exchange.arrival.at - since
        return _Pace(now, tokens, tokens / seconds if seconds >= RATE_SECONDS else None)
    seconds = now - before.at
    if seconds < RATE_SECONDS:
        return before
    return _Pace(now, tokens, (tokens - before.tokens) / seconds)


_Key = Callable[[StreamView], Any]


def _largest(name: str) -> _Key:
    return lambda row: -(getattr(row, name) or 0)


def _alphabetical(name: str) -> _Key:
    return lambda row: getattr(row, name) or ""


SORTS: Final[Mapping[str, _Key | None]] = {
    "age": None,  # the oldest first, which is the order of the register
    "out": _largest("output_tokens"),
    "in": _largest("prompt_tokens"),
    "rate": _largest("tokens_per_second"),
    "wait": _largest("queued_seconds"),
    "ttft": _largest("ttft_seconds"),
    "silent": lambda row: row.last_token_ms or row.phase_ms,
    "id": _alphabetical("id"),
    "key": _alphabetical("key"),
    "model": _alphabetical("model"),
    "phase": _alphabetical("phase"),
    "worker": lambda row: row.workers[-1:],
}
"""What streams can be sorted by; a `-` before the name turns the order round."""


def sort_of(sort: str) -> tuple[_Key | None, bool]:
    """Return what streams are sorted by, None: their age; and whether the order is turned round."""
    return SORTS[sort.removeprefix("-")], sort.startswith("-")
