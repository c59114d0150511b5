"""The command line of `dynamo size`, read once into a frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dynamo.cli.bench.prompts import Length
from dynamo.cli.bench.replay.options import seed_list
from dynamo.cli.bench.targets import Target
from dynamo.cli.size.demand import Demand, trace_of
from dynamo.cli.size.profile import MOCKER, Profile, read_profile
from dynamo.cli.size.search import SizePlan
from dynamo.cli.size.trial import STATISTICS, Goal
from dynamo.cli.usage import UsageError
from dynamo.errors import InvalidArgument
from dynamo.replay.modes import COUNTING_MODES, frontend_of
from dynamo.replay.mooncake import TRACE_BLOCK_TOKENS
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import (
    SettingReader,
    above_zero,
    each,
    integer,
    new_file,
    path,
    placeholder,
    switch,
    text,
)
from dynamo.settings.table import read_settings, setting, settings_of

MAX_REPLICAS: Final = 1024
FEWEST_REQUESTS: Final = 400
MOST_REQUESTS: Final = 3000
TRACE_REQUESTS: Final = 1000
ANSWERS_LONG: Final = 4  # a drawn trace lasts at least as long as so many answers

# The flags of `dynamo size`: one table, from which come its command line and the settings page.


def _bound(given: str) -> tuple[str, float]:
    name, colon, value = given.rpartition(":")
    statistic = name.lower() if colon else "mean"
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if statistic not in STATISTICS or not 0 < limit < math.inf:
        raise ValueError(f"{given!r} is not a bound; use MS, or STATISTIC:MS such as p95:500 ({', '.join(STATISTICS)})")
    return statistic, limit


_limit: Final = SettingReader(_bound, show=lambda value: f"{value[0]}:{value[1]:g}", metavar="[STATISTIC:]MS")
_length: Final = SettingReader(Length.of, metavar="N|MEAN,STDDEV")
_blocks: Final = integer(1, 10_000_000)


@dataclass(frozen=True, slots=True)
class SizeFlags:
    """The target, the load, the engine, and how to search, by the command line."""

    # fmt: off
    ttft: tuple[tuple[str, float], ...] = setting((), None, each(_limit),
        "Bound of the time to first token: `200` (the mean), `p95:500`, `p99:900`; repeated, all of them", flag="--ttft",
        repeats=True)
    itl: tuple[tuple[str, float], ...] = setting((), None, each(_limit),
        "Bound of the time between two tokens, in the same form", flag="--itl", repeats=True)
    rate: float | None = setting(None, None, above_zero(1e6, metavar="R"),
        "Requests per second, a Poisson process", flag="--rate")
    input_tokens: Length | None = setting(None, None, _length, "Length of the prompts: `N`, or `MEAN,STDDEV`",
        flag="--input-tokens", shown="512")
    output_tokens: Length | None = setting(None, None, _length, "Length of the answers, in the same form",
        flag="--output-tokens", shown="128")
    shared_prefix_tokens: int = setting(0, None, integer(0, 4_000_000),
        "Prompts of a group begin with the same tokens", flag="--shared-prefix-tokens")
    prefix_groups: int = setting(1, None, integer(1, 100_000), "How many such groups", flag="--prefix-groups")
    trace: Path | None = setting(None, None, path, "The load as a trace in Mooncake's JSONL, in place of a sketch",
        flag="--trace")
    trace_block_tokens: int = setting(TRACE_BLOCK_TOKENS, None, integer(1, 1_000_000),
        "Tokens that one of its `hash_ids` stands for", flag="--trace-block-tokens")
    speedup: float | None = setting(None, None, above_zero(metavar="R"), "The trace, so many times as fast",
        flag="--speedup")
    requests: int | None = setting(None, None, integer(10, 1_000_000), "How many requests are simulated",
        flag="--requests", shown="the first 1,000 of a trace; of a sketch 400 to 3,000, as long as its answers need")
    profile: str = setting(MOCKER, None, placeholder("FILE", text),
        "The engine: a file that `--measure` wrote, or `mocker`, the mocker's own times", flag="--profile")
    kv_blocks: int | None = setting(None, None, _blocks, "KV blocks of each replica", flag="--kv-blocks",
        shown="those of the profile, or of the server")
    block_size: int | None = setting(None, None, integer(1, 4096), "Tokens of a KV block", flag="--block-size",
        shown="that of the profile, or of the server")
    max_batched_tokens: int | None = setting(None, None, _blocks, "Tokens that one pass computes",
        flag="--max-batched-tokens", shown="as above")
    max_sequences: int | None = setting(None, None, integer(1, 100_000), "Requests that a replica runs at once",
        flag="--max-sequences", shown="as above")
    router_mode: str = setting("kv", None, placeholder("MODE", text), "How the frontend chooses a replica",
        flag="--router-mode")
    max_replicas: int = setting(64, None, integer(1, MAX_REPLICAS), "Look no further", flag="--max-replicas")
    no_split: bool = setting(False, None, switch, "Leave splits into prefill and decode out", flag="--no-split",
        negative="")
    seeds: tuple[int, ...] = setting((0, 1), None, seed_list, "As `0-4` or `1,5,9`: the worst of them counts",
        flag="--seeds")
    jobs: int = setting(1, None, integer(1, 256), "Processes that share the simulations", flag="--jobs")
    json: Path | None = setting(None, None, new_file, "Every figure of every layout", flag="--json")
    measure: str | None = setting(None, None, placeholder("URL", text),
        "Measure the one worker behind this server, write its profile, and leave", flag="--measure")
    out: Path | None = setting(None, None, new_file, "With `--measure`: the file of the profile", flag="--out")
    model: str | None = setting(None, None, placeholder("NAME", text), "With `--measure`: what to ask for",
        flag="--model", shown="the first that the server lists")
    # fmt: on


_EPILOG: Final = f"""\
The target is any number of bounds: --ttft and --itl. The load is a sketch (--rate and lengths) or a trace (--trace). The
engine is a profile: how long a pass takes for so many prompt tokens, and a decode step for so many sequences and so much
context; its KV blocks, and what one pass takes in. Layouts of replicas are simulated in virtual time with the schedulers of
the mocker and the real router, and the smallest one that meets the target is reported, with alternatives beside it.

