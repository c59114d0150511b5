"""The scenarios that `dynamo bench replay` knows by name: a trace, workers, and what is compared. Pure.

Load. The rate of each size is one at which round-robin works without trouble: its workers compute prompts for 10 to 35 %
of the time and decode for most of the rest, nothing is preempted, and the 99th percentile of its time to first token is less
than five times the time that one whole prompt takes. The busy scenarios are the same traces 1.4 and 1.5 times as fast; there
round-robin builds queues.

Sharing. The numbers of documents and of living chats are set so that the native cost function comes out on these traces as
the native router does on the trace that the bars were measured with: a hit rate of 0.83, 0.84 and 0.81 of the pooled cache's
and a mean time to first token of 0.96, 0.72 and 0.58 of round-robin's at 1k, 4k and 16k (here: 0.82, 0.81, 0.83 and 0.90,
0.74, 0.57).

To try a policy with several parameters, seeds and loads at once:

    python -m dynamo.cli.bench.replay 1k 4k 16k 4k-busy 16k-busy --seeds 0-2 --requests 1000 --jobs 2 --no-cpu \\
        --mode round-robin --mode kv:default --mode kv:time --mode kv:time,stall_weight=0.3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.replay.generated import MooncakeShape, TraceShape, generate, generate_mooncake_like, stampede
from dynamo.replay.setup import ReplaySetup, Restart
from dynamo.replay.trace import Trace
from dynamo.scheduling import SchedulerOptions

BLOCK_SIZE: Final = 16
CACHE_PROMPTS: Final = 24  # of the mean length, for each worker
WORKERS: Final = 8

ROUND_ROBIN: Final = "round-robin"
DEFAULT: Final = "kv:default"
TIME: Final = "kv:time"

MakeTrace = Callable[[int, int | None], Trace]
"""(seed, how many requests; None: the preset's own number) -> the trace"""


class Variant(msgspec.Struct, frozen=True):
    """One row of a scenario's table."""

    label: str
    mode: str
    setup: Mapping[str, object] = {}  # members of `ReplaySetup` that differ from the scenario's


class Bar(msgspec.Struct, frozen=True):
    """A figure that a scenario is held to: that of one row, or its ratio to the same figure of another row."""

    figure: str  # a name of the report
    of: str  # a label
    limit: float
    by: str | None = None  # a label
    is_least: bool = False  # else `limit` is the most

    def value(self, reports: Mapping[str, Mapping[str, float]]) -> float | None:
        """Return the figure; None where a row that it needs was not replayed."""
        if self.of not in reports or (self.by is not None and self.by not in reports):
            return None
        value = reports[self.of].get(self.figure)
        if value is None or self.by is None:
            return value
        base = reports[self.by].get(self.figure)
        return value / base if base else None

    def holds(self, value: float) -> bool:
        """Return whether a value meets the bar."""
        return value >= self.limit if self.is_least else value <= self.limit

    def __str__(self) -> str:
        by = f" by {self.by}" if self.by is not None else ""
        return f"{self.figure}: {self.of}{by} {'>=' if self.is_least else '<='} {self.limit:g}"


class Preset(msgspec.Struct, frozen=True):
    """A scenario."""

    name: str
    what: str
    make_trace: MakeTrace
    options: SchedulerOptions
    setup: ReplaySetup
    variants: tuple[Variant, ...]
    bars: tuple[Bar, ...] = ()


def _modes(*names: str) -> tuple[Variant, ...]:
    return tuple(Variant(name, name) for name in names)


def _sized(tokens: int) -> SchedulerOptions:
    """Return workers whose cache holds 24 prompts of this length."""
    return SchedulerOptions(num_gpu_blocks=CACHE_PROMPTS * tokens // BLOCK_SIZE, block_size=BLOCK_SIZE)


_RATES: Final = {1024: 40.0, 4096: 32.0, 16384: 12.0}  # requests per second for 8 workers
_SETUP: Final = ReplaySetup(workers=WORKERS, block_size=BLOCK_SIZE)
_COMPARED: Final = _modes(ROUND_ROBIN, DEFAULT, TIME)


def _chat_and_documents(tokens: int, name: str) -> MakeTrace:
    def make(seed: int, requests: int | None) -> Trace:
        shape = TraceShape(rate=_RATES[tokens], prompt_tokens=tokens)
        if requests is not None:
            shape = msgspec.structs.replace(shape, requests=requests)
        return generate(shape, seed, name)

    return make


def _sizes() -> list[Preset]:
    bars = {1024: (0.93, 0.90, 0.97), 4096: (0.93, 0.63, 0.90), 16384: (0.92, 0.50, 0.90)}
    found = []
    for tokens, (hits, ttft, e2e) in bars.items():
        name = f"{tokens // 1024}k"
        found.append(
            Preset(
                name,
                f"prompts of about {tokens:,} tokens, {_RATES[tokens]:g} requests per second, {WORKERS} workers",
                _chat_and_documents(tokens, name),
                _sized(tokens),
                _SETUP,
                _COMPARED,
                (
                    Bar("hit_rate_by_pooled", TIME, hits, is_least=True),
                    Bar("mean_ttft_ms", TIME, ttft, ROUND_ROBIN),
                    Bar("p99_ttft_ms", TIME, 1.02, DEFAULT),
                    Bar("mean_e2e_latency_ms", TIME, e2e, DEFAULT),
                ),
            )
        )
    return found


def _busy(tokens: int, ratio: float) -> Preset:
    name = f"{tokens // 1024}k"
    return Preset(
        f"{name}-busy",
        f"the trace of {name}, {ratio:g} times as fast",
        _chat_and_documents(tokens, f"{name}-busy"),
        _sized(tokens),
        msgspec.structs.replace(_SETUP, arrival_speedup_ratio=ratio),
        _COMPARED,
        (Bar("mean_ttft_ms", TIME, 0.80, DEFAULT), Bar("mean_e2e_latency_ms", TIME, 0.85, DEFAULT)),
    )


def _mooncake(seed: int, requests: int | None) -> Trace:
    shape = MooncakeShape()
    if requests is not None:
        shape = msgspec.structs.replace(shape, requests=requests)
    return generate_mooncake_like(shape, seed)


def _crowd(seed: int, requests: int | None) -> Trace:
    beside = _chat_and_documents(4096, "4k")(seed, requests or 600)
    return stampede(64, 8192, 50.0, seed, beside=beside)


_RESTARTS: Final = (Restart(at=1 / 3, what="worker", number=3), Restart(at=2 / 3, what="router"))

PRESETS: Final[Mapping[str, Preset]] = {
    preset.name: preset
    for preset in (
        *_sizes(),
        _busy(4096, 1.4),
        _busy(16384, 1.5),
        Preset(
            "mooncake",
            "1,000 requests drawn like the Mooncake traces: up to 120,000 tokens, groups every 3 s, 4 workers as by default",
            _mooncake,
            SchedulerOptions(num_gpu_blocks=16384, block_size=64),
            ReplaySetup(workers=4, block_size=64),
            _COMPARED,
            (Bar("mean_ttft_ms", TIME, 0.95, DEFAULT), Bar("p90_ttft_ms", TIME, 0.90, DEFAULT)),
        ),
        Preset(
            "frontends",
            "the trace of 4k through four frontends, with and without replica sync",
            _chat_and_documents(4096, "frontends"),
            _sized(4096),
            _SETUP,
            (
                Variant("one frontend", TIME),
                Variant("four, synced", TIME, {"frontends": 4, "compares_frontends": True}),
                Variant("four, apart", TIME, {"frontends": 4, "replica_sync_ms": None, "compares_frontends": True}),
            ),
            (
                Bar("mean_ttft_ms", "four, synced", 1.03, "one frontend"),
                Bar("prefix_cache_reused_ratio", "four, synced", 0.98, "one frontend", is_least=True),
            ),
        ),
        Preset(
            "losses",
            "the trace of 4k with 5 % of the KV events lost, and a worker and a router restarted",
            _chat_and_documents(4096, "losses"),
            _sized(4096),
            _SETUP,
            (
                Variant("undisturbed", TIME),
                Variant("disturbed", TIME, {"event_loss": 0.05, "restarts": _RESTARTS}),
            ),
            (
                Bar("prefix_cache_reused_ratio", "disturbed", 0.9, "undisturbed", is_least=True),
                Bar("exact_after_ms", "disturbed", 2000.0),
            ),
        ),
        Preset(
            "no-events",
            "the trace of 4k where no worker publishes KV events",
            _chat_and_documents(4096, "no-events"),
            _sized(4096),
            _SETUP,
            (
                Variant("with events", TIME),
                Variant("no events", f"{TIME},events=off", {"publishes_events": False}),
                Variant("no events, lru", f"{TIME},events=off,lru=on", {"publishes_events": False}),
            ),
            (Bar("prefix_cache_reused_ratio", "no events", 0.85, "with events", is_least=True),),
        ),
        Preset(
            "stampede",
            "64 requests for one cold prefix of 8,192 tokens within 50 ms, in the middle of 600 others",
            _crowd,
            _sized(4096),
            _SETUP,
            _COMPARED,
            (Bar("stampede_workers", TIME, 2.0),),
        ),
    )
}


def preset_of(name: str) -> Preset:
    """Return a preset. Raises InvalidArgument naming those there are."""
    if name not in PRESETS:
        raise InvalidArgument(f"there is no preset {name!r}; use {', '.join(PRESETS)}")
    return PRESETS[name]
