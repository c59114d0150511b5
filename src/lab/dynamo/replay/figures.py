"""What came of a replay, in the names of the native report. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from dynamo.replay.flight import RequestFigures
from dynamo.replay.generated import STAMPEDE

LATENCIES: Final = ("ttft", "ttst", "tpot", "itl", "e2e_latency")
_QUANTILES: Final = {"median": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}


class Summary(msgspec.Struct, frozen=True):
    """A distribution of milliseconds in ten numbers; all 0 without samples."""

    mean: float = 0.0
    min: float = 0.0
    max: float = 0.0
    median: float = 0.0
    p75: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    std: float = 0.0
    samples: int = 0

    def named(self, latency: str) -> Iterator[tuple[str, float]]:
        """Yield every figure under its name in the report, such as `p99_ttft_ms`."""
        for name in self.__struct_fields__:
            if name != "samples":
                yield f"{name}_{latency}_ms", round(getattr(self, name), 3)


class GapCounts:
    """Gaps between tokens, counted in hundredths of a millisecond: bounded by the longest gap, not by the tokens."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, milliseconds: float) -> None:
        """Count one gap."""
        key = int(milliseconds * 100 + 0.5)
        self.counts[key] = self.counts.get(key, 0) + 1

    def summary(self) -> Summary:
        """Summarise the gaps."""
        return _summary(sorted((key / 100, count) for key, count in self.counts.items()))


def summary_of(values: Iterable[float]) -> Summary:
    """Summarise single values."""
    return _summary([(value, 1) for value in sorted(values)])


def _summary(counted: Sequence[tuple[float, int]]) -> Summary:
    """Summarise rising values with their counts. A quantile is the least value that a share of the samples does not exceed."""
    samples = sum(count for _, count in counted)
    if not samples:
        return Summary()
    mean = sum(value * count for value, count in counted) / samples
    variance = sum((value - mean) ** 2 * count for value, count in counted) / samples
    ranks = iter([(math.ceil(q * samples), name) for name, q in _QUANTILES.items()])
    found: dict[str, float] = {}
    rank, name = next(ranks)
    seen = 0
    for value, count in counted:
        seen += count
        while name and seen >= rank:
            found[name] = value
            rank, name = next(ranks, (samples + 1, ""))
    return Summary(mean=mean, min=counted[0][0], max=counted[-1][0], std=math.sqrt(variance), samples=samples, **found)


class RoutingCost(msgspec.Struct, frozen=True):
    """CPU time of routing in microseconds, as measured while the replay ran; 0 where no clock was given."""

    mean_decision_us: float = 0.0
    p50_decision_us: float = 0.0
    p99_decision_us: float = 0.0
    events_us_per_request: float = 0.0  # KV events applied to one frontend's index


class ReplayFigures(msgspec.Struct, frozen=True):
    """One replay."""

    mode: str
    trace: str
    requests: Sequence[RequestFigures]
    latencies: Mapping[str, Summary]  # by the names of LATENCIES
    input_tokens: int
    reused_tokens: int
    committed_prefill_tokens: int  # prompt tokens that workers computed, repeated prefills included
    output_tokens: int
    duration_ms: float  # from the first arrival to the last token
    pooled_hit_rate: float
    worker_requests: Sequence[int]  # by worker
    worker_prefill_tokens: Sequence[int]
    worker_prefill_busy: Sequence[float]  # shares of the duration
    preemptions: int
    routing: RoutingCost = RoutingCost()
    equal_choices: float | None = None  # several frontends: how often the others would have chosen the same worker
    exact_after_ms: float | None = None  # restarts: until every index was true again, at worst
    lost_events: int = 0
    gap_repairs: int = 0

    @property
    def finished(self) -> int:
        return sum(request.status == "finished" for request in self.requests)

    @property
    def hit_rate(self) -> float:
        """Reused tokens by prompt tokens, of the requests that were served."""
        return self.reused_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def hit_share(self) -> float:
        """The hit rate by that of the pooled cache."""
        return self.hit_rate / self.pooled_hit_rate if self.pooled_hit_rate else 0.0

    @property
    def prefill_busy(self) -> float:
        """The share of the time that workers computed prompts, in the mean."""
        return _mean(self.worker_prefill_busy)

    @property
    def prefill_spread(self) -> float:
        """The deviation of the computed prompt tokens over the workers, by their mean: 0 is even."""
        return _spread(self.worker_prefill_tokens)

    @property
    def stampede_workers(self) -> int | None:
        """How many workers served requests of a stampede: each of them computed the common prefix."""
        crowd = {request.worker for request in self.requests if request.policy_class == STAMPEDE}
        return len(crowd) or None

    @property
    def digest(self) -> str:
        """A name of everything that happened to every request: the same seed gives the same name."""
        lines = (
            f"{r.request_id} {r.status} {r.worker} {r.first_token_ms} {r.last_token_ms} {r.reused_input_tokens} {r.output_tokens}"
            for r in self.requests
        )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def report(self) -> dict[str, object]:
        """Return the report with the native names; per-request records are apart from it."""
        seconds = self.duration_ms / 1000 or 1e-9
        figures: dict[str, object] = {
            "mode": self.mode,
            "trace": self.trace,
            "requests": len(self.requests),
            "finished": self.finished,
            "prefix_cache_reused_ratio": round(self.hit_rate, 4),
            "pooled_hit_rate": round(self.pooled_hit_rate, 4),
            "hit_rate_by_pooled": round(self.hit_share, 4),
            "committed_prefill_tokens": self.committed_prefill_tokens,
            "duration_ms": round(self.duration_ms, 3),
            "request_throughput_rps": round(self.finished / seconds, 3),
            "input_throughput_tok_s": round(self.input_tokens / seconds, 1),
            "output_throughput_tok_s": round(self.output_tokens / seconds, 1),
            "preemptions": self.preemptions,
            "worker_requests": list(self.worker_requests),
            "worker_prefill_tokens": list(self.worker_prefill_tokens),
            "worker_prefill_busy": [round(share, 4) for share in self.worker_prefill_busy],
            "prefill_busy": round(self.prefill_busy, 4),
            "prefill_spread": round(self.prefill_spread, 4),
            "digest": self.digest,
            **msgspec.structs.asdict(self.routing),
        }
        for latency in LATENCIES:
            figures.update(self.latencies[latency].named(latency))
        for name in ("equal_choices", "exact_after_ms"):
            if (value := getattr(self, name)) is not None:
                figures[name] = round(value, 4)
        if (crowd := self.stampede_workers) is not None:
            figures["stampede_workers"] = crowd
        if self.lost_events:
            figures.update(lost_events=self.lost_events, gap_repairs=self.gap_repairs)
        return figures


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _spread(values: Sequence[float]) -> float:
    mean = _mean(values)
    if not mean:
        return 0.0
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) / mean
