"""The command line of `dynamo bench replay`, read once into a frozen value."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dynamo.cli.bench.targets import Target
from dynamo.cli.usage import UsageError
from dynamo.errors import InvalidArgument
from dynamo.replay.modes import COUNTING_MODES, frontend_of
from dynamo.replay.mooncake import TRACE_BLOCK_TOKENS
from dynamo.replay.presets import PRESETS, Preset, Variant, preset_of
from dynamo.replay.setup import ReplaySetup
from dynamo.scheduling import SchedulerOptions
from dynamo.settings.command import CommandParser

__all__ = ["LiveTarget", "ReplayOptions", "TraceFile", "read_options"]

MAX_JOBS: Final = 256
MAX_SEEDS: Final = 1000
DEFAULT_FILE_MODES: Final = ("round-robin", "kv:default", "kv:time")

_PRESET_LINES: Final = "\n".join(f"  {preset.name:10} {preset.what}" for preset in PRESETS.values())
_EPILOG: Final = f"""\
presets (without one: all of them):
{_PRESET_LINES}

modes, for --mode:
  {", ".join(COUNTING_MODES)}
  kv                             the policy that --router-mode kv uses
  kv:POLICY                      another policy, such as kv:default, whose cost is the native one
  kv:POLICY,NAME=VALUE,...       with parameters of the policy; events=off routes without KV events

Nothing is served and nothing waits: simulated workers (the scheduler, cache and timing of the mock engine) and real routers
run in virtual time, and the same seed gives the same figures on any machine. "pooled" is one cache as large as those of all
workers together, with every request in front of it: the most that placing can reach. Exit status: 0; 1 with --strict when a
bar is missed; 2 for an error of use.

example:
  dynamo bench replay
  dynamo bench replay 4k 4k-busy --seeds 0-4 --jobs 2 --mode round-robin --mode kv:default --mode kv:time
  dynamo bench replay --trace conversation_trace.jsonl --requests 1000 --workers 4 --json figures.json --html report.html
"""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace that is read in place of a generated one."""

    path: Path
    block_tokens: int


