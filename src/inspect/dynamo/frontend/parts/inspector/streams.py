"""The requests in flight as rows. Nothing is done per token: a look reads counters that are there anyway.

A look at all requests is short (about a microsecond for each), and gives their rates. Rows are made only of those that are shown,
and made anew only where something has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.stream_rows import StreamRow, worker_name
from dynamo.frontend.pipeline.exchange import Exchange, ExchangeRegister
from dynamo.protocol.inspector.filters import Filter
from dynamo.protocol.inspector.views import StreamView


class WorkerPulse:
    """What the streams of one worker show of it."""

    __slots__ = ("last_token_at", "rate", "running")

    def __init__(self, rows: Sequence[StreamRow]) -> None:
        self.running = len(rows)
        self.rate = sum([row.rate for row in rows if row.rate])
        times = [at for row in rows if (at := row.progress.last_token_at) is not None]
        self.last_token_at = min(times, default=None)  # of the stream that has been silent for longest


class StreamTable:
    """The register of requests in flight, looked at from time to time. Used on the event loop only."""

    def __init__(self, register: ExchangeRegister, clock: InspectorClock, frontend_id: str) -> None:
        self._register, self._clock, self._frontend_id = register, clock, frontend_id
        self._seen: dict[
            Exchange, StreamRow
        ] = {}  # the requests of the last look that have not ended since, the oldest first
        self._looked_at = 0.0  # loop time

    def __len__(self) -> int:
        return len(self._register)

    def look(self) -> None:
        """Look at all requests."""
        now, before, seen = self._clock.now(), self._looked_at, self._seen
        self._looked_at = now
        if len(seen) < len(self._register):
            for exchange in self._register:
                if exchange not in seen:
                    seen[exchange] = StreamRow(exchange)
        for row in seen.values():
            row.look(now, before)

    def pulses(self) -> dict[str, WorkerPulse]:
        """Return what the last look shows of the workers, by id."""
        rows_of: dict[int | None, list[StreamRow]] = {}
        for row in self._seen.values():
            try:
                rows_of[row.instance_id].append(row)
            except KeyError:
                rows_of[row.instance_id] = [row]
        rows_of.pop(None, None)
        return {worker_name(id): WorkerPulse(rows) for id, rows in rows_of.items() if id is not None}

    def forget(self, exchange: Exchange) -> None:
        """Let go of a request that has ended: it holds its prompt."""
        self._seen.pop(exchange, None)

    def find(self, id: str) -> Exchange | None:
        """Return the request with this id, ours or its client's; None when none is in flight."""
        found = None
        for exchange in self._register:
            if exchange.is_called(id):
                return exchange
            if exchange.arrival.client_request_id == id:
                found = exchange
        return found

    def rows(self, wanted: Filter, sort: str, limit: int) -> tuple[list[StreamView], int]:
        """Return at most `limit` rows of the last look, and how many there are in all."""
        clock, frontend_id = self._clock, self._frontend_id
        key, is_reversed = sort_of(sort)
        seen = list(self._seen.values())  # the oldest first
        if not wanted.terms and key is None:
            shown = seen[::-1][:limit] if is_reversed else seen[:limit]
            return [row.view(clock, frontend_id) for row in shown], len(seen)
        now_ms = clock.now_ms()
        rows = [view for row in seen if wanted.matches(view := row.view(clock, frontend_id), now_ms)]
        if key is not None:
            rows.sort(key=key)
        if is_reversed:
            rows.reverse()
        return rows[:limit], len(rows)

    def matching(self, wanted: Filter) -> list[Exchange]:
        """Return the requests that a filter holds for now."""
        self.look()
        clock, frontend_id = self._clock, self._frontend_id
        now_ms = clock.now_ms()
        return [
            exchange for exchange, row in self._seen.items() if wanted.matches(row.view(clock, frontend_id), now_ms)
        ]

    def row(self, exchange: Exchange) -> StreamView:
        """Return a request as it is now."""
        row = self._seen.get(exchange) or StreamRow(exchange)
        row.look(self._clock.now(), self._looked_at)
        return row.view(self._clock, self._frontend_id)


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
