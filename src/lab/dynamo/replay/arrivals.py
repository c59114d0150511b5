"""When the requests of a trace are sent: at their times, or when others have ended. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dynamo.replay.setup import ReplaySetup
from dynamo.replay.trace import Trace, TraceRequest

__all__ = ["Arrivals"]


class Arrivals:
    """When the requests of a trace are sent."""

    def __init__(self, trace: Trace, setup: ReplaySetup) -> None:
        self._is_closed = setup.concurrency is not None
        self._ratio = setup.arrival_speedup_ratio
        self._room = setup.concurrency or 0
        self._timed: deque[TraceRequest] = deque()
        self._turns: dict[str, deque[TraceRequest]] = {}
        for request in trace.requests:
            if request.delay_ms is not None and request.session_id is not None:
                self._turns.setdefault(request.session_id, deque()).append(request)
            else:
                self._timed.append(request)
        self._begin_ms = self._timed[0].arrival_ms if self._timed else 0.0
        self._length_ms = self._timed[-1].arrival_ms - self._begin_ms if self._timed else 0.0

    def time_of(self, share: float) -> float:
        """Return when a share of the trace has passed."""
        return share * self._length_ms / self._ratio

    def next(self, now_ms: float) -> tuple[float, TraceRequest] | None:
        """Return the next request with the time that it is due; None: nothing is due until something ends."""
        if not self._timed or (self._is_closed and not self._room):
            return None
        request = self._timed.popleft()
        if self._is_closed:
            self._room -= 1
            return now_ms, request
        return (request.arrival_ms - self._begin_ms) / self._ratio, request

    def after(self, ended: TraceRequest, now_ms: float) -> Sequence[tuple[float, TraceRequest]]:
        """Return what becomes due because a request has ended: the next turn of its session, the next of a closed loop."""
        due: list[tuple[float, TraceRequest]] = []
        turns = self._turns.get(ended.session_id) if ended.session_id is not None else None
        if turns:
            request = turns.popleft()
            due.append((now_ms + (request.delay_ms or 0.0) / self._ratio, request))
        elif self._is_closed:
            self._room += 1
            if (found := self.next(now_ms)) is not None:
                due.append(found)
        return due
