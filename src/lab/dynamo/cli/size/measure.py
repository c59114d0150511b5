"""Measures the one worker behind a server: what it holds, by the server's metrics, and the two curves, by timed requests."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final

from dynamo.cli.bench.command import ServerTrouble, fetch, first_model
from dynamo.cli.bench.connections import Prepared
from dynamo.cli.bench.load import Load
from dynamo.cli.bench.replay.command import replay_live
from dynamo.cli.bench.samples import Recorder
from dynamo.cli.bench.schedule import Shape
from dynamo.cli.bench.targets import Target
from dynamo.cli.size.options import Measurement
from dynamo.cli.size.profile import Profile
from dynamo.cli.usage import UsageError
from dynamo.replay.trace import Stretch, Trace, TraceRequest

# The prefill curve: prompts of these lengths, one at a time. A longer prompt takes several passes of the greatest length.
LENGTHS: Final = (32, 256, 1024, 2048, 4096, 8192, 16384, 32768)
# The second shortest counts: whatever else runs on the machine makes a prompt take longer, never shorter.
REPEATS: Final = 5
# The decode curve: so many sequences at once, each with so much context.
SEQUENCES: Final = (1, 4, 16, 64, 256)
CONTEXTS: Final = (128, 1024, 4096)
NEAR: Final = 1.5  # a context is left out where the longest one is not so many times as long
ANSWER_TOKENS: Final = 48  # of the decode curve: the median gap lies between the prompts of the others and the end
MOST_TOKENS: Final = 131_072  # of all sequences of one point
CACHE_SHARE: Final = 0.8  # of the cache, at most: nothing shall be preempted
LEAST_GAP_MS: Final = 0.05  # no engine takes a step in less
ROUND_TRIPS: Final = 20

# member of the profile -> (metric of the frontend, flag)
_METRICS: Final = {
    "kv_blocks": ("dynamo_frontend_model_total_kv_blocks", "--kv-blocks"),
    "block_size": ("dynamo_frontend_model_kv_cache_block_size", "--block-size"),
    "max_batched_tokens": ("dynamo_frontend_model_max_num_batched_tokens", "--max-batched-tokens"),
    "max_sequences": ("dynamo_frontend_model_max_num_seqs", "--max-sequences"),
}
_WORKERS: Final = "dynamo_frontend_model_workers"
_CONTEXT: Final = "dynamo_frontend_model_context_length"

Report = Callable[[str], None]


def measure(work: Measurement, report: Report) -> Profile:
    """Measure a server. Raises ServerTrouble, and UsageError naming the flag for a size that it does not report."""
    target = work.target
    model = work.model or asyncio.run(first_model(target))
    metrics = _metrics(target, model)
    workers = metrics.get(_WORKERS)
    if workers is not None and workers != 1:
        raise ServerTrouble(f"{target.url} has {workers:g} workers of {model}; a profile is that of one replica")
    sizes = {name: _size(name, work, metrics) for name in _METRICS}
    context = round(metrics.get(_CONTEXT, 0)) or sizes["kv_blocks"] * sizes["block_size"]
    requests = _Requests(target, model)
    round_trip = _round_trip(target)
    report(f"round trip {round_trip:.2f} ms")
    taken = []
    for length in _lengths(sizes["max_batched_tokens"], context):
        taken.append((length, sorted(requests.first_token_ms(length) for _ in range(REPEATS))[1]))
        report(f"prompt of {length} tokens: {taken[-1][1]:.2f} ms")
    overhead = min(
        round_trip, min(ms for _, ms in taken) / 2
    )  # chance may make a round trip longer than a short prompt
    prefill = [(length, round(ms - overhead, 3)) for length, ms in taken]
    decode = []
    for sequences, tokens in _points(sizes, context):
        decode.append((sequences, tokens + ANSWER_TOKENS // 2, round(requests.gap_ms(sequences, tokens), 3)))
        report(f"{sequences} sequences of {tokens} tokens: a step of {decode[-1][2]:.2f} ms")
    return Profile(
        name=model,
        times="measured",
        kv_blocks=sizes["kv_blocks"],
        block_size=sizes["block_size"],
        max_batched_tokens=sizes["max_batched_tokens"],
        max_sequences=sizes["max_sequences"],
        prefill=tuple(prefill),
        decode=tuple(decode),
        overhead_ms=round(overhead, 3),
        max_model_len=round(metrics[_CONTEXT]) if metrics.get(_CONTEXT, 0) >= 2 else None,
        comment=f"measured at {target.url} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )


def _size(name: str, work: Measurement, metrics: dict[str, float]) -> int:
    metric, flag = _METRICS[name]
    found = work.sizes.get(name) or round(metrics.get(metric, 0))
    if not found:
        raise UsageError(f"{work.target.url} does not report {metric}; give {flag}")
    return found


def _metrics(target: Target, model: str) -> dict[str, float]:
    """Return the gauges of a model; of several series of one name the sum. A server without them has none."""
    try:
        page = asyncio.run(fetch(target, target.get("/metrics"))).decode("utf-8", "replace")
    except ServerTrouble as trouble:
        if not trouble.args[0].startswith("HTTP"):
            raise
        return {}  # another server than ours: the sizes come from the command line
    found: dict[str, float] = {}
    named = f'model="{model.lower()}"'
    for name, labels, value in re.findall(r"^(\w+)\{([^}]*)\} (\S+)$", page, re.MULTILINE):
        if named in labels.lower():
            found[name] = found.get(name, 0.0) + float(value)
    return found


def _round_trip(target: Target) -> float:
    """Return the median time of a request that no worker sees, in ms."""
    recorder = Recorder()
    load = Load([target], lambda number, index: Prepared(target.get("/v1/models"), False),
        Shape(1, requests=ROUND_TRIPS), recorder)  # fmt: skip
    asyncio.run(load.run())
    if recorder.failed:
        raise ServerTrouble(f"{target.url}/v1/models: {recorder.failed} of {ROUND_TRIPS} requests failed")
    return 1000 * recorder.whole.quantile(0.5)


def _lengths(most: int, context: int) -> list[int]:
    most = min(most, context - ANSWER_TOKENS - 2)
    return [*(length for length in LENGTHS if length < most), max(1, most)]


def _points(sizes: dict[str, int], context: int) -> Iterator[tuple[int, int]]:
    """Yield (sequences, prompt tokens) of the decode curve, as far as the cache and the patience of a user last."""
    most = min(CACHE_SHARE * sizes["kv_blocks"] * sizes["block_size"], MOST_TOKENS)
    for sequences in sorted(
        {*(count for count in SEQUENCES if count < sizes["max_sequences"]), sizes["max_sequences"]}
    ):
        longest = min(
            int(most // sequences) - ANSWER_TOKENS - sizes["block_size"], context - ANSWER_TOKENS - 1, CONTEXTS[-1]
        )
        if longest < CONTEXTS[0]:
            return
        for tokens in (*(tokens for tokens in CONTEXTS if tokens < longest / NEAR), longest):
            yield sequences, tokens


class _Requests:
    """Sends prompts that no cache has seen."""

    def __init__(self, target: Target, model: str) -> None:
        self._target = target
        self._model = model
        self._key = time.time_ns()

    def first_token_ms(self, tokens: int) -> float:
        """Return the time to first token of one prompt."""
        return self._send(1, tokens, 2)["mean_ttft_ms"]

    def gap_ms(self, sequences: int, tokens: int) -> float:
        """Return the median time between two tokens of so many answers at once."""
        gap = self._send(sequences, tokens, ANSWER_TOKENS)["median_itl_ms"]
        if gap < LEAST_GAP_MS:
            raise ServerTrouble(
                f"{self._target.url} sends its tokens in heaps: the time of one step cannot be measured"
            )
        return gap

    def _send(self, count: int, tokens: int, output: int) -> dict[str, float]:
        self._key += count
        requests = [TraceRequest(f"m{n}", 0.0, (Stretch(self._key + n, tokens),), output) for n in range(count)]
        figures = dict(replay_live(Trace("measure", requests), self._target, self._model, 1.0))
        if figures["failed"] or not figures["mean_ttft_ms"]:
            raise ServerTrouble(
                f"{figures['failed']:g} of {count} requests of {tokens} tokens failed at {self._target.url}; "
                f"dynamo bench {self._target.url} shows why"
            )
        return figures
