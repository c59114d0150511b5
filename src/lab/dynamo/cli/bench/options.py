"""The command line of `dynamo bench`, read once into a frozen value."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.cli.bench.prompts import GeneratedPrompts, Length, ListedPrompts, PromptSource
from dynamo.cli.bench.schedule import Shape
from dynamo.cli.bench.targets import ENDPOINT_PATHS, Target, header_from
from dynamo.cli.usage import UsageError
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import (
    SettingReader,
    above_zero,
    each,
    integer,
    new_file,
    one_of,
    path,
    placeholder,
    switch,
    text,
)
from dynamo.settings.table import read_settings, setting, settings_of

# The flags of `dynamo bench`: one table, from which come its command line and the settings page.

DEFAULT_CONCURRENCY: Final = 16
DEFAULT_SECONDS: Final = 30.0
MAX_CONNECTIONS: Final = 60_000  # there are no more ports to one address
OPEN_LOOP_CONNECTIONS: Final = 4096


def _json_object(given: str) -> dict[str, object]:
    try:
        found = json.loads(given)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError('not a JSON object; use one such as {"temperature": 0}')
    return found


_connections: Final = integer(1, MAX_CONNECTIONS)
_length: Final = SettingReader(Length.of, metavar="N|MEAN,STDDEV")
_header: Final = SettingReader(header_from, show=lambda value: str(value[0]), metavar="'NAME: VALUE'")
_body: Final = SettingReader(_json_object, show=json.dumps, metavar="JSON")


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """What to send, and what to write, by the command line."""

    # fmt: off
    concurrency: int | None = setting(None, None, _connections, "Closed loop: how many send at once",
        flag="--concurrency", shown=str(DEFAULT_CONCURRENCY))
    rate: float | None = setting(None, None, above_zero(1e9, metavar="R"),
        "Open loop: requests per second, a Poisson process", flag="--rate")
    constant: bool = setting(False, None, switch, "With `--rate`: the same time between requests", flag="--constant",
        negative="")
    max_connections: int | None = setting(None, None, _connections,
        "With `--rate`: connections at once; more requests wait", flag="--max-connections",
        shown=str(OPEN_LOOP_CONNECTIONS))
    requests: int | None = setting(None, None, integer(1, 10**12), "Stop after so many", flag="--requests")
    duration: float | None = setting(None, None, above_zero(1e9, unit="s", metavar="S"),
        "Send for so long; no limit by default when `--requests` is given", flag="--duration",
        shown=f"{DEFAULT_SECONDS:g}")
    warmup: int = setting(0, None, integer(0, 10**6), "Requests before, not reported", flag="--warmup")
    timeout_seconds: float = setting(600.0, None, above_zero(1e9, unit="s", metavar="S"),
        "Until a request is given up", flag="--timeout")
    model: tuple[str, ...] = setting((), None, each(placeholder("NAME", text)),
        "The model; repeated, they take turns", flag="--model", repeats=True, shown="the first that the server lists")
    endpoint: tuple[str, ...] = setting((), None, each(one_of(*ENDPOINT_PATHS)),
        f"{' or '.join(f'`{name}`' for name in ENDPOINT_PATHS)}; repeated, they take turns", flag="--endpoint",
        repeats=True, shown="chat")
    stream: bool = setting(True, None, switch, "Stream the answers", flag="--stream")
    input_tokens: Length | None = setting(None, None, _length,
        "Length of generated prompts: `N`, or `MEAN,STDDEV`", flag="--input-tokens", shown="128")
    output_tokens: Length = setting(Length(128), None, _length, "`max_tokens` of the requests: `N`, or `MEAN,STDDEV`",
        flag="--output-tokens")
    prompts: Path | None = setting(None, None, path, "A file of prompts, one per line; `.jsonl`: objects",
        flag="--prompts")
    shared_prefix_tokens: int = setting(0, None, integer(0, 4_000_000),
        "Generated prompts of a group begin with the same tokens", flag="--shared-prefix-tokens")
    prefix_groups: int = setting(1, None, integer(1, 100_000), "How many such groups", flag="--prefix-groups")
    body: dict[str, Any] | None = setting(None, None, _body, "A JSON object: more members of every request",
        flag="--body")
    header: tuple[tuple[str, str], ...] = setting((), None, each(_header), "One more header; repeated, all of them",
        flag="--header", repeats=True)
    insecure: bool = setting(False, None, switch, "Take any certificate of an https server", flag="--insecure",
        negative="")
    seed: int = setting(0, None, integer(), "Of arrivals, lengths and prompts", flag="--seed")
    json: Path | None = setting(None, None, new_file, "Write the figures to this file", flag="--json")
    html: Path | None = setting(None, None, new_file,
        "Write a report with plots to this file; it needs no network", flag="--html")
    # fmt: on


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


def _as_given(urls: list[str], flags: BenchFlags) -> dict[str, object]:
    """Return the flags for the report, by their names."""
    found: dict[str, object] = {"url": urls}
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
