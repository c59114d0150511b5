"""What an operator may do: end requests. Every action is noted, also one that was refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from dynamo.frontend.parts.inspector.stream_rows import worker_name
from dynamo.frontend.parts.inspector.tables import Tables
from dynamo.frontend.pipeline.exchange import Exchange, RequestAborted
from dynamo.protocol.inspector.actions import AbortResult, BulkAbortResult
from dynamo.protocol.inspector.filters import parse_filter

logger = logging.getLogger(__name__)

MAX_SHOWN_IDS: Final = 100


class ActionRate:
    """A bound on how often operators act: some at once, then one each half a second."""

    AT_ONCE: Final = 20.0
    PER_SECOND: Final = 2.0

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._left = self.AT_ONCE
        self._at: float | None = None

    def take(self) -> bool:
        """Return whether one more action may take place now."""
        now = self._now()
        if self._at is not None:
            self._left = min(self.AT_ONCE, self._left + (now - self._at) * self.PER_SECOND)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Actions:
    """The actions of one process. Used on the event loop only."""

    def __init__(self, tables: Tables, now: Callable[[], float]) -> None:
        self._streams, self._recent, self._events = tables.streams, tables.recent, tables.events
        self._frontend_id = tables.frontend_id
        self.rate = ActionRate(now)

    def note(
        self, what: str, by: str, outcome: str, *, request_id: str | None = None, worker: str | None = None
    ) -> None:
        """Note an action, or that it was refused, in the log and among the events."""
        logger.info("inspector: %s by %s: %s", what, by, outcome)
        self._events.add("action", f"{what}: {outcome}", request_id=request_id, worker=worker, by=by)

    def abort(self, id: str, reason: str) -> AbortResult | None:
        """End the request with this id, ours or its client's; None: there is none, and none was aborted."""
        exchange = self._streams.find(id)
        if exchange is not None:
            return self._abort(exchange, reason)
        ended = self._recent.find(id)
        if ended is None or ended.outcome != "aborted":
            return None
        return AbortResult(
            id=ended.exchange_id, status="aborted", frontend=self._frontend_id, message="It had ended so before."
        )

    def abort_matching(self, filter: str, reason: str, *, dry_run: bool) -> BulkAbortResult:
        """End the requests that a filter holds for, or count them. Raises FilterError."""
        found = self._streams.matching(parse_filter(filter))
        if not dry_run:
            for exchange in found:
                exchange.abort(RequestAborted(reason))
        ids = [exchange.response_id for exchange in found[:MAX_SHOWN_IDS]]
        return BulkAbortResult(matched=len(found), aborted=0 if dry_run else len(found), dry_run=dry_run, ids=ids)

    def _abort(self, exchange: Exchange, reason: str) -> AbortResult:
        row = self._streams.row(exchange)
        running = () if exchange.work is None else exchange.work.running
        workers = [worker_name(each.instance_id) for each in running if each.instance_id is not None]
        exchange.abort(RequestAborted(reason))
        told = f"worker {', '.join(dict.fromkeys(workers))} got a kill" if workers else "no worker had it"
        return AbortResult(
            id=row.id,
            status="aborting",
            frontend=self._frontend_id,
            phase=row.phase,
            workers=list(dict.fromkeys(workers)),
            message=f"The client gets the error request_aborted; {told}.",
        )
