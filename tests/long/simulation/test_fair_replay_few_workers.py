"""Tenants that share the router's queue before few workers, in virtual time: thousands of requests."""

from __future__ import annotations

import heapq

from dynamo.mocker.timing import PolynomialTiming
from dynamo.replay.trace import Trace, TraceRequest
from support.tenants import p99, replayed, two_tenants


def test_before_few_workers_a_quiet_tenant_waits_for_those_that_compute_and_not_for_the_backlog() -> None:
    alone = p99(replayed(two_tenants(12, 0, 6, 1), "dlpm", workers=8))
    crowded = two_tenants(12, 20, 6, 1)
    assert p99(replayed(crowded, "dlpm", workers=8)) <= 2 * alone
    assert p99(replayed(crowded, "fcfs", workers=8)) >= 20 * alone


def quiet_before_noisy(trace: Trace, workers: int) -> list[float]:
    """Return the quiet tenant's times to first token where it always has the next worker that ends a prompt."""
    timing, free = PolynomialTiming(), [0.0] * workers
    waiting: list[tuple[bool, float, TraceRequest]] = []
    coming = sorted(trace.requests, key=lambda each: each.arrival_ms, reverse=True)
    times: list[float] = []
    while coming or waiting:
        now = free[0] if waiting else max(free[0], coming[-1].arrival_ms)
        while coming and coming[-1].arrival_ms <= now:
            each = coming.pop()
            heapq.heappush(waiting, (each.tenant != "quiet", each.arrival_ms, each))
        is_noisy, arrival, each = heapq.heappop(waiting)
        end = max(now, arrival) + timing.prefill_ms(1, each.prompt[0].tokens, 0)
        heapq.heapreplace(free, end)
        if not is_noisy:
            times.append(end - arrival)
    return times


def test_before_few_workers_no_queue_that_interrupts_nothing_would_serve_a_quiet_tenant_much_sooner() -> None:
    ideal, ours = list[float](), list[float]()
    for seed in (1, 2, 3):
        crowded = two_tenants(157 / 8, 10, 7.2, seed)
        ideal += quiet_before_noisy(crowded, workers=8)
        ours += [
            each.ttft_ms or 1e9 for each in replayed(crowded, "dlpm", workers=8).requests if each.request_id[0] == "q"
        ]
    assert len(ideal) == len(ours)
    last = int(0.99 * len(ours))
    assert sorted(ours)[last] <= 1.05 * sorted(ideal)[last]
