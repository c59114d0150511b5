"""Replays in virtual time of tenants that share the router's queue."""

from __future__ import annotations

import random

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
