"""Tenants that share the router's queue, in virtual time: the production router and queue before simulated workers."""

from __future__ import annotations

import heapq
import random

import pytest

from dynamo.errors import InvalidArgument
from dynamo.mocker.timing import PolynomialTiming
from dynamo.replay.figures import ReplayFigures
from dynamo.replay.modes import frontend_of
from dynamo.replay.run import run_replay
from dynamo.replay.setup import ReplaySetup, Restart
from dynamo.replay.trace import Stretch, Trace, TraceRequest
from dynamo.scheduling import SchedulerOptions

BLOCK = 64


def replayed(
    trace: Trace, order: str, workers: int, blocks: int = 1024, restarts: tuple[Restart, ...] = ()
) -> ReplayFigures:
    options = SchedulerOptions(num_gpu_blocks=blocks, block_size=BLOCK)
    setup = ReplaySetup(workers=workers, block_size=BLOCK, restarts=restarts)
    mode = f"kv:time,queue=0,order={order}"
    return run_replay(trace, setup, options, frontend_of(mode, options), mode=mode)


def two_tenants(rate: float, times: int, seconds: float, seed: int, prompt: int = 2000) -> Trace:
    """Make a trace of a quiet tenant and one that sends `times` as many of the same requests; no two share a prefix.

    The workers compute prompts only, as those of a disaggregated model do.
    """
    arrivals: list[tuple[float, str, int]] = []
    for tenant, each in (("quiet", rate), ("noisy", rate * times)):
        rng, at = random.Random(f"{seed} {tenant}"), 0.0
        while each and (at := at + rng.expovariate(each)) < seconds:
            arrivals.append((at * 1000, tenant, rng.randint(prompt // 2, 3 * prompt // 2)))
    return Trace(
        "two tenants",
        [
            TraceRequest(f"{tenant}{number}", at, (Stretch(number, tokens),), 1, tenant=tenant)
            for number, (at, tenant, tokens) in enumerate(sorted(arrivals))
        ],
    )


def p99(figures: ReplayFigures, tenant: str = "quiet") -> float:
    times = sorted(each.ttft_ms or 1e9 for each in figures.requests if each.request_id.startswith(tenant))
    return times[int(0.99 * len(times))]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_tenant_at_ten_times_the_load_of_another_costs_that_one_a_tenth_at_the_most(seed: int) -> None:
    # 64 workers can compute 1,300 of these prompts a second; 1,730 come. What is left of the difference is the wait for a
    # worker to end its prompt, as none is interrupted: with fewer workers that is longer, see below.
    alone = p99(replayed(two_tenants(157, 0, 0.9, seed), "dlpm", workers=64))
    assert p99(replayed(two_tenants(157, 10, 0.9, seed), "dlpm", workers=64)) <= 1.1 * alone


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


def shared_prefixes(tenants: int = 8, each: int = 20, prefix: int = 6000, own: int = 100) -> Trace:
    """Make a trace of tenants whose requests begin with a long prefix of the tenant's; all come at once, in any order."""
    numbers = [tenant for tenant in range(tenants) for _ in range(each)]
    random.Random(1).shuffle(numbers)
    return Trace(
        "shared prefixes",
        [
            TraceRequest(
                f"r{at}", 0.1 * at, (Stretch(1 + tenant, prefix), Stretch(1000 + at, own)), 8, tenant=str(tenant)
            )
            for at, tenant in enumerate(numbers)
        ],
    )


@pytest.mark.parametrize(("workers", "blocks"), [(1, 256), (1, 512), (2, 256)])
def test_turns_that_respect_prefixes_serve_more_than_twice_of_what_turns_without_do(workers: int, blocks: int) -> None:
    trace = shared_prefixes()
    fair = {order: replayed(trace, order, workers, blocks) for order in ("dlpm", "vtc")}
    assert {each.status for figures in fair.values() for each in figures.requests} == {"finished"}
    throughput = {order: figures.output_tokens / figures.duration_ms for order, figures in fair.items()}
    assert throughput["dlpm"] >= 2.5 * throughput["vtc"]


@pytest.mark.parametrize("order", ["fcfs", "wspt", "dlpm", "vtc"])
def test_everything_that_waits_is_served_also_when_workers_and_routers_are_lost(order: str) -> None:
    trace = two_tenants(40, 5, 1.0, 3, prompt=500)
    figures = replayed(trace, order, 3, restarts=(Restart(0.3, "worker", 1, down_ms=50.0),))
    assert sorted(each.request_id for each in figures.requests) == sorted(each.request_id for each in trace.requests)
    assert {each.status for each in figures.requests} == {"finished"}


def test_a_wrong_order_is_named() -> None:
    with pytest.raises(InvalidArgument, match="'last' is not a valid QueueOrder"):
        frontend_of("kv:time,queue=1,order=last", SchedulerOptions())
    with pytest.raises(InvalidArgument, match="tenant_quantum"):
        frontend_of("kv:time,queue=1,quantum=0", SchedulerOptions())