"holds to" is the share of the load up to which a layout meets the target; 100% is the load that was given. "margin" is what
is left of the tightest bound.

router modes: {", ".join(COUNTING_MODES)}, kv, kv:POLICY

Exit status: 0; 1 when nothing up to --max-replicas meets the target, or a measurement fails; 2 for an error of use.

example:
  dynamo size --ttft p95:400 --itl 20 --rate 20 --input-tokens 2000,400 --output-tokens 200,50 --jobs 2
  dynamo size --measure http://127.0.0.1:8000 --out engine.json
  dynamo size --profile engine.json --ttft p99:2000 --trace conversation_trace.jsonl --requests 1000 --jobs 2
"""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What to measure. The sizes are those of the command line; None: the server reports them."""

    target: Target
    model: str | None
    out: Path
    sizes: dict[str, int]


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """The target with its load, or what to measure."""

    work: SizePlan | Measurement
    jobs: int
    json_file: Path | None


def read_options(argv: list[str]) -> SizeOptions:
    """Raises UsageError; leaves as argparse does for `--help`, and for a flag that cannot be read."""
    given = read_settings(SizeFlags, {}, vars(build_parser().parse_args(argv)))
    work = _plan(given) if given.measure is None else _measurement(given, given.measure)
    return SizeOptions(work, given.jobs, given.json)


def _sizes(given: SizeFlags) -> dict[str, int]:
    names = ("kv_blocks", "block_size", "max_batched_tokens", "max_sequences")
    return {name: value for name in names if (value := getattr(given, name)) is not None}


