"""Tenants that share the router's queue, in virtual time: the production router and queue before simulated workers."""

from __future__ import annotations

import random

import pytest

from dynamo.errors import InvalidArgument
from dynamo.replay.modes import frontend_of
from dynamo.replay.setup import Restart
from dynamo.replay.trace import Stretch, Trace, TraceRequest
from dynamo.scheduling import SchedulerOptions
from support.tenants import p99, replayed, two_tenants


@pytest.mark.parametrize("seed", [1, 2])
def test_a_tenant_at_ten_times_the_load_of_another_costs_that_one_a_tenth_at_the_most(seed: int) -> None:
    # 64 workers can compute 1,300 of these prompts a second; 1,730 come. What is left of the difference is the wait for a
    # worker to end its prompt, as none is interrupted: with fewer workers that is longer (tests/long/simulation).
    alone = p99(replayed(two_tenants(157, 0, 0.9, seed), "dlpm", workers=64))
    assert p99(replayed(two_tenants(157, 10, 0.9, seed), "dlpm", workers=64)) <= 1.1 * alone


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
