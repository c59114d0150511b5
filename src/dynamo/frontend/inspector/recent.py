"""Requests that have ended: a short record for each, made into a row only when somebody looks."""

from __future__ import annotations

import re
from collections import deque
from typing import Final, NamedTuple

from dynamo.frontend.inspector.clock import InspectorClock
from dynamo.frontend.inspector.streams import key_name, worker_name
from dynamo.frontend.pipeline.exchange import Exchange, KeyRevoked, RequestAborted
from dynamo.protocol.inspector.filters import Filter
from dynamo.protocol.inspector.views import RecentView
from dynamo.protocol.openai.errors import ABORTED_CODE, RequestRejected

__all__ = ["KEPT", "KEPT_LONGER", "SLOW_SECONDS", "EndedRequest", "RecentRequests"]

KEPT: Final = 1000
KEPT_LONGER: Final = 200  # of the slow and the failed ones, which are looked for when others have long pushed them out
SLOW_SECONDS: Final = 30.0
MAX_MESSAGE: Final = 512  # characters

_CLIENT_LEFT: Final = 499
_SHED: Final = frozenset({429, 503, 529})


class EndedRequest(NamedTuple):
    """What is kept of a request that has ended: no prompt, and nothing that holds one."""

    exchange_id: str
    client_request_id: str | None
    key: str | None
    model: str | None
    endpoint: str
    phase_times: list[float | None]
    status: int
    outcome: str
    code: str | None
    message: str | None
    usage: tuple[int, int | None, int]  # prompt, cached and output tokens
    finish_reason: str | None
    queued_seconds: float
    ttft_seconds: float | None
    instance_ids: tuple[int, ...]
    moves: int

    @property
    def seconds(self) -> float:
        return (self.phase_times[-1] or 0.0) - (self.phase_times[0] or 0.0)


class RecentRequests:
    """Two rings: of all requests, and of those that failed or were slow. Used on the event loop only."""

    def __init__(self, clock: InspectorClock, frontend_id: str) -> None:
        self._clock, self._frontend_id = clock, frontend_id
        self._all: deque[EndedRequest] = deque(maxlen=KEPT)
        self._kept: deque[EndedRequest] = deque(maxlen=KEPT_LONGER)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, exchange: Exchange) -> EndedRequest:
        """Take a request that has just ended."""
        tally, counters, rejected = exchange.tally, exchange.counters, exchange.early_end.outcome
        outcome, status = "ok", 200
        if exchange.is_client_gone:
            outcome, status = "cancelled", _CLIENT_LEFT
        elif rejected is not None:
            outcome, status = _outcome(exchange, rejected), rejected.status
        ended = EndedRequest(
            exchange.context.id(),
            exchange.arrival.client_request_id,
            key_name(exchange),
            exchange.model,
            exchange.arrival.path if counters is None else counters.key[1],
            exchange.phase_times,
            status,
            outcome,
            None if rejected is None else rejected.code,
            None if rejected is None else _message(exchange, rejected),
            (0, None, 0) if tally is None else (tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens),
            None if tally is None else tally.finish_reason,
            0.0 if tally is None else tally.queued_seconds,
            None if counters is None else counters.first_token_seconds,
            () if tally is None else tally.instance_ids,
            0 if tally is None else len(tally.moves),
        )
        self._all.append(ended)
        if outcome != "ok" or ended.seconds >= SLOW_SECONDS:
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
        return next(
            (ended for ended in self._newest_first() if id in (ended.exchange_id, ended.client_request_id)), None
        )

    def ended(self) -> list[EndedRequest]:
        """Return what is kept, the newest first."""
        return self._newest_first()

    def _newest_first(self) -> list[EndedRequest]:
        oldest = self._all[0].phase_times[-1] if len(self._all) == KEPT else None
        older = [] if oldest is None else [one for one in self._kept if (one.phase_times[-1] or 0.0) < oldest]
        return [*reversed(self._all), *reversed(older)]

    def row(self, ended: EndedRequest) -> RecentView:
        """Return a request as a row."""
        clock, times = self._clock, ended.phase_times
        return RecentView(
            id=ended.exchange_id,
            client_request_id=ended.client_request_id,
            frontend=self._frontend_id,
            key=ended.key,
            model=ended.model,
            endpoint=ended.endpoint,
            started_ms=clock.ms(times[0] or 0.0),
            ended_ms=clock.ms(times[-1] or 0.0),
            status=ended.status,
            outcome=ended.outcome,
            code=ended.code,
            message=ended.message,
            finish_reason=ended.finish_reason,
            queued_seconds=ended.queued_seconds,
            ttft_seconds=ended.ttft_seconds,
            prompt_tokens=ended.usage[0],
            cached_tokens=ended.usage[1],
            output_tokens=ended.usage[2],
            workers=[worker_name(each) for each in ended.instance_ids],
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