def _measurement(given: SizeFlags, url: str) -> Measurement:
    if given.out is None:
        raise UsageError("--measure needs --out: the file of the profile")
    if given.ttft or given.itl or given.rate is not None or given.trace is not None:
        raise UsageError("--measure only measures; leave --ttft, --itl, --rate and --trace for the run with --profile")
    return Measurement(Target.of(url), given.model, given.out, _sizes(given))


def _plan(given: SizeFlags) -> SizePlan:
    if given.out is not None or given.model is not None:
        raise UsageError("--out and --model belong to --measure")
    goals = tuple(
        Goal(latency, statistic, limit)
        for latency, bounds in (("ttft", given.ttft), ("itl", given.itl))
        for statistic, limit in bounds
    )
    if not goals:
        raise UsageError("no target; give --ttft, --itl or both, such as --ttft p95:500")
    profile = msgspec.structs.replace(read_profile(given.profile), **_sizes(given))
    try:
        profile.check()
    except InvalidArgument as error:
        raise UsageError(f"--profile with the sizes given: {error}") from None
    try:
        frontend_of(given.router_mode, profile.options())
    except InvalidArgument as error:
        raise UsageError(f"--router-mode: {error}") from None
    demand = _demand(given, profile)
    trace_of(demand, given.seeds[0])  # so that a mistake shows before anything is simulated
    return SizePlan(
        profile=profile,
        demand=demand,
        goals=goals,
        mode=given.router_mode,
        seeds=given.seeds,
        max_replicas=given.max_replicas,
        tries_splits=not given.no_split,
    )


def _demand(given: SizeFlags, profile: Profile) -> Demand:
    if given.trace is not None:
        for flag, value in (
            ("--rate", given.rate), ("--input-tokens", given.input_tokens), ("--output-tokens", given.output_tokens),
            ("--shared-prefix-tokens", given.shared_prefix_tokens),
        ):  # fmt: skip
            if value:
                raise UsageError(f"--trace brings its own requests; leave {flag} out")
        return Demand(
            requests=given.requests or TRACE_REQUESTS,
            file=given.trace,
            file_block_tokens=given.trace_block_tokens,
            speedup=given.speedup or 1.0,
        )
    if given.rate is None:
        raise UsageError("no load; give --rate, or --trace")
    if given.speedup is not None:
        raise UsageError("--speedup belongs to --trace; a sketch has --rate")
    prompt, output = given.input_tokens or Length(512), given.output_tokens or Length(128)
    if given.shared_prefix_tokens >= prompt.mean:
        raise UsageError("--shared-prefix-tokens must be less than --input-tokens")
    if given.prefix_groups != 1 and not given.shared_prefix_tokens:
        raise UsageError("--prefix-groups needs --shared-prefix-tokens")
    return Demand(
        requests=given.requests or _enough(given.rate, prompt.mean, output.mean, profile),
        rate=given.rate,
        prompt=prompt,
        output=output,
        prefix_tokens=given.shared_prefix_tokens,
        groups=given.prefix_groups,
    )


def _enough(rate: float, prompt: float, output: float, profile: Profile) -> int:
    """Return how many requests a trace needs so that the load settles: it lasts as long as several answers."""
    timing, capacity = profile.timing(), profile.kv_blocks * profile.block_size
    context = round(prompt + output / 2)
    sequences = max(1, min(profile.max_sequences, capacity // (4 * context)))
    prefill_ms = timing.prefill_ms(1, round(prompt), 0)
    answer_ms = prefill_ms + output * timing.decode_ms(sequences * context, context, capacity)
    needed = ANSWERS_LONG * rate * answer_ms / profile.speedup_ratio / 1000
    return round(min(max(needed, FEWEST_REQUESTS), MOST_REQUESTS))


def build_parser() -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser(
        "dynamo size",
        usage="dynamo size --ttft MS --itl MS --rate R [options]\n       dynamo size --measure URL --out FILE",
        description="Report how many replicas meet a target of latency under a load, by simulation in virtual time.",
        epilog=_EPILOG,
    )
    add_flags(parser, (made for _, made in settings_of(SizeFlags)), {})
    return parser
