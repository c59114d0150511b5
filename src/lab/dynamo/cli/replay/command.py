"""`dynamo replay FILE`: send recorded requests again and compare, or answer from their recording."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from dynamo.cli.api_client import ServerFlags
from dynamo.cli.bench.targets import Target
from dynamo.cli.replay.answers import ReplayedAnswer, take_object
from dynamo.cli.replay.sending import ResentRequest, SendLimits, send_all
from dynamo.cli.usage import UsageError
from dynamo.engines.recorded.files import RecordedRequest, read_recordings
from dynamo.errors import InvalidArgument
from dynamo.frontend.base.failures import message_template
from dynamo.frontend.http.settings import ROUTES
from dynamo.runtime.observe.log_text import one_line
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import above_zero, integer, placeholder, port, switch, text
from dynamo.settings.table import read_settings, setting, settings_of

# The options of `dynamo replay`.


@dataclass(frozen=True, slots=True)
class ResendFlags(ServerFlags):
    """How recorded requests are sent again, or served."""

    # fmt: off
    serve: bool = setting(False, None, switch, "Answer requests from the recording, without an engine, instead of sending them",
        flag="--serve", negative="")
    speed: float = setting(1.0, None, above_zero(), "How many times as fast as they came", flag="--speed")
    as_fast_as_possible: bool = setting(False, None, switch, "Do not wait for the recorded times",
        flag="--as-fast-as-possible", negative="")
    limit: int | None = setting(None, None, integer(1), "Send so many requests at most", flag="--limit")
    only: str | None = setting(None, None, placeholder("ID", text), "Send one request, by its id or the beginning of it", flag="--only")
    concurrency: int = setting(64, None, integer(1, 4096), "Requests in flight at most; further ones wait, and are late", flag="--concurrency")
    timeout_seconds: float = setting(600.0, None, above_zero(), "How long an answer may take", flag="--timeout")
    json: bool = setting(False, None, switch, "Write the comparison as JSON", flag="--json", negative="")
    http_port: int = setting(8000, "DYN_HTTP_PORT", port, "With `--serve`: the port to listen on", flag="--http-port")
    # fmt: on


# What a replay has in common with its recording. Pure.

SHOWN: Final = 20  # differences that are printed
_MAX_TEXT: Final = 200


class Difference(Struct, frozen=True):
    """One thing that is not as it was."""

    id: str
    what: str
    recorded: Any
    replayed: Any


class ReplayComparison(Struct, frozen=True):
    """One request."""

    replayed: ResentRequest
    compared: Sequence[str]  # status, error, finish_reason, input_tokens, output_tokens, text
    differences: Sequence[Difference]


def compare_all(found: Sequence[ResentRequest]) -> list[ReplayComparison]:
    """Compare them all."""
    return [compare(each) for each in found]


def compare(found: ResentRequest) -> ReplayComparison:
    """Compare one request with its recording.

    How it ended is always compared. Its text is compared where the request is the recorded one, word for word, and its
    answer does not depend on chance; its length in tokens, too.
    """
    request, answer = found.request, found.answer
    pairs: dict[str, tuple[Any, Any]] = {}
    if request.status is not None:
        pairs["status"] = (request.status, answer.status)
        if request.error and request.status >= 400 and answer.status >= 400:
            pairs["error"] = (message_template(request.error), message_template(answer.error))
    is_answered = request.status == 200
    if is_answered and request.is_whole:
        pairs["input_tokens"] = (request.input_tokens, answer.input_tokens)
        if _is_deterministic(request.body or {}):
            pairs["finish_reason"] = (request.finish_reason, answer.finish_reason)
            pairs["output_tokens"] = (request.output_tokens, answer.output_tokens)
            if request.response is not None:
                pairs["text"] = (_text_of(request.response), answer.texts)
    known = {
        name: pair for name, pair in pairs.items() if pair[0] is not None and (pair[1] is not None or name == "text")
    }
    differences = [
        Difference(request.id, name, before, now) for name, (before, now) in known.items() if not _equal(before, now)
    ]
    if answer.status == 0 and "status" not in known:
        differences.append(Difference(request.id, "status", None, answer.error))
    return ReplayComparison(found, tuple(known), differences)


def _equal(before: object, now: object) -> bool:
    return bool(before == now)


def _is_deterministic(body: Mapping[str, object]) -> bool:
    """Return whether two answers of one engine to a request are the same."""
    return body.get("temperature") == 0 or body.get("seed") is not None or body.get("top_k") == 1


def _text_of(response: Mapping[str, object]) -> dict[int, str]:
    answer = ReplayedAnswer(200)
    take_object(answer, response)
    return answer.texts


def table(found: Sequence[ReplayComparison]) -> list[str]:
    """Return the summary in lines."""
    lines = [f"{'':14}{'compared':>10}{'equal':>10}{'different':>11}"]
    for name in ("status", "error", "finish_reason", "input_tokens", "output_tokens", "text"):
        compared = sum(name in each.compared for each in found)
        if compared:
            wrong = sum(difference.what == name for each in found for difference in each.differences)
            lines.append(f"{name:14}{compared:>10,}{compared - wrong:>10,}{wrong:>11,}")
    for name, before, now in (
        ("ttft", [each.replayed.request.ttft_ms for each in found], [each.replayed.answer.ttft_ms for each in found]),
        (
            "total",
            [each.replayed.request.total_ms for each in found],
            [each.replayed.answer.total_ms for each in found],
        ),
    ):
        if any(value is not None for value in before) and any(value is not None for value in now):
            lines.append(f"{name:14}recorded {_spread(before)}   replayed {_spread(now)}")
    differences = [difference for each in found for difference in each.differences]
    lines += [
        f"{each.id}: {each.what} was {_shown(each.recorded)}, is {_shown(each.replayed)}"
        for each in differences[:SHOWN]
    ]
    if len(differences) > SHOWN:
        lines.append(f"and {len(differences) - SHOWN:,} further differences (--json shows them)")
    made_up = sum(not each.replayed.request.is_whole for each in found)
    if made_up:
        lines.append(f"{made_up:,} of {len(found):,} were sent with made-up texts: their content was not recorded")
    return lines


def as_json(found: Sequence[ReplayComparison]) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    return {
        "requests": len(found),
        "different": sum(bool(each.differences) for each in found),
        "results": [
            {
                "id": each.replayed.request.id,
                "path": each.replayed.request.path,
                "status": each.replayed.answer.status,
                "error": each.replayed.answer.error or None,
                "compared": list(each.compared),
                "differences": [
                    {"what": one.what, "recorded": one.recorded, "replayed": one.replayed} for one in each.differences
                ],
                "is_whole": each.replayed.request.is_whole,
                "left_out": list(each.replayed.left_out),
                "ttft_ms": each.replayed.answer.ttft_ms,
                "total_ms": each.replayed.answer.total_ms,
                "late_ms": each.replayed.answer.late_ms,
            }
            for each in found
        ],
    }


def _spread(values: Sequence[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return f"p50 {known[len(known) // 2]:,.0f} ms, p99 {known[min(len(known) - 1, len(known) * 99 // 100)]:,.0f} ms"


def _shown(value: Any) -> str:
    text = str(value) if not isinstance(value, dict) else " | ".join(value[key] for key in sorted(value))
    return repr(text[:_MAX_TEXT] + ("…" if len(text) > _MAX_TEXT else ""))


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
