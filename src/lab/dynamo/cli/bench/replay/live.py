"""The same trace against a server: its prompts as token ids, at its times."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from dynamo.cli.bench.connections import Prepared
from dynamo.cli.bench.load import Load
from dynamo.cli.bench.samples import Recorder, SampleHistogram
from dynamo.cli.bench.schedule import Shape
from dynamo.cli.bench.targets import ENDPOINT_PATHS, Target
from dynamo.replay.trace import Trace, prompt_token_ids

__all__ = ["replay_live"]

CONNECTIONS: Final = 4096  # an open loop: as many as it takes


def replay_live(trace: Trace, target: Target, model: str, speedup: float) -> Mapping[str, float]:
    """Send every request of the trace at its time; return the figures under the names of a replay's report.

    The server counts reused tokens as `usage.prompt_tokens_details.cached_tokens`. Turns with a delay are sent at their
    timestamp.
    """
    begin = trace.requests[0].arrival_ms
    times = tuple((request.arrival_ms - begin) / 1000 / speedup for request in trace.requests)

    def source(number: int, index: int) -> Prepared:
        request = trace.requests[number]
        body = {
            "model": model,
            "prompt": prompt_token_ids(request).tolist(),
            "max_tokens": request.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        return Prepared(target.post(ENDPOINT_PATHS["completions"], body), True)

    recorder = Recorder()
    asyncio.run(Load([target], source, Shape(CONNECTIONS, times=times), recorder).run())
    return _figures(recorder)


def _figures(recorder: Recorder) -> Mapping[str, float]:
    figures = {
        "requests": float(recorder.sent),
        "finished": float(recorder.answered),
        "failed": float(recorder.failed),
        "prefix_cache_reused_ratio": recorder.cached_tokens / max(1, recorder.input_tokens),
        "duration_ms": 1000 * recorder.seconds,
        "p99_late_ms": 1000 * recorder.late.quantile(0.99),
    }
    for latency, samples in (
        ("ttft", recorder.first_token),
        ("tpot", recorder.per_token),
        ("itl", recorder.gap),
        ("e2e_latency", recorder.whole),
    ):
        figures.update(_summary(latency, samples))
    return figures


def _summary(latency: str, samples: SampleHistogram) -> Mapping[str, float]:
    quantiles = {"median": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}
    return {
        f"mean_{latency}_ms": 1000 * samples.mean,
        **{f"{name}_{latency}_ms": 1000 * samples.quantile(q) for name, q in quantiles.items()},
    }
