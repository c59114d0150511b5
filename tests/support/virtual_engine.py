"""A scheduler core under virtual time: when each request got its tokens."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from dynamo.scheduling import BlockRun, EvictedBlocks, ScheduledRequest, SchedulerCore

__all__ = ["Timeline", "play"]


@dataclass
class Timeline:
    """What one core did."""

    tokens_at: dict[str, list[float]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    events: list[BlockRun | EvictedBlocks] = field(default_factory=list)
    passes: int = 0

    def ttft(self, request: ScheduledRequest) -> float:
        return self.tokens_at[request.request_id][0] - request.submitted_ms

    def gaps(self, request: ScheduledRequest) -> list[float]:
        times = self.tokens_at[request.request_id]
        return [later - earlier for earlier, later in pairwise(times)]


def play(core: SchedulerCore, arrivals: Iterable[tuple[float, ScheduledRequest]]) -> Timeline:
    """Submit each request at its time, and run passes until all is done."""
    coming = [(at, number, request) for number, (at, request) in enumerate(arrivals)]
    heapq.heapify(coming)
    line, now = Timeline(), 0.0
    while coming or core.has_work:
        if not core.has_work:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            at, _, request = heapq.heappop(coming)
            core.submit(request, at)
        plan = core.begin_pass(now)
        assert plan is not None
        now += plan.duration_ms
        result = core.end_pass()
        line.passes += 1
        for request in result.emitted:
            line.tokens_at.setdefault(request.request_id, []).extend([now] * request.burst)
        line.finished += [request.request_id for request in result.finished]
        line.rejected += [request.request_id for request in result.rejected]
        line.events += result.events
    return line
