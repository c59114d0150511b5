"""Requests that have ended: a short record for each, made into a row only when a viewer polls."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from dynamo.frontend.base.access import Caller
from dynamo.frontend.base.metrics.requests import RequestMetrics
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.stream_rows import key_name, worker_name
from dynamo.frontend.pipeline.exchange import Exchange, FallbackStep, KeyRevoked, RequestAborted
from dynamo.frontend.pipeline.outcome import Outcome
from dynamo.protocol.inspector.filters import Filter
from dynamo.protocol.inspector.views import RecentView
from dynamo.protocol.openai.errors import ABORTED_CODE, RequestRejected
from dynamo.protocol.request_ids import uuid_in
from dynamo.router.dispatch.record import served_by
from dynamo.runtime.calls.request_plane.base import Instance

KEPT: Final = 1000
KEPT_LONGER: Final = 200  # of the slow and the failed ones, which are needed when others have long pushed them out
SLOW_SECONDS: Final = 30.0
MAX_MESSAGE: Final = 512  # characters

_SHED: Final = frozenset({429, 503, 529})


class EndedRequest(Struct, gc=False):  # nothing that it refers to refers to it
    """What is kept of a request that has ended: no prompt, and nothing that holds one.

    It is made for each request, so it refers to what is there; what only a reader needs is made of it when one comes.
    """

    exchange_id: str
    client_request_id: str | None
    identity: Caller | None  # the key behind it
    model: str | None
    path: str
    counters: RequestMetrics | None
    phase_times: list[float | None]
    status: int
    outcome: str
    code: str | None
    message: str | None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    queued_seconds: float = 0.0
    instances: Sequence[Instance] = ()  # the workers that answered
    encode_instance_id: int | None = None  # the worker that encoded its media, if one did
    prefill_instance_id: int | None = None  # the worker that computed its prompt, if that was another one
    moves: int = 0
    fallbacks: Sequence[FallbackStep] = ()  # the models that were tried before the one that served
    view: RecentView | None = None  # None: no viewer has polled yet

    @property
    def ended_at(self) -> float:
        return self.phase_times[-1] or 0.0


class RecentRequests:
    """Two rings: of all requests, and of those that failed or were slow. Used on the event loop only."""

    def __init__(self, clock: InspectorClock, frontend_id: str) -> None:
        self._clock, self._frontend_id = clock, frontend_id
        self._all: deque[EndedRequest] = deque(maxlen=KEPT)
        self._kept: deque[EndedRequest] = deque(maxlen=KEPT_LONGER)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, exchange: Exchange, outcome: Outcome) -> EndedRequest:
        """Take a request that has just ended. Short: it runs for each request, with or without a viewer."""
        arrival, work, times, rejected = exchange.arrival, exchange.work, exchange.phase_times, outcome.rejected
        word, code, message = "ok" if outcome.is_answered else "cancelled", None, None
        if rejected is not None:
            word, code, message = _outcome(exchange, rejected), rejected.code, _message(exchange, rejected)
        usage = outcome.usage
        ended = EndedRequest(
            exchange.response_id, arrival.client_request_id, arrival.identity, exchange.model, arrival.path,
            exchange.counters, times, outcome.status, word, code, message, usage.prompt_tokens, usage.cached_tokens,
            usage.output_tokens,
        )  # fmt: skip
        ended.fallbacks = exchange.fallbacks
        if work is not None:
            tally = work.tally
            ended.finish_reason, ended.queued_seconds = tally.finish_reason, tally.queued_seconds
            ended.instances = outcome.instances
            ended.encode_instance_id, ended.prefill_instance_id = tally.encode_instance_id, tally.prefill_instance_id
            ended.moves = len(outcome.moves)
        self._all.append(ended)
        if word != "ok" or (times[-1] or 0.0) - arrival.at >= SLOW_SECONDS:
            self._kept.append(ended)
        return ended

    def rows(self, wanted: Filter, limit: int) -> tuple[list[RecentView], int]:
        """Return at most `limit` rows, the newest first, and how many there are in all."""
        newest = self._newest_first()
        if not wanted.terms:
            return [self.row(ended) for ended in newest[:limit]], len(newest)
        now_ms = self._clock.now_ms()
        rows = [row for ended in newest if wanted.matches(row := self.row(ended), now_ms)]
        return rows[:limit], len(rows)

    def find(self, id: str) -> EndedRequest | None:
        """Return the last request with this id, ours or its client's; None: it is not known any more."""
        known = uuid_in(id)
        return next(
            (
                ended
                for ended in self._newest_first()
                if id in (ended.exchange_id, ended.client_request_id) or uuid_in(ended.exchange_id) == known
            ),
            None,
        )

    def ended(self) -> list[EndedRequest]:
        """Return what is kept, the newest first."""
        return self._newest_first()

    def _newest_first(self) -> list[EndedRequest]:
        oldest = self._all[0].ended_at if len(self._all) == KEPT else None
        older = [] if oldest is None else [one for one in self._kept if one.ended_at < oldest]
        return [*reversed(self._all), *reversed(older)]

    def row(self, ended: EndedRequest) -> RecentView:
        """Return a request as a row, which is made once. It must not be changed."""
        if ended.view is None:
            ended.view = self._made(ended)
        return ended.view

    def _made(self, ended: EndedRequest) -> RecentView:
        clock, times, counters = self._clock, ended.phase_times, ended.counters
        workers = served_by(ended.encode_instance_id, ended.prefill_instance_id, ended.instances)
        return RecentView(
            id=ended.exchange_id,
            client_request_id=ended.client_request_id,
            frontend=self._frontend_id,
            key=key_name(ended.identity),
            model=ended.model,
            served_by=ended.fallbacks[-1].next_model if ended.fallbacks else None,
            endpoint=ended.path if counters is None else counters.key[1],
            started_ms=clock.ms(times[0] or 0.0),
            ended_ms=clock.ms(ended.ended_at),
            status=ended.status,
            outcome=ended.outcome,
            code=ended.code,
            message=ended.message,
            finish_reason=ended.finish_reason,
            queued_seconds=ended.queued_seconds,
            ttft_seconds=None if counters is None else counters.first_token_seconds,
            prompt_tokens=ended.prompt_tokens,
            cached_tokens=ended.cached_tokens,
            output_tokens=ended.output_tokens,
            workers=[worker_name(each) for each in workers],
            attempts=ended.moves + 1,
        )


_QUOTED: Final = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`")


def _message(exchange: Exchange, rejected: RequestRejected) -> str | None:
    """Return what an operator may read of an error without seeing what the client wrote.

    Quoted parts are left out. So is the whole text of an error that finds fault with a request: it may repeat all of it.
    """
    if rejected.status in (400, 422) or (
        rejected.status < 500 and exchange.work is not None and rejected.code != ABORTED_CODE
    ):
        return None
    return _QUOTED.sub("'...'", rejected.message[:MAX_MESSAGE])


def _outcome(exchange: Exchange, rejected: RequestRejected) -> str:
    if isinstance(exchange.reason, RequestAborted):
        return "aborted"
    if isinstance(exchange.reason, KeyRevoked):
        return "cancelled"
    # Refused for want of room, before it was worked on: no worker has failed.
    return "shed" if rejected.status in _SHED and exchange.work is None else "failed"
