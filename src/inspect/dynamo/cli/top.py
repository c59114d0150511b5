"""`dynamo top`: what a served system is doing, live in the terminal, or once as text or JSON."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dynamo.cli.api_client import EXIT_FAILED, ServerError
from dynamo.cli.inspect.client import InspectorClient, ViewQuery
from dynamo.cli.inspect.flags import InspectFlags
from dynamo.cli.inspect.lines import Tone, plain_text
from dynamo.cli.inspect.plain import picture_lines
from dynamo.cli.usage import PlainRefusal, UsageError
from dynamo.protocol.inspector.views import VIEWS
from dynamo.settings.command import CommandParser
from dynamo.settings.extras import install_command
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import SettingReader, integer, switch, text
from dynamo.settings.table import read_settings, setting, settings_of

# The colours of tones, in the sixteen colours that every terminal has: they follow its own light or dark scheme.

_STYLES: Final[Mapping[Tone, str]] = MappingProxyType(
    {
        Tone.NORMAL: "",
        Tone.DIM: "dim",
        Tone.STRONG: "bold",
        Tone.GOOD: "green",
        Tone.WARN: "yellow",
        Tone.BAD: "bold red",
        Tone.ACCENT: "cyan",
    }
)


def rich_style(tone: Tone) -> str:
    """Return the style of a tone for the printer of `--once`."""
    return _STYLES[tone]


ONCE_VIEWS: Final = ("workers", "streams")
MOST_ROWS: Final = 1000  # of a view, of the live screen; the server reports how many there are

LOADS_SECONDS: Final = 3.5  # workers report unchanged loads every 2.5 s
LOADS_PERIOD_SECONDS: Final = 0.25

_DESCRIPTION: Final = "Show what a served system is doing: models, workers, requests in flight, caches, errors."
_EPILOG: Final = """\
The live screen needs the package textual (the extra `inspect`); --once needs nothing. Its keys are on the
screen, and behind ? all of them.

A frontend that was started without keys on this machine is asked without a key. Elsewhere: --key, or DYN_API_KEY.

example:
  dynamo top --view streams --filter 'model:demo age>30'
  dynamo top --url https://serve.example:8000
  dynamo top --once --view models,errors | less -S
  dynamo top --once --json | jq .fleet.now
"""


def _views(given: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    wrong = [name for name in found if name not in VIEWS]
    if wrong or not found:
        raise ValueError(f"{', '.join(map(repr, wrong)) or 'nothing'} is not a view; there is {', '.join(VIEWS)}")
    return found


@dataclass(frozen=True, slots=True)
class TopFlags(InspectFlags):
    """What to show, and how."""

    # fmt: off
    view: tuple[str, ...] = setting((), None, SettingReader(_views, show=",".join, metavar="VIEW"),
        "What to show: `workers`, `streams`, `models`, `residents`, `frontends`, `recent`, `routing`, `caches`, `prefixes`, `errors`, `events`; with `--once` several, with commas between them",
        flag="--view", shown="workers,streams")
    filter: str = setting("", None, text, "Which streams to show, as in `model:demo age>5 stalled`", flag="--filter")
    limit: int = setting(MOST_ROWS, None, integer(1, MOST_ROWS), "At most so many entries of each view", flag="--limit")
    once: bool = setting(False, None, switch, "Show one picture as text and leave", flag="--once", negative="")
    plain: bool = setting(False, None, switch, "With `--once`: no colours; implied where the output is not a terminal", flag="--plain", negative="")
    json: bool = setting(False, None, switch, "With `--once`: the picture as the API gives it", flag="--json", negative="")
    width: int | None = setting(None, None, integer(40), "With `--once`: cut lines to so many cells", flag="--width",
        shown="the terminal's, or no limit in a pipe")
    # fmt: on


def build_parser(env: Mapping[str, str]) -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser("dynamo top", description=_DESCRIPTION, epilog=_EPILOG)
    add_flags(parser, (made for _, made in settings_of(TopFlags)), env)
    return parser


def main(argv: list[str]) -> int:
    """Show the system; return the exit status."""
    flags = read_settings(TopFlags, os.environ, vars(build_parser(os.environ).parse_args(argv)))
    if flags.once:
        return _once(flags)
    if flags.plain or flags.json or flags.width is not None:
        raise UsageError("--plain, --json and --width need --once")
    if not sys.stdout.isatty():
        raise UsageError("the live screen needs a terminal; use --once in a pipe")
    if importlib.util.find_spec("textual") is None:
        raise PlainRefusal(
            f"dynamo top: the live screen needs textual: {install_command('inspect')}; dynamo top --once works without it"
        )
    from dynamo.cli.inspect.app import InspectorApp

    return InspectorApp(flags.client(), view=flags.view[0] if flags.view else "", filter=flags.filter).run() or 0


def _wait_for_loads(client: InspectorClient) -> None:
    """Wait until the workers have reported their loads, for LOADS_SECONDS at most.

    A frontend follows loads only while a viewer polls it, so the first poll begins to.
    """
    until = time.monotonic() + LOADS_SECONDS
    while any(
        row.kv_blocks_total and row.kv_blocks_used is None
        for row in client.picture(ViewQuery(("workers",), MOST_ROWS)).workers or ()
    ):
        if time.monotonic() >= until:
            return
        time.sleep(LOADS_PERIOD_SECONDS)


def _once(flags: TopFlags) -> int:
    views = flags.view or ONCE_VIEWS
    query = ViewQuery(("fleet", *(view for view in views if view != "fleet")), flags.limit, flags.filter)
    client = flags.client()
    try:
        _wait_for_loads(client)
        if flags.json:
            print(json.dumps(json.loads(client.picture_bytes(query))))
            return 0
        picture = client.picture(query)
    except ServerError as error:
        print(f"dynamo top: {error}", file=sys.stderr)
        return EXIT_FAILED
    width = flags.width or (shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    lines = picture_lines(picture, [view for view in views if view != "fleet"], width)
    if flags.plain or not sys.stdout.isatty():
        print("\n".join(map(plain_text, lines)))
        return 0
    from rich.console import Console  # tones need it, plain text does not
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        console.print(Text.assemble(*((piece.text, rich_style(piece.tone)) for piece in line)), soft_wrap=True)
    return 0
