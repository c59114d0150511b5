"""One call for one replay, and another for its yardstick. Pure: for CPU times the caller hands in a clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from dynamo.kv.events import RouterEvent
from dynamo.mocker.timing import PolynomialTiming
from dynamo.replay.cluster import ReplayCluster
from dynamo.replay.figures import ReplayFigures, RoutingCost, summary_of
from dynamo.replay.flight import Flight, RequestFigures
from dynamo.replay.frontends import MakeFrontend, ReplayFrontend, Routed
from dynamo.replay.setup import ReplaySetup
from dynamo.replay.trace import StretchTree, Trace
from dynamo.replay.worker import ReplayWorker, ScaledTiming, WorkerSpeed
from dynamo.scheduling import PassTiming, SchedulerCore, SchedulerOptions, make_core

# The yardstick of a hit rate: one cache as large as those of all workers together, with every request in front of it.
# Pure.
#
# No placement can reuse much more than this cache does, for it never holds a block twice and never computes one twice at a
# time. Blocks leave it in the order of their last use.


class PooledCache:
    """A set of blocks with least-recently-used eviction, and how many prompt tokens it would have spared."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self._capacity = blocks
        self._block_size = block_size
        self._held: OrderedDict[int, None] = OrderedDict()  # the least recently used block first
        self._answers = 0
        self.prompt_tokens = 0
        self.reused_tokens = 0

    def serve(self, sequence: Sequence[int], prompt_tokens: int, output_tokens: int) -> int:
        """Take one request; return how many of its prompt tokens the cache held.

        `sequence`: the sequence hashes of the prompt's whole blocks. The answer's blocks are kept, too, as workers keep them.
        """
        held, size = self._held, self._block_size
        found = 0
        for block in sequence:
            if block not in held:
                break
            found += 1
        reused = min(found, max(0, prompt_tokens - 1) // size)  # the last token is always computed
        for _ in range((prompt_tokens + output_tokens) // size - len(sequence)):
            self._answers -= 1  # no prompt has a negative hash
            held[self._answers] = None
        for block in reversed(sequence):  # so that the end of a prompt is evicted before its beginning
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._capacity:
            held.popitem(last=False)
        self.prompt_tokens += prompt_tokens
        self.reused_tokens += reused * size
        return reused * size

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that was reused."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


Clock = Callable[[], float]
"""CPU seconds of this thread"""


def run_replay(
    trace: Trace,
    setup: ReplaySetup,
    options: SchedulerOptions,
    make_frontend: MakeFrontend,
    *,
    mode: str,
    tree: StretchTree | None = None,
    pooled: float | None = None,
    timing: PassTiming | None = None,
    clock: Clock | None = None,
) -> ReplayFigures:
    """Replay a trace and return what came of it.

    `options` is every worker's engine. `mode` only names the replay in the report. `tree` and `pooled` (the hit rate of
    the pooled cache) are the same for every replay of one trace and may be handed in.
    """
    tree = tree or StretchTree(options.block_size)
    if pooled is None:
        pooled = pooled_hit_rate(trace, setup.workers * options.num_gpu_blocks, tree)
    meters: list[_Metered] = []

    def frontend(seed: int) -> ReplayFrontend:
        made = make_frontend(seed)
        if clock is None:
            return made
        meters.append(_Metered(made, clock))
        return meters[-1]

    timing = timing or PolynomialTiming()

    def core(seed: int, speed: WorkerSpeed) -> SchedulerCore:
        return make_core(options, ScaledTiming(timing, speed), seed=seed)

    cluster = ReplayCluster(trace, setup, tree, core, frontend)
    cluster.run()
    return _figures(trace, mode, cluster, pooled, meters)


def pooled_hit_rate(trace: Trace, blocks: int, tree: StretchTree) -> float:
    """Return the hit rate of one cache with so many blocks, with every request of the trace in front of it."""
    pooled = PooledCache(blocks, tree.block_size)
    for request in trace.requests:
        pooled.serve(tree.blocks(request.prompt).sequence, request.prompt_tokens, request.output_tokens)
    return pooled.hit_rate


def _figures(
    trace: Trace, mode: str, cluster: ReplayCluster, pooled: float, meters: Sequence[_Metered]
) -> ReplayFigures:
    requests = [flight.figures() for flight in cluster.flights]
    served = [request for request in requests if request.ttft_ms is not None]
    begin = min((request.arrival_ms for request in requests), default=0.0)
    duration = max((request.last_token_ms or 0.0 for request in served), default=begin) - begin
    lives = cluster.fleet.lives
    workers = range(cluster.setup.workers)

    def by_worker(figure: Callable[[ReplayWorker], float]) -> list[float]:
        return [sum(figure(life) for life in lives if life.number == number) for number in workers]

    feeds = cluster.entrances.feeds
    return ReplayFigures(
        mode=mode,
        trace=trace.name,
        requests=requests,
        latencies={
            "ttft": summary_of(_present(served, "ttft_ms")),
            "ttst": summary_of(_present(served, "ttst_ms")),
            "tpot": summary_of(_present(served, "itl_ms")),
            "itl": cluster.gaps.summary(),
            "e2e_latency": summary_of(_present(served, "e2e_latency_ms")),
        },
        input_tokens=sum(request.input_tokens for request in served),
        reused_tokens=sum(request.reused_input_tokens for request in served),
        committed_prefill_tokens=sum(life.prefilled.tokens for life in lives),
        output_tokens=sum(request.output_tokens for request in served),
        duration_ms=duration,
        pooled_hit_rate=pooled,
        worker_requests=[int(count) for count in by_worker(lambda life: life.requests)],
        worker_prefill_tokens=[int(count) for count in by_worker(lambda life: life.prefilled.tokens)],
        worker_prefill_busy=[ms / duration if duration else 0.0 for ms in by_worker(lambda life: life.prefilled.ms)],
        preemptions=sum(life.core.preemptions for life in lives),
        routing=_cost(meters, len(requests)),
        equal_choices=cluster.entrances.agreed / cluster.entrances.compared if cluster.entrances.compared else None,
        exact_after_ms=cluster.exact_after_ms,
        lost_events=sum(feed.lost for feed in feeds),
        gap_repairs=sum(feed.repairs for feed in feeds),
    )


def _present(requests: Sequence[RequestFigures], name: str) -> list[float]:
    return [value for request in requests if (value := getattr(request, name)) is not None]


def _cost(meters: Sequence[_Metered], requests: int) -> RoutingCost:
    decisions = summary_of(1e6 * seconds for meter in meters for seconds in meter.decisions)
    if not decisions.samples:
        return RoutingCost()
    applied = sum(meter.applying for meter in meters) / max(1, len(meters))
    return RoutingCost(
        mean_decision_us=round(decisions.mean, 2),
        p50_decision_us=round(decisions.median, 2),
        p99_decision_us=round(decisions.p99, 2),
        events_us_per_request=round(1e6 * applied / max(1, requests), 2),
    )


class _Metered:
    """A frontend with a clock beside it. What a clock reading costs is in the figures."""

    def __init__(self, frontend: ReplayFrontend, clock: Clock) -> None:
        self._frontend = frontend
        self._clock = clock
        self.reads_events = frontend.reads_events
        self.decisions: list[float] = []  # seconds each
        self.applying = 0.0  # seconds
        self.set_workers = frontend.set_workers
        self.would_choose = frontend.would_choose
        self.booked_elsewhere = frontend.booked_elsewhere
        self.first_token = frontend.first_token
        self.end = frontend.end
        self.forget = frontend.forget
        self.ready = frontend.ready

    def route(self, flight: Flight, now_ms: float) -> Routed | None:
        begun = self._clock()
        chosen = self._frontend.route(flight, now_ms)
        self.decisions.append(self._clock() - begun)
        return chosen

    def apply(self, event: RouterEvent, now_ms: float) -> None:
        begun = self._clock()
        self._frontend.apply(event, now_ms)
        self.applying += self._clock() - begun