@dataclass(frozen=True, slots=True)
class LiveTarget:
    """A server that is sent the same trace."""

    target: Target
    model: str


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay, and what to write."""

    presets: tuple[Preset, ...]
    file: TraceFile | None
    seeds: tuple[int, ...]
    requests: int | None
    jobs: int
    measures_cpu: bool
    is_strict: bool
    json_file: Path | None
    html_file: Path | None
    svg_file: Path | None
    requests_file: Path | None
    trace_out: TraceFile | None
    live: LiveTarget | None


def read_options(argv: list[str]) -> ReplayOptions:
    """Raises UsageError; leaves as argparse does for `--help`."""
    given = _parser().parse_args(argv)
    try:
        presets = tuple(_changed(preset, given) for preset in _presets(given))
        for preset in presets:
            preset.setup.check()
            for variant in preset.variants if given.write_trace is None else ():
                frontend_of(variant.mode, preset.options)
    except InvalidArgument as error:
        raise UsageError(str(error)) from None
    for path in (given.json, given.html, given.svg, given.per_request, given.write_trace):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"cannot write {path}: there is no such directory")
    if given.write_trace is not None and len(presets) != 1:
        raise UsageError("--write-trace writes one trace; name one preset")
    return ReplayOptions(
        presets=presets,
        file=None if given.trace is None else TraceFile(given.trace, given.trace_block_tokens),
        seeds=given.seeds,
        requests=given.requests,
        jobs=given.jobs,
        measures_cpu=not given.no_cpu,
        is_strict=given.strict,
        json_file=given.json,
        html_file=given.html,
        svg_file=given.svg,
        requests_file=given.per_request,
        live=_live(given, presets),
        trace_out=None if given.write_trace is None else TraceFile(given.write_trace, given.trace_block_tokens),
    )


def _live(given: argparse.Namespace, presets: tuple[Preset, ...]) -> LiveTarget | None:
    if given.live is None:
        return None
    if given.model is None:
        raise UsageError("--live needs --model: the name that the server serves")
    if len(presets) != 1 or len(given.seeds) != 1:
        raise UsageError("--live sends one trace; name one preset and one seed")
    return LiveTarget(Target.of(given.live), given.model)


def _presets(given: argparse.Namespace) -> list[Preset]:
    if given.trace is None:
        return [preset_of(name) for name in given.preset or PRESETS]
    if given.preset:
        raise UsageError("--trace brings its own requests; leave the presets out")
    options = SchedulerOptions(num_gpu_blocks=given.gpu_blocks or 16384, block_size=given.block_size or 64)
    return [
        Preset(
            given.trace.name,
            f"the trace {given.trace.name}",
            PRESETS["mooncake"].make_trace,  # not called: the file takes its place
            options,
            ReplaySetup(workers=4, block_size=options.block_size),
            tuple(Variant(mode, mode) for mode in given.mode or DEFAULT_FILE_MODES),
        )
    ]


def _changed(preset: Preset, given: argparse.Namespace) -> Preset:
    """Return the preset with what the command line changes. A changed scenario keeps its bars: they say what was missed."""
    setup = {
        name: value
        for name in (
            "workers", "frontends", "concurrency", "kv_event_lag_ms", "event_loss", "replica_sync_ms",
        )
        if (value := getattr(given, name)) is not None
    }  # fmt: skip
    if given.speedup is not None:
        setup["arrival_speedup_ratio"] = preset.setup.arrival_speedup_ratio * given.speedup
    sizes = {
        name: value
        for name, value in (("num_gpu_blocks", given.gpu_blocks), ("block_size", given.block_size))
        if value is not None
    }
    options = preset.options
    if "block_size" in sizes:
        setup["block_size"] = given.block_size
        sizes.setdefault("num_gpu_blocks", options.capacity_tokens // given.block_size)
    if sizes:
        options = SchedulerOptions(
            **{"num_gpu_blocks": options.num_gpu_blocks, "block_size": options.block_size, **sizes}
        )
    variants = preset.variants
    if given.mode:
        variants = tuple(Variant(mode, mode) for mode in given.mode)
    return msgspec.structs.replace(
        preset, setup=msgspec.structs.replace(preset.setup, **setup), options=options, variants=variants
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        "dynamo bench replay",
        usage="dynamo bench replay [PRESET ...] [options]",
        description="Replay traces over simulated workers in virtual time, router modes and policies side by side.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("preset", nargs="*", metavar="PRESET", help="scenarios, listed below")
    add(
        "--mode", action="append", metavar="MODE", help="what to compare, in place of the preset's own; may be repeated"
    )
    add("--seeds", type=_seeds, default=(0,), metavar="SEEDS", help="as 0-4 or 1,5,9: figures are means (default: 0)")
    add("--requests", type=_count(10_000_000), metavar="N", help="so many in place of the preset's (2,000 mostly)")
    add("--jobs", type=_count(MAX_JOBS), default=1, metavar="N", help="processes that share the replays (default: 1)")
    add("--workers", type=_count(4096), metavar="N", help="simulated workers (presets: 8, mooncake 4)")
    add("--gpu-blocks", type=_count(10_000_000), metavar="N", help="KV blocks of each worker (presets: 24 prompts)")
    add("--block-size", type=_count(4096), metavar="N", help="tokens of a KV block (presets: 16, mooncake 64)")
    add("--speedup", type=_positive, metavar="R", help="the trace, so many times as fast")
    add(
        "--concurrency",
        type=_count(100_000),
        metavar="N",
        help="so many requests in flight, whatever the trace's times",
    )
    add("--frontends", type=_count(64), metavar="N", help="each with a router of its own")
    add("--replica-sync-ms", type=_positive, metavar="MS", help="until other frontends know of a booking (default: 1)")
    add("--kv-event-lag-ms", type=_amount, metavar="MS", help="until routers have a worker's KV events (default: 0)")
    add("--event-loss", type=_share, metavar="SHARE", help="of the KV events that never arrive, such as 0.05")
    add("--trace", type=Path, metavar="FILE", help="replay a trace in Mooncake's JSONL")
    add(
        "--trace-block-tokens", type=_count(1_000_000), default=TRACE_BLOCK_TOKENS, metavar="N",
        help="tokens that one of its hash_ids stands for (default: %(default)s)",
    )  # fmt: skip
    add("--write-trace", type=Path, metavar="FILE", help="write the preset's trace as JSONL, and replay nothing")
    add(
        "--live", metavar="URL", help="send the trace to an OpenAI-compatible server, too; its figures are one more row"
    )
    add("--model", metavar="NAME", help="with --live: what to ask for")
    add("--json", type=Path, metavar="FILE", help="every figure of every replay")
    add("--html", type=Path, metavar="FILE", help="tables and plots as one page")
    add("--svg", type=Path, metavar="FILE", help="the comparison as a plot")
    add("--per-request", type=Path, metavar="FILE", help="a line of JSON for every request of every replay")
    add("--no-cpu", action="store_true", help="do not measure what a routing decision costs")
    add("--strict", action="store_true", help="exit status 1 when a bar is missed")
    return parser


def _seeds(text: str) -> tuple[int, ...]:
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        found = []
    if not 1 <= len(found) <= MAX_SEEDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of seeds such as 0-4 or 1,5,9")
    return tuple(found)


def _count(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else 0
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {most:,}")
        return value

    return read


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return value if math.isfinite(value) else math.nan


def _positive(text: str) -> float:
    if not (value := _number(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _amount(text: str) -> float:
    if not (value := _number(text)) >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _share(text: str) -> float:
    if not 0 <= (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value
