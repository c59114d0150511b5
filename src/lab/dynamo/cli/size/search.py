"""Which layouts are tried, and which of them is recommended. Every search is bounded: doubling, then halving the interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Final

import msgspec

from dynamo.cli.size.demand import Demand, trace_of
from dynamo.cli.size.profile import Profile
from dynamo.cli.size.trial import Goal, ReplicaLayout, Trial, TrialFigures, run_trial, worst_of
from dynamo.errors import InvalidArgument
from dynamo.replay.split import check_split

ROOM: Final = 0.8  # of an engine's time, for the first guess
MOST_LOAD: Final = 3.0  # the largest share of the load that is simulated
LEAST_LOAD: Final = 0.1
LOAD_STEPS: Final = 5
SMALLEST_CACHE: Final = 8  # the smallest cache that is tried is an eighth of the profile's
BETTER: Final = 1.1  # a split of as many replicas is recommended when it holds so many times the load


class SizePlan(msgspec.Struct, frozen=True):
    """The target, the load and the engine, and how far the search goes."""

    profile: Profile
    demand: Demand
    goals: tuple[Goal, ...]
    mode: str
    seeds: tuple[int, ...]
    max_replicas: int
    tries_splits: bool = True


class LayoutRow(msgspec.Struct, frozen=True):
    """One layout that was tried."""

    layout: ReplicaLayout
    found: TrialFigures
    meets: bool
    margin: float
    holds_to: float  # the share of the load up to which it meets the target; 0: not even near LEAST_LOAD
    note: str = ""


class SizeAnswer(msgspec.Struct, frozen=True):
    """What the search found."""

    rows: tuple[LayoutRow, ...]
    best: ReplicaLayout | None  # None: nothing meets the target
    smallest_cache: int | None  # KV blocks of each replica with which as many replicas meet the target still
    no_split: str = ""  # why no split was simulated, or none is in the table


class Bench:
    """Runs trials in processes, keeps what came of them, and reports each to `report`."""

    def __init__(self, plan: SizePlan, executor: Executor, report: Callable[[str], None]) -> None:
        self.plan = plan
        self._executor = executor
        self._report = report
        self._known: dict[tuple[ReplicaLayout, float], TrialFigures] = {}
        self.trials = 0

    def found(self, layout: ReplicaLayout) -> TrialFigures:
        """Simulate a layout with every seed."""
        known = self._known.get((layout, 1.0))
        if known is None:
            known = worst_of(
                self._run([Trial(self.plan.profile, self.plan.demand, layout, s) for s in self.plan.seeds])
            )
            self._known[layout, 1.0] = known
            verdict = "meets the target" if known.meets(self.plan.goals) else "misses the target"
            figures = ", ".join(
                f"{goal.latency.upper()} {goal.statistic} {known.latencies[goal.latency][goal.statistic]:.1f} ms"
                for goal in self.plan.goals
            )
            self._report(f"{layout}, {layout.kv_blocks} blocks, {layout.mode}: {figures}: {verdict}")
        return known

    def meets(self, layout: ReplicaLayout) -> bool:
        """Return whether a layout meets the target at the whole load."""
        return self.found(layout).meets(self.plan.goals)

    def holds_to(self, layout: ReplicaLayout) -> float:
        """Return up to which share of the load a layout meets the target, by the first seed."""
        low, high = (1.0, MOST_LOAD) if self.meets(layout) else (LEAST_LOAD, 1.0)
        seen: set[bool] = set()
        for _ in range(
            LOAD_STEPS
        ):  # the ends are not tried: three times the load takes three times as long to simulate
            middle = math.sqrt(low * high)
            meets = self._meets_at(layout, middle)
            seen.add(meets)
            low, high = (middle, high) if meets else (low, middle)
        if seen == {True} and high == MOST_LOAD:
            return MOST_LOAD
        return 0.0 if low == LEAST_LOAD else low

    def _meets_at(self, layout: ReplicaLayout, load: float) -> bool:
        plan = self.plan
        (found,) = self._run([Trial(plan.profile, plan.demand, layout, plan.seeds[0], load)])
        return found.meets(plan.goals)

    def _run(self, trials: Sequence[Trial]) -> list[TrialFigures]:
        self.trials += len(trials)
        return [future.result() for future in [self._executor.submit(run_trial, trial) for trial in trials]]


@contextmanager
def executor_of(jobs: int) -> Iterator[Executor]:
    """Make what runs trials: this process (one thread), or `jobs` fresh ones."""
    if jobs == 1:
        with ThreadPoolExecutor(1) as here:
            yield here
        return
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield pool


def search(plan: SizePlan, bench: Bench) -> SizeAnswer:
    """Search the fewest replicas, with the alternatives beside them. Raises UsageError for a trace that cannot be read."""
    alike = fewest(lambda count: bench.meets(_alike(plan, count)), _guess(plan), plan.max_replicas)
    layouts = list(_around(plan, alike or plan.max_replicas, bench))
    smallest = None
    if alike is not None:
        smallest, tried = _smallest_cache(plan, alike, bench)
        layouts += tried
    reason = _why_no_split(plan)
    if not reason:
        splits = list(_splits(plan, alike, bench))
        layouts += splits
        if not splits:
            reason = "no split of as few replicas meets the target"
    layouts = list(dict.fromkeys(layouts))
    with ThreadPoolExecutor(len(layouts)) as threads:  # each waits for the processes
        shares = list(threads.map(bench.holds_to, layouts))
    rows = tuple(
        LayoutRow(layout, found := bench.found(layout), found.meets(plan.goals), found.margin(plan.goals), share)
        for layout, share in zip(layouts, shares, strict=True)
    )
    return SizeAnswer(rows, _best(plan, rows), smallest, reason)


def fewest(meets: Callable[[int], bool], guess: int, most: int) -> int | None:
    """Return the smallest number from 1 to `most` that `meets`; None where `most` does not. What meets goes on to meet."""
    low, high = 0, min(max(1, guess), most)  # `low` misses
    step = 1
    if meets(high):
        while high - step > low:  # down from a guess that is too high
            if not meets(high - step):
                low = high - step
                break
            high, step = high - step, 2 * step
    else:
        while True:
            if high == most:
                return None
            low, high, step = high, min(most, high + step), 2 * step
            if meets(high):
                break
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle
    return high


def _alike(plan: SizePlan, count: int, *, mode: str | None = None, kv_blocks: int | None = None) -> ReplicaLayout:
    return ReplicaLayout(mode or plan.mode, kv_blocks or plan.profile.kv_blocks, workers=count)


def _guess(plan: SizePlan) -> int:
    """Guess how many replicas are busy for `ROOM` of their time."""
    prompts, answers = _busy(plan)
    return math.ceil((prompts + answers) / ROOM)


def _busy(plan: SizePlan) -> tuple[float, float]:
    """Return how many engines the prompts alone and the answers alone keep busy, without any reuse: a first guess only."""
    profile, trace = plan.profile, trace_of(plan.demand, plan.seeds[0])
    timing, options = profile.timing(), profile.options()
    count = len(trace.requests)
    rate = plan.demand.speedup * count / max(1e-3, trace.seconds)
    prompt = max(1, trace.prompt_tokens // count)
    output = sum(request.output_tokens for request in trace.requests) / count
    context = round(prompt + output / 2)
    batch = max(1, min(options.max_num_seqs, options.capacity_tokens // (2 * max(1, context))))
    prefill_ms = timing.prefill_ms(1, prompt, 0) / options.speedup_ratio
    decode_ms = timing.decode_ms(batch * context, context, options.capacity_tokens) / options.speedup_ratio
    return rate * prefill_ms / 1000, rate * output * decode_ms / batch / 1000


def _around(plan: SizePlan, count: int, bench: Bench) -> Iterator[ReplicaLayout]:
    """Yield layouts of like replicas around the smallest number that meets the target."""
    if count > 1:
        yield _alike(plan, count - 1)
        yield _alike(plan, count - 1, kv_blocks=2 * plan.profile.kv_blocks)
    yield _alike(plan, count)
    if count < plan.max_replicas:
        yield _alike(plan, count + 1)
    if count > 1:
        yield _alike(plan, count, mode="kv" if plan.mode == "round-robin" else "round-robin")


def _smallest_cache(plan: SizePlan, count: int, bench: Bench) -> tuple[int, list[ReplicaLayout]]:
    """Halve the cache for as long as the target is met; return the smallest one that meets it, and what was tried."""
    smallest = plan.profile.kv_blocks
    tried: list[ReplicaLayout] = []
    part = 2
    while part <= SMALLEST_CACHE and plan.profile.kv_blocks // part:
        tried.append(_alike(plan, count, kv_blocks=plan.profile.kv_blocks // part))
        if not bench.meets(tried[-1]):
            break
        smallest, part = tried[-1].kv_blocks, 2 * part
    return smallest, tried[-2:]


def _why_no_split(plan: SizePlan) -> str:
    if not plan.tries_splits:
        return "splits were left out (--no-split)"
    if plan.max_replicas < 2:
        return "a split needs two replicas (--max-replicas)"
    if plan.profile.scheduler == "trtllm":
        return "prefill and decode workers of the scheduler trtllm are not simulated"
    try:
        check_split(trace_of(plan.demand, plan.seeds[0]))
    except InvalidArgument as error:
        return str(error)
    return ""


def _splits(plan: SizePlan, alike: int | None, bench: Bench) -> Iterator[ReplicaLayout]:
    """Yield the smallest split that meets the target and its neighbours, if it takes few more replicas than like ones do."""
    most = min(plan.max_replicas, plan.max_replicas if alike is None else max(2, alike + 2)) - 1
    prompts, answers = _busy(plan)

    def layout(prefill: int, decode: int) -> ReplicaLayout:
        return ReplicaLayout(plan.mode, plan.profile.kv_blocks, prefill=prefill, decode=decode)

    gaps = tuple(goal for goal in plan.goals if goal.latency == "itl")
    wide = min(most, math.ceil(prompts / ROOM) + 1)  # prefill workers enough, while decode workers are counted

    def decodes(count: int) -> bool:
        found = bench.found(layout(wide, count))
        return found.meets(gaps) if gaps else found.meets(plan.goals)

    decode = fewest(decodes, math.ceil(answers / ROOM), most)
    if decode is None:
        return
    prefill = fewest(lambda count: bench.meets(layout(count, decode)), math.ceil(prompts / ROOM), most)
    if prefill is None:
        return
    beside = ((prefill, decode), (prefill + 1, decode - 1), (prefill - 1, decode + 1), (prefill - 1, decode))
    for pair in beside:
        if min(pair) >= 1 and sum(pair) <= most + 1:
            yield layout(*pair)


def _best(plan: SizePlan, rows: Sequence[LayoutRow]) -> ReplicaLayout | None:
    """Return the fewest replicas with the profile's cache and the given router; of as many the split only if it is clearly
    better.
    """
    meeting = [
        row
        for row in rows
        if row.meets and row.layout.kv_blocks == plan.profile.kv_blocks and row.layout.mode == plan.mode
    ]
    if not meeting:
        return None
    return min(
        meeting,
        key=lambda row: (row.layout.replicas, -row.holds_to / (BETTER if row.layout.is_split else 1)),
    ).layout
