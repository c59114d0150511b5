"""The command line of `dynamo bench`, read once into a frozen value."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.cli.bench.prompts import GeneratedPrompts, Length, ListedPrompts, PromptSource
from dynamo.cli.bench.schedule import Shape
from dynamo.cli.bench.targets import ENDPOINT_PATHS, Target, headers_from
from dynamo.cli.usage import UsageError
from dynamo.settings.command import CommandParser

__all__ = ["BenchOptions", "read_options"]

DEFAULT_CONCURRENCY: Final = 16
DEFAULT_SECONDS: Final = 30.0
MAX_CONNECTIONS: Final = 60_000  # there are no more ports to one address
OPEN_LOOP_CONNECTIONS: Final = 4096

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
    models: tuple[str, ...]  # empty: ask the server
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
    """Raises UsageError; leaves as argparse does for `--help`."""
    given = _parser().parse_args(argv)
    if given.rate is not None and given.concurrency is not None:
        raise UsageError("--rate and --concurrency exclude each other; --max-connections bounds an open loop")
    if given.rate is None and (given.constant or given.max_connections is not None):
        raise UsageError("--constant and --max-connections belong to an open loop; add --rate")
    if given.prompts is not None and (given.input_tokens is not None or given.shared_prefix_tokens):
        raise UsageError("--prompts brings its own prompts; leave --input-tokens and --shared-prefix-tokens out")
    if given.prefix_groups != 1 and not given.shared_prefix_tokens:
        raise UsageError("--prefix-groups needs --shared-prefix-tokens")
    seconds = given.duration
    if seconds is None and given.requests is None:
        seconds = DEFAULT_SECONDS
    prompts: PromptSource
    if given.prompts is not None:
        prompts = ListedPrompts.read(given.prompts)
        if prompts.has_messages and "completions" in (given.endpoint or ()):
            raise UsageError(f'--prompts {given.prompts} has "messages", which only --endpoint chat takes')
    else:
        length = Length.of(given.input_tokens or "128", "--input-tokens")
        if given.shared_prefix_tokens >= length.mean:
            raise UsageError("--shared-prefix-tokens must be less than --input-tokens")
        prompts = GeneratedPrompts(
            length, prefix_tokens=given.shared_prefix_tokens, groups=given.prefix_groups, seed=given.seed
        )
    for path in (given.json, given.html):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"cannot write {path}: there is no such directory")
    headers = headers_from(given.header)
    shape = Shape(
        connections=(given.concurrency or DEFAULT_CONCURRENCY)
        if given.rate is None
        else given.max_connections or OPEN_LOOP_CONNECTIONS,
        requests=given.requests,
        seconds=seconds,
        rate=given.rate,
        is_even=given.constant,
        timeout_seconds=given.timeout,
    )
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    settings["header"] = sorted(headers)  # names only: a value may be a secret
    return BenchOptions(
        targets=tuple(Target.of(url, headers=headers, verify=not given.insecure) for url in given.url),
        shape=shape,
        warmup=given.warmup,
        models=tuple(given.model or ()),
        endpoints=tuple(given.endpoint or ("chat",)),
        is_stream=given.stream,
        output=Length.of(given.output_tokens, "--output-tokens"),
        prompts=prompts,
        are_prompts_generated=given.prompts is None,
        extra_body=_body(given.body),
        seed=given.seed,
        json_file=given.json,
        html_file=given.html,
        settings=settings,
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        "dynamo bench",
        usage="dynamo bench URL [URL ...] [options]\n       dynamo bench replay [PRESET ...] [options]",
        description="Load an OpenAI-compatible server and report throughput and latency.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("url", nargs="+", metavar="URL", help="of the server; several take turns")
    add(
        "--concurrency",
        type=_count(MAX_CONNECTIONS),
        metavar="N",
        help=f"closed loop: how many send at once (default: {DEFAULT_CONCURRENCY})",
    )
    add("--rate", type=_positive, metavar="R", help="open loop: requests per second, a Poisson process")
    add("--constant", action="store_true", help="with --rate: the same time between requests")
    add(
        "--max-connections",
        type=_count(MAX_CONNECTIONS),
        metavar="N",
        help=f"with --rate: connections at once; more requests wait (default: {OPEN_LOOP_CONNECTIONS})",
    )
    add("--requests", type=_count(10**12), metavar="N", help="stop after N requests")
    add(
        "--duration",
        type=_positive,
        metavar="S",
        help=f"send for S seconds (default: {DEFAULT_SECONDS:g}, without --requests)",
    )
    add("--warmup", type=_count(10**6, 0), default=0, metavar="N", help="requests before, not reported (default: 0)")
    add("--timeout", type=_positive, default=600.0, metavar="S", help="give a request up after (default: 600)")
    add("--model", action="append", metavar="NAME", help="repeat it: models take turns (default: the server's first)")
    add(
        "--endpoint",
        action="append",
        choices=tuple(ENDPOINT_PATHS),
        help="repeat it: endpoints take turns (default: chat)",
    )
    add("--stream", action=argparse.BooleanOptionalAction, default=True, help="stream the answers (default: on)")
    add("--input-tokens", metavar="N|MEAN,STDDEV", help="length of generated prompts (default: 128)")
    add(
        "--output-tokens",
        default="128",
        metavar="N|MEAN,STDDEV",
        help="max_tokens of the requests (default: %(default)s)",
    )
    add("--prompts", type=Path, metavar="FILE", help="prompts, one per line; .jsonl: objects")
    add(
        "--shared-prefix-tokens",
        type=_count(4_000_000, 0),
        default=0,
        metavar="N",
        help="generated prompts of a group begin with the same N tokens",
    )
    add("--prefix-groups", type=_count(100_000), default=1, metavar="N", help="how many such groups (default: 1)")
    add("--body", metavar="JSON", help="more members of every request, such as '{\"temperature\": 0}'")
    add("--header", action="append", default=[], metavar="'NAME: VALUE'", help="one more header; repeat it for more")
    add("--insecure", action="store_true", help="take any certificate of an https server")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals, lengths and prompts (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    add("--html", type=Path, metavar="FILE", help="write a report with plots; it needs no network")
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9 or math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _count(most: int, least: int = 1) -> Any:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is out of range; use {least} to {most}")
        return int(text)

    return read


def _body(text: str | None) -> dict[str, Any]:
    try:
        body = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise UsageError(f"--body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise UsageError('--body is not a JSON object; use one such as {"temperature": 0}')
    return body
