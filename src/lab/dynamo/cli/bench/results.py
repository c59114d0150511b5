"""The figures of a run, as they go into JSON and every report. Pure."""

from __future__ import annotations

import platform
from typing import Any, Final, TypedDict

from dynamo import __version__
from dynamo.cli.bench.samples import Recorder, SampleHistogram

BUSY_SHARE: Final = 0.8  # of one core: beyond it the figures measure the load generator
JUDGED_SECONDS: Final = 0.5  # a share of less time is an accident

# name in the JSON -> (attribute of the recorder, what a reader calls it)
LATENCIES: Final = {
    "ttft": ("first_token", "time to first token"),
    "itl": ("gap", "between tokens (ITL)"),
    "tpot": ("per_token", "per token of a stream"),
    "e2e": ("whole", "end to end"),
}


class Latency(TypedDict):
    """In milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    samples: int


class FailureCount(TypedDict):
    kind: str
    count: int
    example: str


class Results(TypedDict):
    """One run."""

    version: str
    python: str
    settings: dict[str, Any]
    was_interrupted: bool
    seconds: float
    sent: int
    answered: int
    failed: int
    unfinished: int
    requests_per_second: float
    output_tokens: int
    output_tokens_per_second: float
    input_tokens: int
    mean_input_tokens: float
    mean_output_tokens: float
    estimated_answers: int
    received_bytes: int
    connections: int
    latency_ms: dict[str, Latency]
    late_p99_ms: float
    failures: list[FailureCount]
    load_generator_cpu_share: float
    load_generator_us_per_token: float
    was_load_generator_the_bottleneck: bool
    timeline: list[dict[str, float | None]]


def results_of(recorder: Recorder, settings: dict[str, Any], cpu_seconds: float, was_interrupted: bool) -> Results:
    """Summarise the run. `cpu_seconds`: user + system time of this process over the window."""
    seconds = recorder.seconds
    share = cpu_seconds / seconds
    width = recorder.timeline.width_seconds
    return {
        "version": __version__,
        "python": platform.python_version(),
        "settings": settings,
        "was_interrupted": was_interrupted,
        "seconds": round(seconds, 4),
        "sent": recorder.sent,
        "answered": recorder.answered,
        "failed": recorder.failed,
        "unfinished": recorder.unfinished,
        "requests_per_second": round(recorder.answered / seconds, 3),
        "output_tokens": recorder.output_tokens,
        "output_tokens_per_second": round(recorder.output_tokens / seconds, 2),
        "input_tokens": recorder.input_tokens,
        "mean_input_tokens": round(recorder.input_tokens / max(recorder.input_counted, 1), 1),
        "mean_output_tokens": round(recorder.output_tokens / max(recorder.answered, 1), 1),
        "estimated_answers": recorder.output_estimated,
        "received_bytes": recorder.received_bytes,
        "connections": recorder.connections,
        "latency_ms": {name: _latency(getattr(recorder, attribute)) for name, (attribute, _) in LATENCIES.items()},
        "late_p99_ms": _ms(recorder.late.quantile(0.99)),
        "failures": [
            {"kind": kind, "count": failure.count, "example": failure.example}
            for kind, failure in sorted(recorder.failures.items(), key=lambda item: -item[1].count)
        ],
        "load_generator_cpu_share": round(share, 4),
        "load_generator_us_per_token": round(1e6 * cpu_seconds / tokens, 3)
        if (tokens := recorder.output_tokens)
        else 0.0,
        "was_load_generator_the_bottleneck": share > BUSY_SHARE and seconds >= JUDGED_SECONDS,
        "timeline": [
            {
                "from_seconds": round(index * width, 3),
                "seconds": _length(index * width, width, seconds),
                "answered": interval.answered,
                "failed": interval.failed,
                "tokens": interval.tokens,
                "mean_ttft_ms": _ms(interval.first_token_total / interval.first_tokens)
                if interval.first_tokens
                else None,
                "slowest_ms": _ms(interval.slowest) if interval.answered else None,
            }
            for index, interval in enumerate(recorder.timeline.intervals)
        ],
    }


def _length(begin: float, width: float, end: float) -> float:
    """Return how long an interval lasted: the last one ends with the run, and its rates are of that time."""
    return round(min(width, end - begin), 3) if end > begin else width


def _latency(found: SampleHistogram) -> Latency:
    return {
        "mean": _ms(found.mean),
        "p50": _ms(found.quantile(0.5)),
        "p90": _ms(found.quantile(0.9)),
        "p99": _ms(found.quantile(0.99)),
        "max": _ms(found.highest),
        "samples": found.count,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
