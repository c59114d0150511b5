"""One layout of replicas under the load, simulated: in this process, or in one of several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec

from dynamo.cli.size.demand import Demand, trace_of
from dynamo.cli.size.profile import CurveTiming, Profile
from dynamo.replay.figures import ReplayFigures
from dynamo.replay.modes import frontend_of
from dynamo.replay.run import run_replay
from dynamo.replay.setup import ReplaySetup
from dynamo.replay.split import SplitSetup, run_split
from dynamo.replay.trace import StretchTree

STATISTICS: Final = ("mean", "p95", "p99")
KEEPS_UP: Final = (
    0.9  # of the rate of arrivals; what Poisson leaves to chance in some hundred requests is less than the rest
)


class ReplicaLayout(msgspec.Struct, frozen=True):
    """How replicas are laid out: alike, or some for prompts and some for answers."""

    mode: str
    kv_blocks: int  # of each
    workers: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def replicas(self) -> int:
        return self.workers + self.prefill + self.decode

    @property
    def is_split(self) -> bool:
        return not self.workers

    def __str__(self) -> str:
        if self.is_split:
            return f"{self.prefill} prefill : {self.decode} decode"
        return f"{self.workers} alike"


class Goal(msgspec.Struct, frozen=True):
    """One bound: a statistic of a latency, at most so many milliseconds."""

    latency: str  # "ttft" or "itl"
    statistic: str  # of STATISTICS
    limit_ms: float

    def __str__(self) -> str:
        return f"{self.latency.upper()} {self.statistic} <= {self.limit_ms:g} ms"


class Trial(msgspec.Struct, frozen=True):
    """One simulation to run."""

    profile: Profile
    demand: Demand
    layout: ReplicaLayout
    seed: int
    load: float = 1.0  # the load, so many times as much


class TrialFigures(msgspec.Struct, frozen=True):
    """What came of a layout; of several seeds the worst of each."""

    latencies: dict[str, dict[str, float]]  # "ttft" and "itl" -> statistic -> ms
    requests: int
    unserved: int
    requests_per_second: float
    tokens_per_second: float
    hit_rate: float
    preemptions: int
    kept_up: float  # served requests per second by those that arrived
    trace_seconds: float
    answer_seconds: float  # the mean of the requests, from arrival to the last token
    is_beyond: bool  # times far outside of the measured curves were needed

    def margin(self, goals: Sequence[Goal]) -> float:
        """Return what is left of the tightest bound, as a share of it; below 0 it is missed."""
        if self.unserved:
            return -1.0
        left = min(1 - self.latencies[goal.latency][goal.statistic] / goal.limit_ms for goal in goals)
        return left if self.kept_up >= KEEPS_UP else min(left, self.kept_up - 1)

    def meets(self, goals: Sequence[Goal]) -> bool:
        """Return whether every bound holds, every request is served, and no queue grows without end."""
        return self.margin(goals) >= 0


def worst_of(found: Sequence[TrialFigures]) -> TrialFigures:
    """Return the worst of each figure."""
    first = found[0]
    return TrialFigures(
        latencies={
            latency: {name: max(each.latencies[latency][name] for each in found) for name in STATISTICS}
            for latency in first.latencies
        },
        requests=first.requests,
        unserved=max(each.unserved for each in found),
        requests_per_second=min(each.requests_per_second for each in found),
        tokens_per_second=min(each.tokens_per_second for each in found),
        hit_rate=min(each.hit_rate for each in found),
        preemptions=max(each.preemptions for each in found),
        kept_up=min(each.kept_up for each in found),
        trace_seconds=min(each.trace_seconds for each in found),
        answer_seconds=max(each.answer_seconds for each in found),
        is_beyond=any(each.is_beyond for each in found),
    )


@lru_cache(maxsize=4)
def _tree(demand: Demand, seed: int, block_size: int) -> StretchTree:
    """Return the hashes of the prompts of one trace, which all trials of it share."""
    return StretchTree(block_size)


def run_trial(trial: Trial) -> TrialFigures:
    """Simulate. Raises UsageError for a trace that cannot be read, InvalidArgument for one that cannot be split."""
    figures, is_beyond = replay_of(trial)
    profile = trial.profile
    ttft = figures.latencies["ttft"]
    itl = figures.latencies["itl"]
    seconds = figures.duration_ms / 1000 or 1e-9
    arrived = [request.arrival_ms for request in figures.requests]
    span = (max(arrived) - min(arrived)) / 1000
    return TrialFigures(
        latencies={
            "ttft": {name: getattr(ttft, name) + profile.overhead_ms for name in STATISTICS},
            "itl": {name: getattr(itl, name) for name in STATISTICS},
        },
        requests=len(figures.requests),
        unserved=len(figures.requests) - figures.finished,
        requests_per_second=figures.finished / seconds,
        tokens_per_second=figures.output_tokens / seconds,
        hit_rate=figures.hit_rate,
        preemptions=figures.preemptions,
        kept_up=_kept_up(figures, profile, span),
        trace_seconds=span,
        answer_seconds=figures.latencies["e2e_latency"].mean / 1000,
        is_beyond=is_beyond,
    )


def replay_of(trial: Trial) -> tuple[ReplayFigures, bool]:
    """Return the figures of the replay, and whether it needed times far outside of the measured curves."""
    layout = trial.layout
    profile = msgspec.structs.replace(trial.profile, kv_blocks=layout.kv_blocks)
    options, timing = profile.options(), profile.timing()
    demand = trial.demand
    if demand.file is None and trial.load > 1:  # as long a trace as before: a short one ends before a queue has grown
        demand = msgspec.structs.replace(demand, requests=round(demand.requests * trial.load))
    trace = trace_of(demand, trial.seed)
    tree = _tree(demand, trial.seed, profile.block_size)
    setup = ReplaySetup(
        workers=max(1, layout.workers),
        block_size=profile.block_size,
        seed=trial.seed,
        arrival_speedup_ratio=trial.load * demand.speedup,
    )
    if layout.is_split:
        split = SplitSetup(layout.prefill, layout.decode, profile.transfer_ms_per_1k_tokens / 1000)
        figures = run_split(trace, split, setup, options, mode=layout.mode, tree=tree, timing=timing)
    else:
        make = frontend_of(layout.mode, options)
        figures = run_replay(trace, setup, options, make, mode=layout.mode, tree=tree, pooled=0.0, timing=timing)
    return figures, isinstance(timing, CurveTiming) and timing.is_beyond


def _kept_up(figures: ReplayFigures, profile: Profile, span: float) -> float:
    """Return the rate of ends by the rate of arrivals; the time of one answer after the last arrival is no queue.

    That time is the longest of the first quarter of the requests, before a queue could grow. A trace that lasts less than two
    answers do, each alone on an engine, is a burst without a rate: 1.
    """
    if span < 2 * _alone_seconds(figures, profile):
        return 1.0
    early = [request.e2e_latency_ms or 0.0 for request in figures.requests[: max(1, len(figures.requests) // 4)]]
    seconds, answer = figures.duration_ms / 1000, max(early) / 1000
    return 1.0 if seconds <= span + answer else span / (seconds - answer)


def _alone_seconds(figures: ReplayFigures, profile: Profile) -> float:
    """Return how long the mean request takes on an engine that has no other one."""
    count = max(1, len(figures.requests))
    prompt = sum(request.input_tokens for request in figures.requests) // count
    timing, capacity = profile.timing(), profile.kv_blocks * profile.block_size
    step_ms = timing.decode_ms(prompt, max(1, prompt), capacity)
    return (timing.prefill_ms(1, prompt, 0) + figures.output_tokens / count * step_ms) / profile.speedup_ratio / 1000
