"""The parsers of all commands, for what describes them: completion of a shell, and the test of the settings page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dynamo.cli import batch, chat, completion, conformance, explain, keys, new, serve, simulate, status, top
from dynamo.cli.bench import options as bench
from dynamo.cli.bench.replay import options as replay
from dynamo.cli.doctor import command as doctor
from dynamo.cli.engines import BUILT_IN
from dynamo.cli.replay import command as resend
from dynamo.replay.presets import PRESETS
from dynamo.settings.command import CommandParser

__all__ = ["FIRST_WORDS", "FLAG_WORDS", "command_parsers"]

# Words that may stand behind a flag, or come first behind a command, although others may, too.
FLAG_WORDS: Final[Mapping[str, tuple[str, ...]]] = {"--engine": tuple(sorted(BUILT_IN))}
FIRST_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "conformance": tuple(sorted(BUILT_IN)),
    "bench replay": tuple(PRESETS),
}


def command_parsers() -> dict[str, CommandParser]:
    """Make the parser of each command, by its name (`bench replay` is one); no environment is read."""
    return {
        "serve": serve.build_parser({}),
        "chat": chat.build_parser({}),
        "new": new.build_parser(),
        "conformance": conformance.build_parser(),
        "keys": keys.build_parser({}),
        "simulate": simulate.build_parser(),
        "batch": batch.build_parser({}),
        "explain": explain.build_parser(),
        "replay": resend.build_parser({}),
        "top": top.build_parser({}),
        "status": status.build_parser({}),
        "doctor": doctor.build_parser({}),
        "bench": bench.build_parser(),
        "bench replay": replay.build_parser(),
        "completion": completion.build_parser(),
    }
