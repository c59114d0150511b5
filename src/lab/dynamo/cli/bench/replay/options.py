"""The command line of `dynamo bench replay`, read once into a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dynamo.cli.bench.targets import Target
from dynamo.cli.usage import UsageError
from dynamo.errors import InvalidArgument
from dynamo.replay.modes import COUNTING_MODES, frontend_of
from dynamo.replay.mooncake import TRACE_BLOCK_TOKENS
from dynamo.replay.presets import PRESETS, Preset, Variant, preset_of
from dynamo.replay.setup import ReplaySetup, Throttle
from dynamo.scheduling import SchedulerOptions
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import (
    SettingReader,
    above_zero,
    each,
    integer,
    new_file,
    number,
    path,
    placeholder,
    switch,
    text,
)
from dynamo.settings.table import read_settings, setting, settings_of

# The flags of `dynamo bench replay`: one table, from which come its command line and the settings page.

MAX_JOBS: Final = 256
MAX_SEEDS: Final = 1000


def _seeds(given: str) -> tuple[int, ...]:
    found: list[int] = []
    try:
        for part in given.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), min(int(last if dash else first), int(first) + MAX_SEEDS) + 1)
    except ValueError:
        found = []
    if not 1 <= len(found) <= MAX_SEEDS:
        raise ValueError(f"{given!r} is not a list of at most {MAX_SEEDS} seeds such as 0-4 or 1,5,9")
    return tuple(found)


seed_list: Final = SettingReader(_seeds, show=lambda value: ",".join(map(str, value)), metavar="SEEDS")


def _speeds(given: str) -> tuple[float, ...]:
    """Read numbers between commas. Raises ValueError for anything else; the setup checks their size."""
    try:
        return tuple(map(float, given.split(",")))
    except ValueError:
        raise ValueError(f"{given}: write numbers between commas, such as 1,0.5,0.25") from None


def _throttle(given: str) -> Throttle:
    """Read AT:WORKER:SPEED. Raises ValueError for anything else."""
    try:
        at, number, speed = given.split(":")
        return Throttle(float(at), int(number), float(speed))
    except ValueError:
        raise ValueError(f"{given}: write AT:WORKER:SPEED, such as 0.5:0:0.3") from None


@dataclass(frozen=True, slots=True)
class ReplayFlags:
    """What to replay, and what to write, by the command line."""

    # fmt: off
    mode: tuple[str, ...] = setting((), None, each(placeholder("MODE", text)),
        "What to compare; repeated, all of them", flag="--mode", repeats=True, shown="those of the preset")
    seeds: tuple[int, ...] = setting((0,), None, seed_list, "As `0-4` or `1,5,9`: figures are means", flag="--seeds")
    requests: int | None = setting(None, None, integer(1, 10_000_000), "So many", flag="--requests",
        shown="those of the preset, 2,000 mostly")
    jobs: int = setting(1, None, integer(1, MAX_JOBS), "Processes that share the replays", flag="--jobs")
    workers: int | None = setting(None, None, integer(1, 4096), "Simulated workers", flag="--workers",
        shown="presets: 8, mooncake 4")
    gpu_blocks: int | None = setting(None, None, integer(1, 10_000_000), "KV blocks of each worker",
        flag="--gpu-blocks", shown="presets: 24 prompts")
    block_size: int | None = setting(None, None, integer(1, 4096), "Tokens of a KV block", flag="--block-size",
        shown="presets: 16, mooncake 64")
    speedup: float | None = setting(None, None, above_zero(metavar="R"), "The trace, so many times as fast",
        flag="--speedup")
    concurrency: int | None = setting(None, None, integer(1, 100_000),
        "So many requests in flight, whatever the trace's times", flag="--concurrency")
    frontends: int | None = setting(None, None, integer(1, 64), "Each with a router of its own", flag="--frontends")
    replica_sync_ms: float | None = setting(None, None, above_zero(unit="ms", metavar="MS"),
        "Until other frontends know of a booking", flag="--replica-sync-ms", shown="1")
    kv_event_lag_ms: float | None = setting(None, None, number(0, unit="ms", metavar="MS"),
        "Until routers have a worker's KV events", flag="--kv-event-lag-ms", shown="0")
    event_loss: float | None = setting(None, None, number(0, 1, metavar="SHARE"),
        "Share of the KV events that never arrive, such as 0.05", flag="--event-loss")
    speeds: tuple[float, ...] | None = setting(None, None, SettingReader(_speeds, metavar="SPEEDS"),
        "How quick the workers are, in turn, such as 1,1,0.5,0.25", flag="--speeds", shown="all alike")
    throttle: tuple[Throttle, ...] = setting((), None, each(SettingReader(_throttle, metavar="AT:WORKER:SPEED")),
        "A worker that changes its speed in the middle, such as 0.5:0:0.3; repeated, all of them", flag="--throttle",
        repeats=True)
    trace: Path | None = setting(None, None, path, "Replay a trace in Mooncake's JSONL", flag="--trace")
    trace_block_tokens: int = setting(TRACE_BLOCK_TOKENS, None, integer(1, 1_000_000),
        "Tokens that one of its `hash_ids` stands for", flag="--trace-block-tokens")
    write_trace: Path | None = setting(None, None, new_file,
        "Write the preset's trace as JSONL, and replay nothing", flag="--write-trace")
    live: str | None = setting(None, None, placeholder("URL", text),
        "Send the trace to an OpenAI-compatible server, too; its figures are one more row", flag="--live")
    model: str | None = setting(None, None, placeholder("NAME", text), "With `--live`: what to ask for",
        flag="--model")
    json: Path | None = setting(None, None, new_file, "Every figure of every replay", flag="--json")
    html: Path | None = setting(None, None, new_file, "Tables and plots as one page", flag="--html")
    svg: Path | None = setting(None, None, new_file, "The comparison as a plot", flag="--svg")
    per_request: Path | None = setting(None, None, new_file, "A line of JSON for every request of every replay",
        flag="--per-request")
    no_cpu: bool = setting(False, None, switch, "Do not measure what a routing decision costs", flag="--no-cpu",
        negative="")
    strict: bool = setting(False, None, switch, "Exit status 1 when a bar is missed", flag="--strict", negative="")
    # fmt: on


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
    """Raises UsageError; leaves as argparse does for `--help`, and for a flag that cannot be read."""
    parsed = build_parser().parse_args(argv)
    given = read_settings(ReplayFlags, {}, vars(parsed))
    try:
        presets = tuple(_changed(preset, given) for preset in _presets(parsed.preset, given))
        for preset in presets:
            preset.setup.check()
            for variant in preset.variants if given.write_trace is None else ():
                frontend_of(variant.mode, preset.options)
    except InvalidArgument as error:
        raise UsageError(str(error)) from None
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


def _live(given: ReplayFlags, presets: tuple[Preset, ...]) -> LiveTarget | None:
    if given.live is None:
        return None
    if given.model is None:
        raise UsageError("--live needs --model: the name that the server serves")
    if len(presets) != 1 or len(given.seeds) != 1:
        raise UsageError("--live sends one trace; name one preset and one seed")
    return LiveTarget(Target.of(given.live), given.model)


def _presets(names: list[str], given: ReplayFlags) -> list[Preset]:
    if given.trace is None:
        return [preset_of(name) for name in names or PRESETS]
    if names:
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


def _changed(preset: Preset, given: ReplayFlags) -> Preset:
    """Return the preset with what the command line changes. A changed scenario keeps its bars: they show what was missed."""
    setup: dict[str, Any] = {
        name: value
        for name in (
            "workers", "frontends", "concurrency", "kv_event_lag_ms", "event_loss", "replica_sync_ms", "speeds",
        )
        if (value := getattr(given, name)) is not None
    }  # fmt: skip
    if given.throttle:
        setup["throttles"] = given.throttle
    if given.speedup is not None:
        setup["arrival_speedup_ratio"] = preset.setup.arrival_speedup_ratio * given.speedup
    sizes: dict[str, Any] = {
        name: value
        for name, value in (("num_gpu_blocks", given.gpu_blocks), ("block_size", given.block_size))
        if value is not None
    }
    options = preset.options
    if given.block_size is not None:
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


def build_parser() -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser(
        "dynamo bench replay",
        usage="dynamo bench replay [PRESET ...] [options]",
        description="Replay traces over simulated workers in virtual time, router modes and policies side by side.",
        epilog=_EPILOG,
    )
    parser.add_argument("preset", nargs="*", metavar="PRESET", help="scenarios, listed below")
    add_flags(parser, (made for _, made in settings_of(ReplayFlags)), {})
    return parser
