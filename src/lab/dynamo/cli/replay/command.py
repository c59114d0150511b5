"""`dynamo replay FILE`: send recorded requests again and compare, or answer from their recording."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from dynamo.cli.bench.targets import Target
from dynamo.cli.replay.comparing import as_json, compare_all, table
from dynamo.cli.replay.flags import ResendFlags
from dynamo.cli.replay.sending import ResentRequest, SendLimits, send_all
from dynamo.cli.usage import UsageError
from dynamo.engines.recorded.files import RecordedRequest, read_recordings
from dynamo.errors import InvalidArgument
from dynamo.frontend.http.settings import ROUTES
from dynamo.runtime.observe.log_text import one_line
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.table import read_settings, settings_of

EXIT_DIFFERENT: Final = 1
PROGRESS_SECONDS: Final = 2.0
_SHOWN_PATH: Final = 128
_OVERRIDABLE: Final = ("chat", "completions", "responses", "messages", "embeddings")
_FIXED: Final = frozenset(
    {
        "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/classify", "/classify", "/v1/pooling", "/pooling",
        "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/audio/speech", "/v1/images/generations",
        "/v1/videos",
    }
)  # fmt: skip

_DESCRIPTION: Final = "Send recorded requests again and compare the answers, or answer requests from a recording."
_EPILOG: Final = """\
FILE is a recording (DYN_REQUEST_TRACE=1, see docs/recording.md) or the bundle of a failed request.

Where content was recorded the requests are sent as they were; otherwise texts of the same lengths take their place, and only
how a request ends is compared. The exit status is 0 where everything that was compared is equal, 1 where something differs.

With --serve nothing is sent: requests that are in FILE get their recorded answers, at the recorded times, without an engine.

For traces over simulated workers, in virtual time and without requests: dynamo bench replay.

example:
  dynamo replay /tmp/dynamo-request-trace.7.000000.jsonl.gz --url http://127.0.0.1:8000 --speed 2
  dynamo replay --serve /tmp/dynamo-request-trace.7.000000.jsonl.gz --http-port 9000
"""


def build_parser(env: Mapping[str, str]) -> CommandParser:
    """Make the parser of this command."""
    usage = "dynamo replay FILE ... [options]"
    parser = CommandParser("dynamo replay", description=_DESCRIPTION, epilog=_EPILOG, usage=usage)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", type=Path, help="a recording, or a bundle of a failed request"
    )
    add_flags(parser, (made for _, made in settings_of(ResendFlags)), env)
    return parser


def main(argv: list[str]) -> int:
    """Replay; return the exit status."""
    given = build_parser(os.environ).parse_args(argv)
    flags = read_settings(ResendFlags, os.environ, vars(given))
    if flags.serve:
        return _serve(given.files, flags)
    try:
        requests = chosen_requests(read_recordings(given.files), flags, inference_paths(os.environ))
    except InvalidArgument as error:
        raise UsageError(one_line(str(error))) from error
    headers = {"Authorization": f"Bearer {flags.api_key}"} if flags.api_key else {}
    target = Target.of(flags.url, headers=headers)
    limits = SendLimits(0.0 if flags.as_fast_as_possible else flags.speed, flags.concurrency, flags.timeout_seconds)
    found = compare_all(asyncio.run(send_all(requests, target, limits, _Progress(len(requests)))))
    if flags.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        print("\n".join(map(one_line, table(found))))  # ids and texts of a stranger's file must not steer the terminal
    return EXIT_DIFFERENT if any(each.differences for each in found) else 0


def inference_paths(env: Mapping[str, str]) -> frozenset[str]:
    """Return the paths that a replay may post to: the usual ones, and those that this environment's settings name.

    A recording is only a file, and may come from a stranger. A request for an admin route in it would be sent with the
    operator's own key.
    """
    routes = [ROUTES[name] for name in _OVERRIDABLE]
    return _FIXED | {str(route.default) for route in routes} | {str(route.value(env)) for route in routes}


def chosen_requests(
    requests: Sequence[RecordedRequest], flags: ResendFlags, paths: Collection[str]
) -> list[RecordedRequest]:
    """Return the requests that are to be sent: those of `paths`. Raises UsageError where there are none."""
    # What its client gave up on has no answer to compare with.
    found = [request for request in requests if request.body is not None and request.path and request.status != 499]
    if not found:
        raise UsageError(f"none of {len(requests)} recorded requests can be sent: their bodies were not recorded")
    if foreign := [request.path for request in found if request.path not in paths]:
        found = [request for request in found if request.path in paths]
        text = f"{len(foreign)} recorded requests are left out: {one_line(foreign[0], _SHOWN_PATH)!r} is not an inference route"
        if not found:
            raise UsageError(text)
        print(text, file=sys.stderr)
    if flags.only is not None:
        found = [request for request in found if request.id.startswith(flags.only)]
        if not found:
            raise UsageError(f"no recorded request has an id that begins with {flags.only!r}")
    return found[: flags.limit]


def _serve(files: Sequence[Path], flags: ResendFlags) -> int:
    """Serve the recording until a signal."""
    from dynamo.cli.serve import main as serve

    recordings = [part for file in files for part in ("--recording", str(file))]
    fast = ["--as-fast-as-possible"] if flags.as_fast_as_possible else []
    engine = "dynamo.engines.recorded.engine:RecordedEngine"
    own = ["--in-process", "--engine", engine, "--http-port", str(flags.http_port)]
    return serve([*own, "--", *recordings, *fast])


class _Progress:
    """Reports on stderr how far a replay has come: always on a terminal, elsewhere every two seconds."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._failed = total, 0, 0
        self._shown_at = time.monotonic()

    def __call__(self, made: ResentRequest) -> None:
        self._done += 1
        self._failed += made.answer.status != made.request.status
        now = time.monotonic()
        if now - self._shown_at >= PROGRESS_SECONDS or (self._done == self._total and sys.stderr.isatty()):
            self._shown_at = now
            other = f", {self._failed} with another status" if self._failed else ""
            print(f"{self._done} of {self._total} answered{other}", file=sys.stderr)
