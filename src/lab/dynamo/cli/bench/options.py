"""The command line of `dynamo bench`, read once into a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.cli.bench.flags import DEFAULT_CONCURRENCY, DEFAULT_SECONDS, OPEN_LOOP_CONNECTIONS, BenchFlags
from dynamo.cli.bench.prompts import GeneratedPrompts, Length, ListedPrompts, PromptSource
from dynamo.cli.bench.schedule import Shape
from dynamo.cli.bench.targets import Target
from dynamo.cli.usage import UsageError
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.table import read_settings, settings_of

DEFAULT_INPUT: Final = Length(128)

_EPILOG: Final = """\
Without --rate the loop is closed: each of N connections sends its next request when its last is answered. With --rate
requests are sent at their times, whether or not the server keeps up, and a late start counts as waiting.

Generated prompts are made of common words. Two requests before the run tell how many tokens the server makes of them, so
that --input-tokens is right for any tokenizer. Ctrl-C ends the run and reports what there is (status 130). Exit status: 0,
1 when every request failed or the server is not there, 2 for an error of use.

dynamo bench replay serves nothing: it compares router modes in virtual time (dynamo bench replay --help).

example:
  dynamo bench http://127.0.0.1:8000 --concurrency 64 --duration 30 --input-tokens 512 --output-tokens 128,32
  dynamo bench http://127.0.0.1:8000 --rate 20 --requests 1000 --html report.html
"""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to send where, and what to write."""

    targets: tuple[Target, ...]
    shape: Shape
    warmup: int
    models: tuple[str, ...]  # empty: those of the server
    endpoints: tuple[str, ...]
    is_stream: bool
    output: Length
    prompts: PromptSource
    are_prompts_generated: bool
    extra_body: dict[str, Any]
    seed: int
    json_file: Path | None
    html_file: Path | None
    settings: dict[str, Any]  # as given, for the report


def read_options(argv: list[str]) -> BenchOptions:
    """Raises UsageError; leaves as argparse does for `--help`, and for a flag that cannot be read."""
    given = build_parser().parse_args(argv)
    flags = read_settings(BenchFlags, {}, vars(given))
    if flags.rate is not None and flags.concurrency is not None:
        raise UsageError("--rate and --concurrency exclude each other; --max-connections bounds an open loop")
    if flags.rate is None and (flags.constant or flags.max_connections is not None):
        raise UsageError("--constant and --max-connections belong to an open loop; add --rate")
    if flags.prompts is not None and (flags.input_tokens is not None or flags.shared_prefix_tokens):
        raise UsageError("--prompts brings its own prompts; leave --input-tokens and --shared-prefix-tokens out")
    if flags.prefix_groups != 1 and not flags.shared_prefix_tokens:
        raise UsageError("--prefix-groups needs --shared-prefix-tokens")
    headers = dict(flags.header)
    return BenchOptions(
        targets=tuple(Target.of(url, headers=headers, verify=not flags.insecure) for url in given.url),
        shape=_shape(flags),
        warmup=flags.warmup,
        models=flags.model,
        endpoints=flags.endpoint or ("chat",),
        is_stream=flags.stream,
        output=flags.output_tokens,
        prompts=_prompts(flags),
        are_prompts_generated=flags.prompts is None,
        extra_body=flags.body or {},
        seed=flags.seed,
        json_file=flags.json,
        html_file=flags.html,
        settings=_as_given(given.url, flags),
    )


def _shape(flags: BenchFlags) -> Shape:
    connections = flags.concurrency or DEFAULT_CONCURRENCY
    if flags.rate is not None:
        connections = flags.max_connections or OPEN_LOOP_CONNECTIONS
    seconds = flags.duration
    if seconds is None and flags.requests is None:
        seconds = DEFAULT_SECONDS
    return Shape(
        connections=connections,
        requests=flags.requests,
        seconds=seconds,
        rate=flags.rate,
        is_even=flags.constant,
        timeout_seconds=flags.timeout_seconds,
    )


def _prompts(flags: BenchFlags) -> PromptSource:
    if flags.prompts is not None:
        listed = ListedPrompts.read(flags.prompts)
        if listed.has_messages and "completions" in flags.endpoint:
            raise UsageError(f'--prompts {flags.prompts} has "messages", which only --endpoint chat takes')
        return listed
    length = flags.input_tokens or DEFAULT_INPUT
    if flags.shared_prefix_tokens >= length.mean:
        raise UsageError("--shared-prefix-tokens must be less than --input-tokens")
    return GeneratedPrompts(
        length, prefix_tokens=flags.shared_prefix_tokens, groups=flags.prefix_groups, seed=flags.seed
    )


def _as_given(urls: list[str], flags: BenchFlags) -> dict[str, Any]:
    """Return the flags for the report, by their names."""
    found: dict[str, Any] = {"url": urls}
    for name, made in settings_of(BenchFlags):
        value = getattr(flags, name)
        found[made.dest] = (
            value if value is None or isinstance(value, bool | int | float | tuple) else made.read.show(value)
        )
    found["header"] = sorted(name for name, _ in flags.header)  # names only: a value may be a secret
    return found


def build_parser() -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser(
        "dynamo bench",
        usage="dynamo bench URL [URL ...] [options]\n       dynamo bench replay [PRESET ...] [options]",
        description="Load an OpenAI-compatible server and report throughput and latency.",
        epilog=_EPILOG,
    )
    parser.add_argument("url", nargs="+", metavar="URL", help="of the server; several take turns")
    add_flags(parser, (made for _, made in settings_of(BenchFlags)), {})
    return parser
