"""The parsers of all commands, for what describes them: completion of a shell, and the test of the settings page."""

from __future__ import annotations

import importlib
import inspect
from typing import Final

from dynamo.cli.engines import BUILT_IN
from dynamo.cli.main import COMMANDS
from dynamo.settings.command import CommandParser

# Words that may stand behind a flag, although others may, too.
FLAG_WORDS: Final = {"--engine": tuple(sorted(BUILT_IN))}

HOMES: Final = {
    **{name: module for name, (module, _) in COMMANDS.items()},
    "bench": "dynamo.cli.bench.options",
    "bench replay": "dynamo.cli.bench.replay.options",
}
"""The module with `build_parser()`, or `build_parser(environment)`, of each command."""


def first_words() -> dict[str, tuple[str, ...]]:
    """Return the words that may come first behind a command, although others may, too."""
    presets = importlib.import_module("dynamo.replay.presets").PRESETS
    return {"conformance": tuple(sorted(BUILT_IN)), "bench replay": tuple(presets)}


def command_parsers() -> dict[str, CommandParser]:
    """Make the parser of each command, by its name (`bench replay` is one); no environment is read."""
    return {name: _parser_of(home) for name, home in HOMES.items()}


def _parser_of(home: str) -> CommandParser:
    build = importlib.import_module(home).build_parser
    parser: CommandParser = build({}) if inspect.signature(build).parameters else build()
    return parser
