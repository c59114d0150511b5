"""`dynamo status`: whether everything that a frontend knows of is ready, on one screen, and as an exit status."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec

from dynamo.cli.api_client import ServerError
from dynamo.cli.inspect.client import ViewQuery
from dynamo.cli.inspect.figures import age, count, percent
from dynamo.cli.inspect.flags import InspectFlags
from dynamo.cli.inspect.lines import plain_text
from dynamo.cli.inspect.plain import table_lines
from dynamo.cli.inspect.printable import printable
from dynamo.protocol.inspector.views import Picture
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import switch
from dynamo.settings.table import read_settings, setting, settings_of

EXIT_READY: Final = 0
EXIT_NOT_READY: Final = 1
EXIT_UNREACHABLE: Final = 2
VIEWS: Final = ("fleet", "frontends", "models", "workers", "streams")
MOST_STREAMS: Final = 1000
ERROR_SHARE: Final = 0.01  # of the requests of the last minute

_DESCRIPTION: Final = "Say whether everything is ready: frontends, models and why not, workers, and what else is wrong."
_EPILOG: Final = """\
exit status:
  0  all is ready: each model, worker and process of the frontend
  1  something is not: a model without the workers it needs, a worker that starts or is quarantined, a process that does
     not answer or is leaving, or there is no model at all. A worker that drains was told to, and does not count
  2  the frontend cannot be reached, or does not let this key ask (also: a mistake in the command line)

What is wrong but keeps nobody from being served, as stalled requests or errors of the last minute, is listed as a warning
and does not change the exit status.

example:
  dynamo status --json | jq '.troubles[].text'
  until dynamo status --url http://10.0.0.5:8000 >/dev/null; do sleep 1; done
"""


@dataclass(frozen=True, slots=True)
class StatusFlags(InspectFlags):
    """The frontend to call, and the form of the output."""

    # fmt: off
    json: bool = setting(False, None, switch, "Write JSON", flag="--json", negative="")
    # fmt: on


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is not as it should be."""

    subject: str  # frontend, model, worker or requests, and which
    text: str
    is_unready: bool  # it counts for the exit status


def build_parser(env: Mapping[str, str]) -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser("dynamo status", description=_DESCRIPTION, epilog=_EPILOG)
    add_flags(parser, (made for _, made in settings_of(StatusFlags)), env)
    return parser


def main(argv: list[str]) -> int:
    """Show the status; return the exit status."""
    flags = read_settings(StatusFlags, os.environ, vars(build_parser(os.environ).parse_args(argv)))
    try:
        picture = flags.client().picture(ViewQuery(VIEWS, MOST_STREAMS))
    except ServerError as error:
        if flags.json:
            print(json.dumps({"url": flags.url, "is_ready": None, "error": str(error)}))
        else:
            print(f"dynamo status: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    troubles = list(troubles_of(picture))
    is_ready = not any(trouble.is_unready for trouble in troubles)
    if flags.json:
        print(json.dumps(_as_json(flags.url, picture, troubles, is_ready=is_ready)))
    else:
        print("\n".join(_screen(flags.url, picture, troubles, is_ready=is_ready)))
    return EXIT_READY if is_ready else EXIT_NOT_READY


# -- what is wrong -----------------------------------------------------------------------------------------------------


def troubles_of(picture: Picture) -> Iterator[Trouble]:
    """Walk what is not as it should be, the worst first."""
    yield from sorted(_troubles(picture), key=lambda trouble: not trouble.is_unready)


def _troubles(picture: Picture) -> Iterator[Trouble]:
    models = picture.models or []
    if not models:
        yield Trouble("models", "there is no model: no worker has registered one", True)
    for model in models:
        if not model.is_ready:
            yield Trouble(f"model {model.id}", f"not ready: {model.why_not or 'the frontend does not say why'}", True)
    for member in picture.partial:
        yield Trouble(f"frontend {member}", "no answer in time", True)
    for frontend in picture.frontends or []:
        if frontend.stage != "serving":
            yield Trouble(f"frontend {frontend.id}", frontend.stage, True)
    for worker in picture.workers or []:
        if worker.state == "ready":
            continue
        yield Trouble(
            f"worker {worker.id}",
            worker.state + (f": {worker.note}" if worker.note else ""),
            worker.state != "draining",
        )
    stalled = sum(stream.is_stalled for stream in picture.streams or [])
    if stalled:
        yield Trouble("requests", f"{count(stalled)} stalled: dynamo top --filter stalled shows them", False)
    now = picture.fleet.now if picture.fleet else None
    if now is not None and (now.error_share or 0.0) >= ERROR_SHARE:
        yield Trouble(
            "requests", f"{percent(now.error_share)} % of the last minute failed: dynamo top --view errors", False
        )
    if now is not None and now.shed_per_second > 0:
        yield Trouble("requests", f"{now.shed_per_second:.1f} a second are turned away: the limits are reached", False)


# -- how it is shown ---------------------------------------------------------------------------------------------------


def _screen(url: str, picture: Picture, troubles: list[Trouble], *, is_ready: bool) -> Iterator[str]:
    fleet = picture.fleet
    verdict = "ready" if is_ready else "NOT READY"
    about = "" if fleet is None else f"  {fleet.cluster}, up {age((picture.taken_ms - fleet.started_ms) / 1000)}"
    yield printable(f"{verdict}  {url}{about}")
    for view in ("frontends", "models", "workers"):
        rows = getattr(picture, view) or []
        yield ""
        yield f"{view} {len(rows)}" + _not_ready(view, rows)
        yield from (plain_text(line) for line in table_lines(picture, view, None))
    yield ""
    yield "wrong" if troubles else "nothing is wrong"
    for trouble in troubles:
        yield printable(f" {'!' if trouble.is_unready else '-'} {trouble.subject}: {trouble.text}")


def _not_ready(view: str, rows: list[Any]) -> str:
    unready = 0
    if view == "models":
        unready = sum(not model.is_ready for model in rows)
    elif view == "workers":
        unready = sum(worker.state != "ready" for worker in rows)
    return f", {unready} not ready" if unready else ""


def _as_json(url: str, picture: Picture, troubles: list[Trouble], *, is_ready: bool) -> dict[str, Any]:
    plain = msgspec.to_builtins(picture)
    shown = {view: plain[view] for view in ("fleet", "frontends", "models", "workers")}
    return {"url": url, "is_ready": is_ready, "troubles": [asdict(trouble) for trouble in troubles], **shown}
